"""Which of a run's products are of 8-bit floats (`precision.matmul`), which are not and
why, and where.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from jaxdist.hardware.chips import Chip, chip_for, platform_of
from jaxdist.ops import fp8
from jaxdist.optim.roles import Role, role_of
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.gradients import build_objective
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.trainer.run_config import RunConfig

_T = 1e12
Sample = Callable[[], Mapping[str, jax.ShapeDtypeStruct]]  # shapes of a batch of one


def table(run: RunConfig, spec: ModelSpec) -> dict[str, str]:
    """Returns for each parameter that is multiplied why it is not in 8-bit floats, by
    path; "" if it is.
    """
    rows = {}
    for path, (x, names) in spec.named_parameters().items():
        role = role_of(path.split("/"), x.shape, names)
        if role.kind != "vector" and jnp.issubdtype(x.dtype, jnp.floating):
            rows[path] = _why_not(run, x.shape, tuple(names or ()), role)
        elif role.kind != "vector":
            rows[path] = "kept in fewer bits, computed with in bfloat16"
    return rows


def _why_not(
    run: RunConfig, shape: tuple[int, ...], names: tuple[str | None, ...], role: Role
) -> str:
    if role.kind == "embedding":
        return "rows of a table are looked up"
    if "experts" in names:
        return "products of experts are grouped ones"
    own, inputs = names[-role.dims :] if names else (), role.dims - len(role.output)
    precision = run.precision
    return fp8.why_not(
        own,
        shape[-role.dims :],
        inputs,
        precision.matmul,
        small=precision.fp8_small_kernels,
    )


def parameters(run: RunConfig, spec: ModelSpec) -> int:
    """Returns how many of a model's parameters are in products of 8-bit floats."""
    if run.precision.matmul == "compute":
        return 0
    named = spec.named_parameters()
    return sum(named[path][0].size for path, why in table(run, spec).items() if not why)


def lines(
    run: RunConfig, spec: ModelSpec, device: jax.Device, sample: Sample
) -> list[str]:
    """Returns what is said at a run's start: the share of products in 8-bit floats, the
    rest, MFU's peak.
    """
    if run.precision.matmul == "compute":
        return []
    by_reason = defaultdict(list)
    for path, why in table(run, spec).items():
        by_reason[why].append(path)
    taken = by_reason.pop("", [])
    rest = "; ".join(f"{', '.join(paths)}: {why}" for why, paths in by_reason.items())
    text = (
        f"precision.matmul={run.precision.matmul}: {share(run, spec, sample):.0%} of the forward products' "
        f"FLOPs in 8-bit floats ({', '.join(taken)})"
    )
    return [text + (f"; not {rest}" if rest else ""), _speed(run, device)]


def _speed(run: RunConfig, device: jax.Device) -> str:
    """Returns what 8-bit floats are on a device, and which peak MFU is a share of."""
    if platform_of(device.platform) == "cpu":
        return "8-bit floats are emulated on CPUs, and slower than bfloat16: for tests alone"
    chip, own = chip_for(device.device_kind), run.precision.compute
    half, byte = (
        chip.peak(name) if chip else None for name in (own, run.precision.peak)
    )
    if not (half and byte):
        return f"of {device.device_kind} no peak of 8-bit floats is known: it may be slower, and mfu is null"
    return f"mfu: of {byte / _T:g} TFLOP/s a device, the peak of 8-bit floats ({own}'s is {half / _T:g})"


def share(run: RunConfig, spec: ModelSpec, sample: Sample) -> float:
    """Returns the share of the forward program's FLOPs that is in products of 8-bit
    floats.
    """
    objective = build_objective(spec, compute=run.precision.compute, remat="none")
    forward = jax.make_jaxpr(lambda t, m, f, b: objective(t, m, f, b, None)[0])
    precision = run.precision
    with execution.activate(
        compute=precision.compute,
        matmul=precision.matmul,
        fp8_small_kernels=precision.fp8_small_kernels,
    ):
        program = forward(spec.trainable, spec.model_state, spec.frozen, dict(sample()))
    total = jaxpr_flops(program)
    return jaxpr_flops(program, fp8_only=True) / total if total else 0.0


def faults(
    run: RunConfig, spec: ModelSpec, device: jax.Device, sample: Sample
) -> Iterator[str]:
    """Yields why products of 8-bit floats gain nothing on a device, or for a model."""
    setting = f"precision.matmul={run.precision.matmul}"
    if run.precision.matmul == "compute":
        return
    platform, chip = platform_of(device.platform), chip_for(device.device_kind)
    if platform == "tpu" or (chip and not chip.fp8_gains):
        yield f"{setting}: {_slower(device, chip)}; set precision.matmul=compute"
    elif not share(run, spec, sample):
        whys = "; ".join(sorted({why for why in table(run, spec).values() if why}))
        model = spec.model_class.__name__
        yield (
            f"{setting}: no product of {model} is in 8-bit floats ({whys or 'it multiplies otherwise'}); "
            f"those with large kernels are, by jaxdist.ops.matmul.project; set precision.matmul=compute"
        )


def _slower(device: jax.Device, chip: Chip | None) -> str:
    """Returns why a chip gains nothing."""
    name = chip.name if chip else device.device_kind
    if chip and chip.fp8_cost:
        return (
            f"on {name} a product of 8-bit floats takes {chip.fp8_cost:g} times bfloat16's cycles, with the "
            f"conversion of both operands"
        )
    if platform_of(device.platform) == "tpu":
        return f"on {name} nobody has measured products of 8-bit floats"
    half = chip and (chip.peak("bfloat16") or chip.peak("float16"))
    peak = (
        f": its peak is {half / _T:g} TFLOP/s in 16 bits, and would be no higher"
        if half
        else ""
    )
    return f"{name} has no units for 8-bit floats{peak}"
