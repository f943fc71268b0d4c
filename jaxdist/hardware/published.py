"""Published MFU of training on a chip, by the size of the model.

Each row has its source. The runs are dense models in bfloat16; some sources count
attention in full and some by its causal half, so the bands are coarse. Chips and sizes
without a publication have no row. Nothing here imports jax.
"""

from dataclasses import dataclass

from jaxdist.hardware.chips import Chip

_B = 1e9


@dataclass(frozen=True)
class Band:
    """Lowest and highest published MFU of models of some sizes on a chip."""

    chip: str  # `Chip.name`
    smallest: float  # parameters
    largest: float
    low: float  # MFU as a share
    high: float
    source: str

    def text(self) -> str:
        """Formats the band: "33 to 49 % on H100 SXM, 5 to 20 B parameters (...)"."""
        share = f"{100 * self.low:.0f} %"
        if round(100 * self.high) > round(100 * self.low):
            share = f"{100 * self.low:.0f} to {100 * self.high:.0f} %"
        sizes = f"{self.smallest / _B:g} to {self.largest / _B:g} B parameters"
        return f"{share} on {self.chip}, {sizes} ({self.source})"


_FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
_MEGATRON = "Megatron-LM README, model table"
_MAXTEXT = "MaxText, configs/tpu/{}/README, attention in full"
_TIERING = "MaxText, docs/reference/models/tiering.md"

# torchtitan's H100s have HBM2e and a limit of 500 W.
# fmt: off
BANDS = (
    Band("TPU v3", 0.345 * _B, 65 * _B, 0.35, 0.54, "Levanter 1.0, on v3-256"),
    Band("TPU v4", 20 * _B, 55 * _B, 0.560, 0.567, _MAXTEXT.format("v4")),
    Band("TPU v5e", 5 * _B, 10 * _B, 0.46, 0.46, "AXLearn, Fuji 7B v2 on 1,024 chips"),
    Band("TPU v5e", 15 * _B, 65 * _B, 0.599, 0.6686, _MAXTEXT.format("v5e")),
    Band("TPU v5p", 30 * _B, 60 * _B, 0.7147, 0.7147, _MAXTEXT.format("v5p")),
    Band("TPU v5p", 60 * _B, 130 * _B, 0.654, 0.7031, f"{_MAXTEXT.format('v5p')}; {_TIERING}"),
    Band("TPU v6e", 7 * _B, 9 * _B, 0.4546, 0.4546, _TIERING),
    Band("TPU v6e", 60 * _B, 80 * _B, 0.438, 0.5033, _TIERING),
    Band("TPU v6e", 400 * _B, 900 * _B, 0.3855, 0.398, _TIERING),
    Band("H100 SXM", 0.7 * _B, 1.2 * _B, 0.349, 0.418, _FOUNDRY),
    Band("H100 SXM", 1.2 * _B, 5 * _B, 0.392, 0.562, f"{_FOUNDRY}; marin-community/marin #6979"),
    Band("H100 SXM", 5 * _B, 20 * _B, 0.33, 0.49, f"torchtitan, llama3_h100_202412; {_MEGATRON}"),
    Band("H100 SXM", 20 * _B, 80 * _B, 0.381, 0.46, f"{_FOUNDRY}; {_MEGATRON}"),
    Band("H100 SXM", 80 * _B, 470 * _B, 0.43, 0.48, _MEGATRON),
)
# fmt: on


def band_for(chip: Chip | None, parameters: float, dtype: str) -> Band | None:
    """Finds the published band of a dense model; None if nothing is published.

    Args:
      chip: the chip; None if it is unknown.
      parameters: number of parameters.
      dtype: dtype of matmuls; the bands are of bfloat16.
    """
    if chip is None or dtype != "bfloat16":
        return None
    for band in BANDS:
        if band.chip == chip.name and band.smallest <= parameters < band.largest:
            return band
    return None
