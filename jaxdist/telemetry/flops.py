"""FLOPs of a model by formula, of any jaxpr, and of a compiled program.

A multiply-add is 2 FLOPs. Only matrix products and convolutions are counted, so norms, softmax,
activations, rotary embeddings, gathers and the optimizer are left out in all three counts:
`transformer_flops_per_token` (what a transformer needs), `jaxpr_flops` (what a traced function
asks for; model FLOPs of any model = 3 x its forward) and `hlo_flops` (what the compiled program
does, recomputation included: the numerator of HFU).

Neither jax nor numpy is imported: jaxprs are read by their attributes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxdist.telemetry import hlo

Convention = Literal["causal", "full"]


@dataclass(frozen=True)
class Flops:
    """A count: FLOPs per kind of operation, and why it may be too low."""

    by_kind: Mapping[str, float] = field(default_factory=dict)  # dot, convolution, ragged_dot, ...
    notes: tuple[str, ...] = ()  # each: what was counted once or not at all; () = complete

    @property
    def total(self) -> float:
        """FLOPs of all kinds together."""
        return float(sum(self.by_kind.values()))

    def __add__(self, other: "Flops") -> "Flops":
        kinds = {**self.by_kind}
        for kind, value in other.by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + value
        return Flops(kinds, tuple(dict.fromkeys(self.notes + other.notes)))

    def times(self, count: float, *notes: str) -> "Flops":
        """Returns the count repeated `count` times, with more notes (only if anything counts)."""
        if not self.by_kind:
            return self
        kinds = {kind: value * count for kind, value in self.by_kind.items()}
        return Flops(kinds, tuple(dict.fromkeys(self.notes + notes)))


def transformer_flops_per_token(
    *,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    sequence_length: int,
    convention: Convention,
    gated: bool = True,
    num_experts: int = 0,
    experts_per_token: int = 1,
    attention_window: int | None = None,
) -> float:
    """Returns model FLOPs per token, forward and backward, of a decoder-only transformer.

    6 x (matmul parameters that a token uses, output head included) + 12 x L x H x N x span, where
    span is the attended length: S ("full") or S/2 ("causal"), at most the attention window.
    Source: Kaplan et al. 2020, PaLM appendix B (full); the causal half as in nanochat, Llama.

    Leaves out the embedding lookup, norms, softmax, activations, rotary embeddings, biases, the
    loss, the optimizer and all recomputation. "causal" says S/2 where the exact mean is (S+1)/2.

    Args:
      gated: three feed-forward matrices (SwiGLU) instead of two.
      num_experts: experts of a mixture (0 = dense); d_ff is the width of one expert.
      experts_per_token: experts that a token uses (routed and shared together).
      attention_window: tokens of a sliding window of all layers, None = whole sequence.
    """
    attention = 2 * d_model * num_heads * head_dim + 2 * d_model * num_kv_heads * head_dim
    feed_forward = (3 if gated else 2) * d_model * d_ff * experts_per_token
    router = d_model * num_experts
    matmul_params = num_layers * (attention + feed_forward + router) + d_model * vocab_size
    span = sequence_length / 2 if convention == "causal" else sequence_length
    if attention_window is not None:
        span = min(span, attention_window)
    return 6.0 * matmul_params + 12.0 * num_layers * num_heads * head_dim * span


# --- jaxprs ---------------------------------------------------------------------------------------


def jaxpr_flops(jaxpr: Any) -> Flops:
    """Returns the FLOPs of a jaxpr (closed or open), all devices together, loops multiplied out.

    scan counts length x body; while its trip count if that is constant, else 1 with a note; cond
    its dearest branch; shard_map its body x the manual axes; pallas_call its kernel x the grid
    (blocks that the kernel skips count as done). Attention counts in full, as written.
    """
    total = Flops()
    for equation in _open(jaxpr).eqns:
        total += _equation_flops(equation)
    return total


def _equation_flops(equation: Any) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        shapes = [tuple(variable.aval.shape) for variable in equation.invars[:2]]
        return _PRODUCTS[name](*shapes, tuple(equation.outvars[0].aval.shape), params)
    if name == "scan":
        return jaxpr_flops(params["jaxpr"]).times(params["length"])
    if name == "while":
        trips = _while_trips(equation)
        body = jaxpr_flops(params["body_jaxpr"]) + jaxpr_flops(params["cond_jaxpr"])
        note = () if trips is not None else ("a while loop of unknown length was counted once",)
        return body.times(1 if trips is None else trips, *note)
    if name == "cond":
        return max((jaxpr_flops(b) for b in params["branches"]), key=lambda f: f.total)
    if name == "shard_map":
        axes = params.get("manual_axes", params.get("newly_manual_axes", ()))
        return jaxpr_flops(params["jaxpr"]).times(_product(params["mesh"].shape[a] for a in axes))
    if name == "pallas_call":
        grid = [size if isinstance(size, int) else 1 for size in params["grid_mapping"].grid]
        return jaxpr_flops(params["jaxpr"]).times(_product(grid))
    total = Flops()
    for inner in _inner_jaxprs(params):  # jit, remat, custom_jvp, custom_vjp, closed_call, ...
        total += jaxpr_flops(inner)
    return total


def _inner_jaxprs(params: Mapping[str, Any]) -> list[Any]:
    return [value for value in params.values() if hasattr(_open(value), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _dot_general(lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], params: Any) -> Flops:
    (contracting, _), _ = params["dimension_numbers"]
    return Flops({"dot": 2 * math.prod(out) * _product(lhs[dim] for dim in contracting)})


def _ragged_dot(lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], params: Any) -> Flops:
    numbers = params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    # Ragged over the contracted dim (a weight gradient): the result has one slice per group, and
    # each row of the operands goes into one of them only.
    groups = 1 if numbers.rhs_group_dimensions else out[0]
    size = math.prod(out) // groups * _product(lhs[dim] for dim in contracting)
    return Flops({"ragged_dot": 2 * size})


def _convolution(lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int], params: Any) -> Flops:
    numbers = params["dimension_numbers"]
    spatial = zip(
        [lhs[dim] for dim in numbers.lhs_spec[2:]],
        [rhs[dim] for dim in numbers.rhs_spec[2:]],
        [out[dim] for dim in numbers.out_spec[2:]],
        params["window_strides"],
        [low for low, _ in params["padding"]],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    outputs = out[numbers.out_spec[0]] * out[numbers.out_spec[1]]
    pairs = _product(_window_pairs(*dim) for dim in spatial)
    return Flops({"convolution": 2 * outputs * rhs[numbers.rhs_spec[1]] * pairs})


_PRODUCTS: Mapping[str, Callable[..., Flops]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


def _while_trips(equation: Any) -> int | None:
    """Returns the trips of `while i < limit: i += 1` with literal start and limit, else None."""
    params = equation.params
    condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    counter, limit = condition.eqns[0].invars
    carried = condition.invars[params["cond_nconsts"] :]
    index = next((i for i, variable in enumerate(carried) if variable is counter), None)
    if index is None or not hasattr(limit, "val"):
        return None
    start = equation.invars[params["cond_nconsts"] + params["body_nconsts"] + index]
    own = body.invars[params["body_nconsts"] + index]
    update = next((e for e in body.eqns if e.outvars[0] is body.outvars[index]), None)
    if update is None or update.primitive.name != "add" or not hasattr(start, "val"):
        return None
    step = [getattr(variable, "val", None) for variable in update.invars if variable is not own]
    return max(0, int(limit.val) - int(start.val)) if step == [1] else None


def _window_pairs(
    size: int, kernel: int, out: int, stride: int, pad: int, dilation: int, kernel_dilation: int
) -> int:
    """Returns how many (output, kernel) positions of one spatial dim meet a real input element.

    Padding and the holes of a dilated input are no work: XLA's own convention, and without it the
    gradient of a strided convolution would count stride times too much.
    """
    pairs = 0
    for tap in range(kernel):
        # out * stride + offset must be a multiple of dilation within [0, (size - 1) * dilation]
        offset = tap * kernel_dilation - pad
        first = max(0, -(offset // stride)) if offset < 0 else 0
        last = min(out - 1, ((size - 1) * dilation - offset) // stride)
        period = dilation // math.gcd(dilation, stride)
        hits = [o for o in range(first, first + period) if (o * stride + offset) % dilation == 0]
        pairs += sum((last - hit) // period + 1 for hit in hits if hit <= last)
    return pairs


def _product(sizes: Iterable[int]) -> int:
    return math.prod(sizes)


# --- compiled programs ----------------------------------------------------------------------------


def hlo_flops(hlo_text: str) -> Flops:
    """Returns the FLOPs of optimized HLO text, `compiled.as_text()`; of ONE device if partitioned.

    Differs from `compiled.cost_analysis()["flops"]`, which counts a loop once. Counted: dot,
    convolution, ragged-dot, matmul custom calls of oneDNN and cuBLAS, and kernels that carry a cost
    estimate; in fusions, calls, loops (x trip count) and conditionals (the dearest branch). What
    cannot be counted (other custom calls, loops of unknown length) is named in `notes`.

    Raises:
      ValueError: the text is no HLO module.
    """
    module = hlo.parse(hlo_text)
    return _computation_flops(module, module.entry, {})


def _computation_flops(module: hlo.Module, name: str, known: dict[str, Flops]) -> Flops:
    if name not in known:
        total = Flops()
        for instruction in module.computations.get(name, {}).values():
            total += _instruction_flops(module, name, instruction, known)
        known[name] = total
    return known[name]


def _instruction_flops(
    module: hlo.Module, computation: str, instruction: hlo.Instruction, known: dict[str, Flops]
) -> Flops:
    def called(*attributes: str) -> list[Flops]:
        names = instruction.called(*attributes)
        return [_computation_flops(module, name, known) for name in names]

    opcode = instruction.opcode
    if opcode in ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"):
        shapes = module.operand_shapes(computation, instruction)
        count = _HLO_PRODUCTS.get(opcode, _hlo_dot)
        return sum(called("called_computations"), count(instruction, shapes))
    if opcode == "while":
        trips = module.trip_count(instruction)
        note = () if trips is not None else (f"loop {instruction.name} was counted once",)
        body = sum(called("body", "condition"), Flops())
        return body.times(1 if trips is None else trips, *note)
    if opcode == "conditional":
        branches = called("branch_computations", "true_computation", "false_computation")
        return max(branches, key=lambda flops: flops.total, default=Flops())
    if opcode in ("fusion", "call", "async-start"):
        return sum(called("calls", "to_apply"), Flops())
    return Flops()


def _hlo_dot(instruction: hlo.Instruction, operands: Sequence[hlo.Shape]) -> Flops:
    contracted = _product(operands[0][dim] for dim in instruction.dims("lhs_contracting_dims"))
    return Flops({"dot": 2 * math.prod(instruction.shapes[0]) * contracted})


def _hlo_ragged_dot(instruction: hlo.Instruction, operands: Sequence[hlo.Shape]) -> Flops:
    out = instruction.shapes[0]
    contracted = _product(operands[0][dim] for dim in instruction.dims("lhs_contracting_dims"))
    groups = 1 if instruction.dims("rhs_group_dims") else out[0]
    return Flops({"ragged_dot": 2 * math.prod(out) // groups * contracted})


def _hlo_convolution(instruction: hlo.Instruction, operands: Sequence[hlo.Shape]) -> Flops:
    return _windowed(instruction, operands[0], operands[1], instruction.shapes[0])


def _windowed(
    instruction: hlo.Instruction, lhs: hlo.Shape, rhs: hlo.Shape, out: hlo.Shape
) -> Flops:
    """Returns the FLOPs of a convolution from its dim_labels (b01f_01io->b01f) and window."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.value("dim_labels"))
    if not labels:
        return Flops(notes=(f"{instruction.name} has no dim_labels and was not counted",))
    of_lhs, of_rhs, of_out = labels.groups()
    window = dict(part.split("=", 1) for part in instruction.value("window").split())
    outputs = out[of_out.index("b")] * out[of_out.index("f")]
    pairs = 1
    for position, dim in enumerate(sorted(label for label in of_rhs if label.isdigit())):
        sizes = [s[of.index(dim)] for s, of in ((lhs, of_lhs), (rhs, of_rhs), (out, of_out))]
        steps = [
            int(window[key].split("x")[position].split("_")[0]) if key in window else default
            for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        ]
        pairs *= _window_pairs(*sizes, *steps)
    return Flops({"convolution": 2 * outputs * rhs[of_rhs.index("i")] * pairs})


