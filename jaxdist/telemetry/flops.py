"""FLOPs of any jaxpr, and of a compiled program.

A multiply-add is 2 FLOPs. Only matmuls and convolutions are counted. Norms, softmax,
activations, rotary embeddings, gathers and the optimizer are not counted; nor are they
in the costs that ops declare (`ops.costs`).

`jaxpr_flops` counts a traced function; the model FLOPs of any model are 3 x its forward
pass. Of a whole train step, which recomputes, it counts the numerator of HFU.
`hlo_flops` counts a compiled program, for `plan`.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, Literal, Protocol

import numpy as np

from jaxdist.telemetry import hlo

# "causal" counts the part of attention that a causal mask leaves, "full" counts all
Convention = Literal["causal", "full"]


# --- jaxprs ---------------------------------------------------------------------------


class Call(Protocol):
    """Declared costs of a call, which its jaxpr does not show."""

    @property
    def flops(self) -> float:
        """The FLOPs of the forward pass."""

    def kept(
        self, rules: Any, tokens: int, itemsize: int, platform: str
    ) -> Mapping[str, int]:
        """Counts the bytes that remat policies keep for a device's tokens, by name."""

    def moments(
        self,
        rules: Any,
        tokens: int,
        itemsize: int,
        platform: str,
        *,
        holds_gradients: bool,
    ) -> Iterator[Any]:
        """Yields the memory of its backward pass over time.

        Each item has the bytes of gathered kernels, of whole gradients of kernels, and
        of rows. With `holds_gradients`, all of these gradients exist at the end.
        """


# Functions with a custom VJP whose loops depend on the data. For each name: makes the
# declared costs of a call from its abstract arguments.
CALLS: dict[str, Callable[[Sequence[Any]], Call]] = {}


def declared_call(equation: Any) -> Call | None:
    """Makes the declared costs of a jaxpr's equation; None if it declares none."""
    if equation.primitive.name != "custom_vjp_call":
        return None
    name = equation.params["call_jaxpr"].jaxpr.debug_info.func_name
    if name not in CALLS:
        return None
    return CALLS[name]([variable.aval for variable in equation.invars])


def jaxpr_flops(jaxpr: Any, *, only: Callable[[Any], bool] | None = None) -> float:
    """Counts the FLOPs of a jaxpr (closed or open) on all devices together.

    A scan counts length x body; a while loop counts once, except for functions in
    `CALLS`. A cond counts its most expensive branch, a shard_map its body x the manual
    axes. A pallas_call counts its kernel x the grid, also blocks that the kernel skips.
    Attention counts in full, cuDNN's too.

    Args:
      jaxpr: the jaxpr.
      only: accepts the equations of the matmuls to count; None = all.
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
    if name in _CUDNN_ATTENTION:
        return 0.0 if only is not None else _cudnn_attention(equation)
    if name == "cond":
        return max(jaxpr_flops(branch, only=only) for branch in params["branches"])
    # jit, remat, scan, custom_jvp, custom_vjp, closed_call, ... hold a jaxpr among
    # their parameters
    inner = (value for value in params.values() if hasattr(_open(value), "eqns"))
    flops = sum(jaxpr_flops(value, only=only) for value in inner)
    return flops * _num_runs(name, params)


# cuDNN's attention by the name of its primitive: products of query's and of value's head
# size. Its backward pass computes the scores again.
_CUDNN_ATTENTION = {
    "dot_product_attention_fwd_wrapper": (1, 1),
    "dot_product_attention_bwd_wrapper": (3, 2),
}
_HEADS_FIRST = 1  # layout of arrays [B, N, S, H]; otherwise they are [B, S, N, H]


def _cudnn_attention(equation: Any) -> float:
    """Counts the FLOPs of a call of cuDNN's attention, in full."""
    query, key, value = (variable.aval.shape for variable in equation.invars[:3])
    heads_first = equation.params["layout"] == _HEADS_FIRST
    batch, *_, size = query
    heads, length = query[1:3] if heads_first else (query[2], query[1])
    keys = key[2] if heads_first else key[1]
    of_query, of_value = _CUDNN_ATTENTION[equation.primitive.name]
    sizes = of_query * size + of_value * value[-1]
    return float(2 * batch * heads * length * keys * sizes)


