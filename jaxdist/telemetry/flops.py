"""FLOPs of any jaxpr, and of a compiled program.

A multiply-add is 2 FLOPs. Only matrix products and convolutions are counted, so norms,
softmax, activations, rotary embeddings, gathers and the optimizer are left out in both
counts, as in what ops declare (`ops.costs`): `jaxpr_flops` (what a traced function asks
for; model FLOPs of any model = 3 x its forward) and `hlo_flops` (what the compiled
program does, recomputation included: the numerator of HFU).
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, Literal, Protocol

import numpy as np

from jaxdist.telemetry import hlo

# whether attention counts what a causal mask leaves, or all
Convention = Literal["causal", "full"]


# --- jaxprs ---------------------------------------------------------------------------


class Call(Protocol):
    """What a call of a function needs that its program does not show."""

    @property
    def flops(self) -> float:
        """FLOPs of the call, forward."""

    def kept(
        self, rules: Any, tokens: int, itemsize: int, platform: str
    ) -> Mapping[str, int]:
        """Counts bytes that remat policies keep of a device's tokens, by name."""

    def moments(
        self, rules: Any, tokens: int, itemsize: int, platform: str
    ) -> Iterator[Any]:
        """Yields what its backward pass holds from moment to moment: bytes of gathered
        kernels, of whole gradients of kernels, and of rows.
        """


# By name, functions with a gradient of their own whose loops follow the data: what a
# call with such abstract arguments needs.
CALLS: dict[str, Callable[[Sequence[Any]], Call]] = {}


def declared_call(equation: Any) -> Call | None:
    """Makes the call that a jaxpr's equation declares; None: it shows all it does."""
    if equation.primitive.name != "custom_vjp_call":
        return None
    name = equation.params["call_jaxpr"].jaxpr.debug_info.func_name
    if name not in CALLS:
        return None
    return CALLS[name]([variable.aval for variable in equation.invars])


def jaxpr_flops(jaxpr: Any, *, only: Callable[[Any], bool] | None = None) -> float:
    """Counts the FLOPs of a jaxpr (closed or open), all devices together, loops
    multiplied out.

    scan counts length x body; while once (functions in `CALLS` have their own count);
    cond its dearest branch; shard_map its body x the manual axes; pallas_call its
    kernel x the grid (blocks that the kernel skips count as done). Attention counts in
    full, as written.

    Args:
      only: counts just the products whose equations it accepts.
    """
    return sum((_equation_flops(equation, only) for equation in _open(jaxpr).eqns), 0.0)


def _equation_flops(equation: Any, only: Callable[[Any], bool] | None) -> float:
    name = equation.primitive.name
    params = equation.params
    if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        if only is not None and not only(equation):
            return 0.0
        lhs, rhs = (variable.aval.shape for variable in equation.invars[:2])
        count = _convolution if name.startswith("conv") else _dot
        return count(lhs, rhs, equation.outvars[0].aval.shape, params)
    call = declared_call(equation)
    if call is not None:
        return 0.0 if only is not None else call.flops
    if name == "cond":
        return max(jaxpr_flops(branch, only=only) for branch in params["branches"])
    # jit, remat, scan, custom_jvp, custom_vjp, closed_call, ... hold a jaxpr among
    # their parameters
    inner = (value for value in params.values() if hasattr(_open(value), "eqns"))
    flops = sum(jaxpr_flops(value, only=only) for value in inner)
    if name == "scan":
        return flops * params["length"]
    if name == "shard_map":
        return flops * math.prod(
            params["mesh"].shape[axis] for axis in params["newly_manual_axes"]
        )
    if name == "pallas_call":
        return flops * math.prod(
            n for n in params["grid_mapping"].grid if isinstance(n, int)
        )
    return flops


def is_uncounted(jaxpr: Any) -> bool:
    """Checks whether `jaxpr_flops` misses work: products in loops that follow data,
    cuDNN's attention.
    """
    return any(map(_is_uncounted, _open(jaxpr).eqns))


def _is_uncounted(equation: Any) -> bool:
    inner = [value for param in equation.params.values() for value in _jaxprs(param)]
    name = equation.primitive.name
    if "dot_product_attention" in name:
        return True
    if name == "while" and any(map(jaxpr_flops, inner)):
        return True
    return any(map(is_uncounted, inner))


