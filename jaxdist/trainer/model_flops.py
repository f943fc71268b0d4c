"""Model FLOPs of a run, and the meter of its speed."""

import jax
from jax.sharding import Mesh

from jaxdist.hardware import chips
from jaxdist.models import lora, registry
from jaxdist.optim.roles import role_of
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.gradients import build_objective
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer.batching import batch_shapes, targets_per_sample
from jaxdist.trainer.run_config import (
    RunConfig,
)
from jaxdist.trainer.step_lines import active_share


def model_flops(run: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Returns model FLOPs per target (forward and backward) by both attention
    conventions.

    By the formula of the model's Config, where it has one; a frozen kernel has no
    gradient of its own, so it takes two thirds. Another model's are counted from its
    forward program, times three; there both conventions are what the program does, and
    all counts as trained.
    """
    length = targets_per_sample(run)
    if formula := registry.model_hook(run.model_config, "flops_per_token"):
        less = _frozen_flops(run, spec)
        return {
            convention: formula(length, convention) - less
            for convention in ("causal", "full")
        }
    batch = batch_shapes(run, 1)
    objective = build_objective(spec, compute=run.precision.compute, remat="none")
    forward = jax.make_jaxpr(lambda t, m, f, b: objective(t, m, f, b, None)[0])
    with execution.activate(compute=run.precision.compute):
        program = forward(spec.trainable, spec.model_state, spec.frozen, batch)
    counted = 3 * jaxpr_flops(program) / length
    return {"causal": counted, "full": counted}


def _frozen_flops(run: RunConfig, spec: ModelSpec) -> float:
    """Returns the FLOPs per token of gradients that frozen kernels don't have, less
    what adapters take.
    """
    less = 0.0
    for path, count in lora.weights(spec.frozen, run.lora).items():
        x, names = spec.named_frozen()[path]
        kind = role_of(path.split("/"), x.shape, names).kind
        tied = bool(run.model.get("tie_embeddings"))
        scores = kind == "embedding" and names[:1] == ("vocab",) and tied
        less += (
            2
            * count
            * active_share(run, names)
            * (kind in ("matrix", "head") or scores)
        )
    trained = spec.named_trainable().values() if run.lora.rank else ()
    return less - sum(6 * x.size * active_share(run, names) for x, names in trained)


def throughput(
    run: RunConfig, spec: ModelSpec, mesh: Mesh, step_flops: float | None = None
) -> Throughput:
    """Returns the meter that turns times into tokens/s, MFU and HFU, which are None on
    unknown chips.

    Args:
      step_flops: of a step's program, all devices together; without them HFU is None.
    """
    flops = model_flops(run, spec)
    return Throughput(
        num_devices=mesh.devices.size,
        peak_flops_per_s=_mfu_peak(run, mesh.devices.flat[0]),
        causal_flops_per_token=flops["causal"],
        full_flops_per_token=flops["full"],
        step_flops=step_flops,
    )


def _mfu_peak(run: RunConfig, device: jax.Device) -> float | None:
    """Returns the FLOP/s of a device that MFU is a share of; None where no such peak is
    published.
    """
    chip = chips.chip_for(device.device_kind)
    return chip.peak(run.precision.peak) if chip else None
