"""What run.json says of a run itself, and the model FLOPs that its MFU counts."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxdist.data import Dataset
from jaxdist.hardware import chips
from jaxdist.models import lora, registry
from jaxdist.optim.roles import role_of
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.gradients import build_objective
from jaxdist.step.train_step import TrainStep
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer import extension
from jaxdist.trainer.batching import batch_shapes, targets_per_sample, unit
from jaxdist.trainer.build import (
    active_parameters,
    active_share,
    context_lines,
    placements,
)
from jaxdist.trainer.run_config import (
    RunConfig,
    run_fingerprint,
)


def describe_run(
    run: RunConfig,
    spec: ModelSpec,
    built: TrainStep,
    dataset: Dataset,
    schedule: ScheduleSteps,
) -> dict[str, Any]:
    """Returns what run.json says of the run itself: devices, mesh, fingerprints, sizes,
    shardings.
    """
    devices = built.mesh.devices
    # how attention sees sequences that devices share out
    split = context_lines(run, built.rules)
    return {
        "platform": devices.flat[0].platform,
        "device_kind": devices.flat[0].device_kind,
        "num_devices": devices.size,
        "num_processes": jax.process_count(),
        "mesh": dict(built.rules.shape.sizes),
        "zero": run.mesh.zero,
        "accumulation": run.batch.accumulation,
        "fingerprints": {"config": run_fingerprint(run), "data": dataset.fingerprint},
        extension.SCHEDULE_KEY: schedule.to_json(),
        "parameters": spec.parameter_count,
        "active_parameters": active_parameters(run, spec),
        "unit": unit(run),
        "flops_per_token": model_flops(run, spec),
        "mfu_peak": {
            "dtype": run.precision.peak,
            "flops_per_s": _mfu_peak(run, devices.flat[0]),
        },
        "sharding": [
            {
                "parameter": placed.path,
                "dims": list(placed.dims),
                "names": list(placed.names),
                "stored": str(placed.stored),
                "state": str(placed.state),
                "per_device": list(placed.shard_dims),
                "bytes": placed.shard_bytes,
                "copies": placed.replicated_bytes,
                "why": placed.why,
            }
            for placed in placements(run, spec, built.rules)
        ],
    } | ({"split_sequences": split} if split else {})


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
