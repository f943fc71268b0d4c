"""What a token of a run takes: active parameters and model FLOPs; the meter of
speed.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxdist.hardware import chips
from jaxdist.models import lora, registry
from jaxdist.ops import costs
from jaxdist.optim.roles import role_of
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import Terms, module_terms
from jaxdist.protocols.param_names import Names, has_experts
from jaxdist.step.programs import forward_program
from jaxdist.telemetry import flops
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer.compose import Composition, batch_shapes, targets_per_sample
from jaxdist.trainer.costs import costs_of, module_costs
from jaxdist.trainer.run_config import RunConfig


def active_parameters(run: RunConfig, spec: ModelSpec) -> int:
    """Counts the policy's parameters that a token uses: of experts those that it goes
    to.
    """
    return sum(
        round(x.size * active_share(run, names))
        for x, names in spec.named_parameters().values()
    )


def active_share(run: RunConfig, names: Names) -> float:
    """Returns the share of a parameter that a token uses, 1 except for kernels of
    experts whose `Cost` in the model's `costs` declares it.
    """
    if not has_experts(names):
        return 1.0
    return min((cost.active_share for cost in costs_of(run)), default=1.0)


_CONVENTIONS: tuple[flops.Convention, ...] = ("causal", "full")


def model_flops(run: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Counts model FLOPs per target of a step by both attention conventions.

    Those of the policy, forward and backward, and of its objective's frozen modules,
    forward.
    """
    parts = [policy_flops(run, spec)]
    parts += [module_flops(run, module) for module in spec.modules.values()]
    return {
        convention: math.fsum(part[convention] for part in parts)
        for convention in _CONVENTIONS
    }


def module_flops(run: RunConfig, module: ModelSpec) -> dict[str, float]:
    """Counts model FLOPs per target of a frozen module's forward pass.

    A third of what its ops declare for forward and backward, without adapters. Those of
    a model that declares nothing are counted from its program.
    """
    declared = module_costs(run, module)
    if declared:
        return {
            convention: costs.model_flops(declared, convention) / 3
            for convention in _CONVENTIONS
        }

    def terms(frozen: Tree, batch: Mapping[str, jax.Array]) -> Terms:
        return module_terms(module.assemble({}, {}, frozen), batch)

    with execution.activate(compute=run.precision.compute):
        program = jax.make_jaxpr(terms)(module.frozen, batch_shapes(run, 1))
    counted = flops.jaxpr_flops(program) / targets_per_sample(run)
    return dict.fromkeys(_CONVENTIONS, counted)


def policy_flops(run: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Counts model FLOPs per target of the policy (forward and backward) by both
    attention conventions.

    The sum of what the model's ops declare, or what its Config says of
    `flops_per_token`; a frozen kernel has no gradient of its own, so it takes two
    thirds. Another model's are counted from its forward program, times three; there
    both conventions are what the program does, and all counts as trained.
    """
    length = targets_per_sample(run)
    formula = registry.model_hook(run.model_config, "flops_per_token")
    declared = costs_of(run)
    if declared:
        needed = {
            convention: costs.model_flops(declared, convention)
            for convention in _CONVENTIONS
        }
    elif formula:
        needed = {
            convention: formula(length, convention) for convention in _CONVENTIONS
        }
    else:
        counted = _counted(run, spec) / length
        return dict.fromkeys(_CONVENTIONS, counted)
    less = _frozen_flops(run, spec)
    return {convention: count - less for convention, count in needed.items()}


def _counted(run: RunConfig, spec: ModelSpec) -> float:
    """Counts the FLOPs of a sample in the model's forward program, times three."""
    sample = batch_shapes(run, 1)
    program = forward_program(spec, sample, compute=run.precision.compute)
    return 3 * flops.jaxpr_flops(program)


def _frozen_flops(run: RunConfig, spec: ModelSpec) -> float:
    """Counts the FLOPs per token of gradients that frozen kernels don't have, less what
    adapters take.
    """
    less = 0.0
    for path, count in lora.weights(spec.frozen, run.lora).items():
        x, names = spec.named_frozen()[path]
        kind = role_of(path.split("/"), x.shape, names).kind
        tied = bool(run.model.get("tie_embeddings"))
        scores = kind == "embedding" and names[:1] == ("vocab",) and tied
        if kind in ("matrix", "head") or scores:
            less += 2 * count * active_share(run, names)
    trained = spec.named_trainable().values() if run.lora.rank else ()
    return less - sum(6 * x.size * active_share(run, names) for x, names in trained)


def throughput(
    composition: Composition, mesh: Mesh, step_flops: float | None = None
) -> Throughput:
    """Makes the meter that turns times into tokens/s, MFU and HFU, which are None on
    unknown chips.

    Args:
      step_flops: of a step's program, all devices together; without them HFU is None.
    """
    needed = model_flops(composition.config, composition.spec)
    return Throughput(
        num_devices=mesh.devices.size,
        peak_flops_per_s=mfu_peak(composition.config, mesh.devices.flat[0]),
        causal_flops_per_token=needed["causal"],
        full_flops_per_token=needed["full"],
        step_flops=step_flops,
    )


def mfu_peak(run: RunConfig, device: jax.Device) -> float | None:
    """Returns the FLOP/s of a device that MFU is a share of; None where no such peak is
    published.
    """
    chip = chips.chip_for(device.device_kind)
    return chip.peak(run.precision.peak) if chip else None