def _jaxprs(param: Any) -> list[Any]:
    parts = param if isinstance(param, list | tuple) else (param,)
    return [part for part in parts if hasattr(_open(part), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _dot(lhs: hlo.Shape, rhs: hlo.Shape, out: hlo.Shape, params: Any) -> float:
    ragged = params.get("ragged_dot_dimension_numbers")
    (contracting, _), _ = (
        ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    )
    weight_gradient = ragged is not None and not ragged.rhs_group_dimensions
    return _product(lhs, out, contracting, groups=out[0] if weight_gradient else 1)


def _product(
    lhs: hlo.Shape, out: hlo.Shape, contracting: Sequence[int], groups: int = 1
) -> float:
    """Counts the FLOPs of a product: 2 x result x contracted dims of the left side.

    `groups` > 1 is a product ragged over its contracted dim, as a weight gradient is:
    the result has one slice per group, and each row of the operands goes into one of
    them only.
    """
    return 2 * math.prod(out) // groups * math.prod(lhs[dim] for dim in contracting)


def _convolution(lhs: hlo.Shape, rhs: hlo.Shape, out: hlo.Shape, params: Any) -> float:
    numbers = params["dimension_numbers"]
    # the first two dims of each are batch and features
    windows = zip(
        [lhs[dim] for dim in numbers.lhs_spec[2:]],
        [rhs[dim] for dim in numbers.rhs_spec[2:]],
        [out[dim] for dim in numbers.out_spec[2:]],
        [low for low, _ in params["padding"]],
        params["window_strides"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    batch, features = numbers.out_spec[:2]
    channels = out[batch] * out[features] * rhs[numbers.rhs_spec[1]]
    return 2 * channels * math.prod(starmap(_window_pairs, windows))


def _window_pairs(
    size: int,
    kernel: int,
    out: int,
    pad: int,
    stride: int,
    dilation: int,
    kernel_dilation: int,
) -> int:
    """Counts the (output, kernel) positions of one spatial dim that meet a real input
    element.

    Padding and the holes of a dilated input are no work: XLA's own convention, and
    without it the gradient of a strided convolution would count stride times too much.
    """
    outputs = np.arange(out) * stride - pad
    places = (outputs + tap * kernel_dilation for tap in range(kernel))
    inside = (
        (p % dilation == 0) & (p >= 0) & (p <= (size - 1) * dilation) for p in places
    )
    return sum(map(np.count_nonzero, inside))


# --- compiled programs ----------------------------------------------------------------

# Accepts a product by the dtypes of both operands and the instruction's attributes.
HloFilter = Callable[[Sequence[str], str], bool]


def hlo_flops(
    program: str | hlo.Module, computation: str = "", *, only: HloFilter | None = None
) -> float:
    """Counts the FLOPs of optimized HLO text, `compiled.as_text()`; of ONE device if
    partitioned.

    Of its entry, or of the named computation; `only` counts just the products that it
    accepts.

    Differs from `compiled.cost_analysis()["flops"]`, which counts a loop once. Counted:
    dot, convolution, ragged-dot, matmul custom calls of oneDNN and cuBLAS, and kernels
    that carry a cost estimate; in fusions, calls, loops (x trip count, once if it is
    unknown) and conditionals (the dearest branch). Other custom calls count as nothing.

    Raises:
      ValueError: the text is no HLO module.
    """
    module = hlo.parse(program) if isinstance(program, str) else program

    @functools.cache
    def computation_flops(name: str) -> float:
        inside = module.computations[name]
        return sum((flops(inside, step) for step in inside.values()), 0.0)

    def flops(inside: dict[str, hlo.Instruction], step: hlo.Instruction) -> float:
        called = [
            computation_flops(name)
            for name in step.called(*_CALLS.get(step.opcode, ()))
        ]
        if step.opcode == "while":
            trips = module.trip_count(step)
            return sum(called) * (1 if trips is None else trips)
        if step.opcode == "conditional":
            return max(called)
        return sum(called, instruction_flops(inside, step, only=only))

    return computation_flops(computation or module.entry)


_CALLS = {  # what holds computations that run, and in which attributes
    "while": ("body", "condition"),
    "conditional": hlo.BRANCHES,
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
}


def instruction_flops(
    inside: Mapping[str, hlo.Instruction],
    step: hlo.Instruction,
    *,
    only: HloFilter | None = None,
) -> float:
    """Counts the FLOPs of an instruction itself, without the computations it calls."""
    if step.opcode not in (
        "dot",
        "scaled-dot",
        "ragged-dot",
        "convolution",
        "custom-call",
    ):
        return 0.0
    if only is not None:
        operand_dtypes = [inside[name].dtype for name in step.operands[:2]]
        if not only(operand_dtypes, step.attributes):
            return 0.0
    operands = [inside[name].shape for name in step.operands]
    if step.opcode.endswith("dot"):
        weight_gradient = step.opcode == "ragged-dot" and not step.dims(
            "rhs_group_dims"
        )
        groups = step.shape[0] if weight_gradient else 1
        return _product(
            operands[0], step.shape, step.dims("lhs_contracting_dims"), groups
        )
    if step.opcode == "convolution":
        return _windowed(step, operands[0], operands[1], step.shape)
    if step.value("custom_call_target").startswith(("__onednn$matmul", "__cublas$")):
        return _product(operands[0], step.shape, _contracted(step.attributes))
    estimate = re.search(
        r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', step.attributes
    )
    # In which numbers a kernel multiplies, nobody knows.
    if estimate is None or only is not None:
        return 0.0
    return float(estimate.group(1))


def _contracted(attributes: str) -> list[int]:
    """Reads the contracted dims of the left side of a oneDNN or cuBLAS product."""
    dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', attributes)
    if dims:
        return [int(dim) for dim in re.findall(r"\d+", dims.group(1))]
    return [-2 if re.search(r'"transpose_a":\s*true', attributes) else -1]


def _windowed(
    step: hlo.Instruction, lhs: hlo.Shape, rhs: hlo.Shape, out: hlo.Shape
) -> float:
    """Counts the FLOPs of a convolution from its dim_labels (b01f_01io->b01f) and
    window.
    """
    of_lhs, of_rhs, of_out = re.split("_|->", step.value("dim_labels"))
    window = dict(part.split("=", 1) for part in step.value("window").split())

    def along(key: str, default: int, position: int) -> int:
        if key not in window:
            return default
        return int(window[key].split("x")[position].split("_")[0])

    pairs = 1
    for position, dim in enumerate(sorted(filter(str.isdigit, of_rhs))):
        pairs *= _window_pairs(
            lhs[of_lhs.index(dim)],
            rhs[of_rhs.index(dim)],
            out[of_out.index(dim)],
            along("pad", 0, position),
            along("stride", 1, position),
            along("lhs_dilate", 1, position),
            along("rhs_dilate", 1, position),
        )
    channels = out[of_out.index("b")] * out[of_out.index("f")] * rhs[of_rhs.index("i")]
    return 2 * channels * pairs