def _num_runs(name: str, params: Any) -> int:
    """Counts the runs of the jaxpr that an equation holds."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        shape = params["mesh"].shape
        return math.prod(shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return 1


def is_uncounted(jaxpr: Any) -> bool:
    """Checks if `jaxpr_flops` misses work of a jaxpr.

    It misses matmuls in loops that depend on data, and fused attention of other kinds
    than `_CUDNN_ATTENTION`.
    """
    return any(map(_is_uncounted, _open(jaxpr).eqns))


def _is_uncounted(equation: Any) -> bool:
    inner = [value for param in equation.params.values() for value in _jaxprs(param)]
    name = equation.primitive.name
    if "dot_product_attention" in name:
        return name not in _CUDNN_ATTENTION
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
    is_weight_gradient = ragged is not None and not ragged.rhs_group_dimensions
    return _matmul(lhs, out, contracting, groups=out[0] if is_weight_gradient else 1)


def _matmul(
    lhs: hlo.Shape, out: hlo.Shape, contracting: Sequence[int], groups: int = 1
) -> float:
    """Counts the FLOPs of a matmul: 2 x result x contracted dims of the left side.

    Args:
      lhs: shape of the left side.
      out: shape of the result.
      contracting: contracted dims of the left side.
      groups: groups of a matmul that is ragged over its contracted dim, such as a
        weight gradient. The result has a slice per group, and each row of the operands
        contributes to one slice only.
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
    flops: int = 2 * channels * math.prod(starmap(_window_pairs, windows))
    return flops


def _window_pairs(
    size: int,
    kernel: int,
    out: int,
    pad: int,
    stride: int,
    dilation: int,
    kernel_dilation: int,
) -> int:
    """Counts the (output, kernel) positions of a spatial dim that read the input.

    Padding and the holes of a dilated input are no work. This is XLA's convention;
    without it, the gradient of a strided convolution would count `stride` times.
    """
    outputs = np.arange(out) * stride - pad
    count = 0
    for tap in range(kernel):
        places = outputs + tap * kernel_dilation
        is_inside = (places >= 0) & (places <= (size - 1) * dilation)
        count += int(np.count_nonzero(is_inside & (places % dilation == 0)))
    return count


# --- compiled programs ----------------------------------------------------------------

# Accepts a matmul by the dtypes of both operands and the instruction's attributes.
HloFilter = Callable[[Sequence[str], str], bool]


def hlo_flops(
    program: str | hlo.Module, computation: str = "", *, only: HloFilter | None = None
) -> float:
    """Counts the FLOPs of an optimized HLO program; of ONE device if partitioned.

    Counted are dot, convolution, ragged-dot, matmul custom calls of oneDNN and cuBLAS,
    and kernels with a cost estimate. Other custom calls count as zero. A loop counts
    its trip count x body (once if unknown), a conditional its most expensive branch. In
    contrast, `compiled.cost_analysis()["flops"]` counts each loop once.

    Args:
      program: the text `compiled.as_text()`, or its parsed module.
      computation: name of the computation to count; "" = the entry.
      only: accepts the matmuls to count; None = all.

    Raises:
      ValueError: the text is no HLO module.
    """
    module = hlo.parse(program) if isinstance(program, str) else program

    @functools.cache
    def computation_flops(name: str) -> float:
        instructions = module.computations[name]
        return sum((flops(instructions, step) for step in instructions.values()), 0.0)

    def flops(
        instructions: dict[str, hlo.Instruction], instruction: hlo.Instruction
    ) -> float:
        attributes = _CALLED_BY.get(instruction.opcode, ())
        called = [computation_flops(name) for name in instruction.called(*attributes)]
        if instruction.opcode == "while":
            trips = module.trip_count(instruction)
            return sum(called) * (1 if trips is None else trips)
        if instruction.opcode == "conditional":
            return max(called)
        return sum(called, instruction_flops(instructions, instruction, only=only))

    return computation_flops(computation or module.entry)