# Custom calls without a matrix product worth counting, by the start of their target's name.
_NO_PRODUCT = (
    "Sharding",
    "SPMD",
    "TopK",
    "__gpu$TopK",
    "__cub$",
    "AllocateBuffer",
    "CreateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollective",
    "ConcatBitcast",
    "MoveTo",
    "PadToStatic",
    "SliceToDynamic",
    "annotate_device_placement",
    "cu_threefry",
    "xla_",
)


def _hlo_custom_call(instruction: hlo.Instruction, operands: Sequence[hlo.Shape]) -> Flops:
    target, config = instruction.value("custom_call_target"), instruction.backend_config()
    if target.startswith(("__onednn$matmul", "__cublas$")):
        return _matmul_call(instruction, operands, config)
    if target.startswith("__cudnn$convForward"):
        return _windowed(instruction, operands[0], operands[1], instruction.shapes[0])
    if target.startswith("__cudnn$convBackwardInput"):
        return _windowed(instruction, instruction.shapes[0], operands[1], operands[0])
    if target.startswith("__cudnn$convBackwardFilter"):
        return _windowed(instruction, operands[0], instruction.shapes[0], operands[1])
    if estimate := re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.text):
        return Flops({"kernel": int(estimate.group(1))})
    if target.startswith(_NO_PRODUCT):
        return Flops()
    return Flops(notes=(f"custom call {target} was not counted",))


def _matmul_call(
    instruction: hlo.Instruction, operands: Sequence[hlo.Shape], config: Mapping[str, Any]
) -> Flops:
    """Returns the FLOPs of a oneDNN or cuBLAS product: 2 x result x contracted dims of the lhs."""
    gemm = config.get("gemm_backend_config", config)
    lhs = operands[0]
    if "dot_dimension_numbers" in gemm:
        numbers = gemm["dot_dimension_numbers"].get("lhs_contracting_dimensions", [])
        contracted = _product(lhs[int(dim)] for dim in numbers)
    else:
        transposed = config.get("onednn_matmul_config", {}).get("transpose_a", False)
        contracted = lhs[-2 if transposed else -1]
    return Flops({"dot": 2 * math.prod(instruction.shapes[0]) * contracted})


_HLO_PRODUCTS: Mapping[str, Callable[[hlo.Instruction, Sequence[hlo.Shape]], Flops]] = {
    "ragged-dot": _hlo_ragged_dot,
    "convolution": _hlo_convolution,
    "custom-call": _hlo_custom_call,
}
