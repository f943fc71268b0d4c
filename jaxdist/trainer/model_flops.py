"""The work of a run per token: active parameters, model FLOPs, and the speed meter."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxdist.hardware import chips
from jaxdist.models import lora, registry
from jaxdist.ops import costs
from jaxdist.optim.roles import role_of
from jaxdist.parallel import execution
from jaxdist.protocols.dim_names import Names, has_experts
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.protocols.objective import Objective, Terms, module_terms
from jaxdist.step.forward_program import forward_program
from jaxdist.telemetry import flops
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer.compose import Composition, batch_shapes, targets_per_sample
from jaxdist.trainer.costs import costs_of, module_costs
from jaxdist.trainer.run_config import RunConfig


def total_parameters(config: RunConfig, spec: ModelSpec) -> int:
    """Counts the parameters of the policy, the model in training.

    A quantised kernel counts as many as it stands for.
    """
    return sum(
        lora.weights_in(path, x.size, config.lora)
        for path, (x, _) in spec.named_parameters().items()
    )


def active_parameters(config: RunConfig, spec: ModelSpec) -> int:
    """Counts the parameters that a token uses of the policy, the model in training.

    A token uses only the experts that it is routed to.
    """
    return sum(
        round(lora.weights_in(path, x.size, config.lora) * active_share(config, names))
        for path, (x, names) in spec.named_parameters().items()
    )


def active_share(config: RunConfig, names: Names) -> float:
    """Computes the share of a parameter that a token uses.

    It is 1, except for kernels of experts: the model's `costs` declare their share.
    """
    if not has_experts(names):
        return 1.0
    return min((cost.active_share for cost in costs_of(config)), default=1.0)


_CONVENTIONS: tuple[flops.Convention, ...] = ("causal", "full")


def model_flops(config: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Counts the model FLOPs per target of a step, by both attention conventions.

    They include the policy, forward and backward, and frozen modules, forward only.
    The policy without its adapters counts as such a module.
    """
    parts = [policy_flops(config, spec)]
    parts += [
        module_flops(config, module, spec.objective) for module in spec.modules.values()
    ]
    if spec.objective.base_module:
        parts.append(module_flops(config, spec.all_frozen(), spec.objective))
    return {
        convention: math.fsum(part[convention] for part in parts)
        for convention in _CONVENTIONS
    }


def module_flops(
    config: RunConfig, module: ModelSpec, objective: Objective
) -> dict[str, float]:
    """Counts the model FLOPs per target of a frozen module's forward pass.

    They are a third of the FLOPs that its ops declare for forward and backward. If it
    declares none, they are counted in its program.
    """
    declared = module_costs(config, module)
    if declared:
        return {
            convention: costs.model_flops(declared, convention) / 3
            for convention in _CONVENTIONS
        }

    def terms(frozen: Tree, batch: Mapping[str, jax.Array]) -> Terms:
        return module_terms(objective, module.assemble({}, {}, frozen), batch)

    with execution.activate(compute=config.precision.compute):
        program = jax.make_jaxpr(terms)(module.frozen, batch_shapes(config, 1))
    counted = flops.jaxpr_flops(program) / targets_per_sample(config)
    return dict.fromkeys(_CONVENTIONS, counted)


def policy_flops(config: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Counts the model FLOPs per target of the policy, forward and backward.

    They are the FLOPs that the model's ops declare, or the result of its
    `Config.flops_per_token`, less the gradients of frozen kernels. If the model has
    neither, its forward program is counted, times three. Then both attention
    conventions have the same count, and all parameters count as trained.
    """
    length = targets_per_sample(config)
    formula = registry.model_hook(config.model_config, "flops_per_token")
    declared = costs_of(config)
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
        counted = _count_in_program(config, spec) / length
        return dict.fromkeys(_CONVENTIONS, counted)
    saved = _frozen_flops(config, spec)
    return {convention: count - saved for convention, count in needed.items()}


def _count_in_program(config: RunConfig, spec: ModelSpec) -> float:
    """Counts the FLOPs of a sample in the model's forward program, times three."""
    sample = batch_shapes(config, 1)
    program = forward_program(spec, sample, compute=config.precision.compute)
    return 3 * flops.jaxpr_flops(program)


def _frozen_flops(config: RunConfig, spec: ModelSpec) -> float:
    """Counts the FLOPs per token that frozen kernels save, less those of adapters.

    A frozen kernel needs no gradient, which would take 2 FLOPs per parameter. An
    adapter takes 6 FLOPs per parameter.
    """
    saved = 0.0
    for path, count in lora.weights(spec.frozen, config.lora).items():
        x, names = spec.named_frozen()[path]
        kind = role_of(path.split("/"), x.shape, names).kind
        is_tied = bool(config.model.get("tie_embeddings"))
        is_tied = is_tied and config.model.get("head") != "score"
        is_head = kind == "embedding" and names[:1] == ("vocab",) and is_tied
        if kind in ("matrix", "head") or is_head:
            saved += 2 * count * active_share(config, names)
    if not config.lora.rank:
        return saved
    adapters: float = sum(
        6 * x.size * active_share(config, names)
        for path, (x, names) in spec.named_trainable().items()
        if lora.is_factor(path)
    )
    return saved - adapters


def throughput(
    composition: Composition, mesh: Mesh, step_flops: float | None = None
) -> Throughput:
    """Makes the meter that converts times to tokens/s, MFU and HFU.

    MFU and HFU are None on chips whose peak is unknown.

    Args:
      composition: the run.
      mesh: the devices.
      step_flops: FLOPs of a step's program on all devices together; None: HFU is None.
    """
    needed = model_flops(composition.config, composition.spec)
    return Throughput(
        num_devices=mesh.devices.size,
        peak_flops_per_s=mfu_peak(composition.config, mesh.devices.flat[0]),
        causal_flops_per_token=needed["causal"],
        full_flops_per_token=needed["full"],
        step_flops=step_flops,
    )


def mfu_peak(config: RunConfig, device: jax.Device) -> float | None:
    """Looks up the peak FLOP/s of a device, for MFU; None if no peak is published."""
    chip = chips.chip_for(device.device_kind)
    return chip.peak(config.precision.peak) if chip else None
