"""Low-rank adapters on a frozen, perhaps quantised model (LoRA, QLoRA)."""

from jaxdist.adapters.lora import (
    Adapted,
    LoraConfig,
    adapt,
    adapted,
    faults,
    kernels,
    summary,
    unadapted,
    weights,
)

__all__ = [
    "Adapted", "LoraConfig", "adapt", "adapted", "faults", "kernels", "summary", "unadapted", "weights",
]  # fmt: skip