# attributes with the computations that an instruction runs, by its opcode
_CALLED_BY = {
    "while": ("body", "condition"),
    "conditional": hlo.BRANCHES,
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
}


_COUNTED = ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call")


def instruction_flops(
    instructions: Mapping[str, hlo.Instruction],
    instruction: hlo.Instruction,
    *,
    only: HloFilter | None = None,
) -> float:
    """Counts the FLOPs of an instruction, without the computations that it calls.

    Args:
      instructions: the instructions of its computation, by name.
      instruction: the instruction.
      only: accepts the matmuls to count; None = all.
    """
    opcode = instruction.opcode
    if opcode not in _COUNTED:
        return 0.0
    operands = [instructions[name] for name in instruction.operands]
    if only is not None:
        dtypes = [operand.dtype for operand in operands[:2]]
        if not only(dtypes, instruction.attributes):
            return 0.0
    out = instruction.shape
    if opcode.endswith("dot"):
        contracting = instruction.dims("lhs_contracting_dims")
        is_weight_gradient = opcode == "ragged-dot" and not instruction.dims(
            "rhs_group_dims"
        )
        groups = out[0] if is_weight_gradient else 1
        return _matmul(operands[0].shape, out, contracting, groups)
    if opcode == "convolution":
        return _windowed(instruction, operands[0].shape, operands[1].shape, out)
    target = instruction.value("custom_call_target")
    if target.startswith(("__onednn$matmul", "__cublas$")):
        contracting = _contracted(instruction.attributes)
        return _matmul(operands[0].shape, out, contracting)
    estimate = re.search(
        r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.attributes
    )
    # The dtype of a kernel's matmuls is unknown, so a filter accepts none of them.
    if estimate is None or only is not None:
        return 0.0
    return float(estimate.group(1))


def _contracted(attributes: str) -> list[int]:
    """Reads the contracted dims of the left side of a oneDNN or cuBLAS matmul."""
    dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', attributes)
    if dims:
        return [int(dim) for dim in re.findall(r"\d+", dims.group(1))]
    return [-2 if re.search(r'"transpose_a":\s*true', attributes) else -1]


def _windowed(
    convolution: hlo.Instruction, lhs: hlo.Shape, rhs: hlo.Shape, out: hlo.Shape
) -> float:
    """Counts the FLOPs of a convolution by its window and dim_labels.

    Labels look like b01f_01io->b01f.
    """
    lhs_dims, rhs_dims, out_dims = re.split("_|->", convolution.value("dim_labels"))
    window = dict(part.split("=", 1) for part in convolution.value("window").split())

    def along(key: str, default: int, position: int) -> int:
        """Reads the window's value of a spatial dim."""
        if key not in window:
            return default
        return int(window[key].split("x")[position].split("_")[0])

    pairs = 1
    for position, dim in enumerate(sorted(filter(str.isdigit, rhs_dims))):
        pairs *= _window_pairs(
            size=lhs[lhs_dims.index(dim)],
            kernel=rhs[rhs_dims.index(dim)],
            out=out[out_dims.index(dim)],
            pad=along("pad", 0, position),
            stride=along("stride", 1, position),
            dilation=along("lhs_dilate", 1, position),
            kernel_dilation=along("rhs_dilate", 1, position),
        )
    outputs = out[out_dims.index("b")] * out[out_dims.index("f")]
    return 2 * outputs * rhs[rhs_dims.index("i")] * pairs
