"""One block of a model as a device computes it: what it keeps, works with and gathers,
read off its trace.

Its jaxpr is traced on a device's shapes, a few tokens long; all of it grows with the
tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.parallel import execution, remat
from jaxdist.planner.observed import LANES
from jaxdist.protocols.model import BlockInfo, apply_block, shared_fields
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.protocols.param_names import EXPERTS, Names, has_experts
from jaxdist.telemetry.flops import Call, declared_call
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

SHORT = 64  # tokens of a trace: one block of the reference attention


@dataclass(frozen=True)
class Block:
    """Sizes of one block on one device; bytes if not said otherwise. All but weights
    are per `tokens`.
    """

    tokens: int = 1
    x: int = 0  # what flows from block to block
    # (name, size) of what the remat policy keeps
    kept: tuple[tuple[str, int], ...] = ()
    # alive in its backward pass: forward values not kept, and two gradients
    working: int = 0
    largest: int = 0  # of the forward values that a backward pass reads
    logsumexps: int = 0  # elements of attention's logsumexp
    weights: tuple[int, ...] = ()  # elements of each weight as computed with
    # An op that says itself what it holds; of its values above only what goes in and
    # comes out.
    call: Call | None = None


_traced: dict[str, Block] = {}


def trace(composition: Composition, policy: str, platform: str) -> Block:
    """Returns one block as a device computes it; zeros for a model without blocks. Kept
    by content.
    """
    run = composition.config
    if not composition.spec.staged:
        return Block()
    sizes = composition.shape.sizes
    length = sample_tokens(composition)
    length = length if length % SHORT else SHORT  # all of it grows with the tokens
    layout = (
        sizes["tensor"],
        sizes["expert"],
        length,
        policy,
        platform,
        run.precision.compute,
    )
    key = repr(
        (sorted(run.model.items()), *layout, run.data.packing, run.data.path, run.lora)
    )
    if key not in _traced:
        _traced[key] = _trace(composition, length, policy, platform)
    return _traced[key]


def _trace(composition: Composition, length: int, policy: str, platform: str) -> Block:
    run = composition.config
    spec = composition.spec
    rules = composition.rules
    named = {
        path: v
        for path, v in spec.named_parameters().items()
        if path.startswith("blocks/")
    }
    whole = [x.shape[1:] for x, _ in named.values()]
    local = [
        rules.shard_dims(rules.computed(n, x.shape[1:]), x.shape[1:])
        for x, n in named.values()
    ]
    # The trace sees all experts, as ids are of all; what is inside their call is not
    # traced.
    seen = [
        _with_all_experts(dims, part, names)
        for dims, part, (_, names) in zip(whole, local, named.values(), strict=True)
    ]
    try:
        forward, residuals = _jaxprs(run, spec, seen, length, policy)
    except (TypeError, ValueError):
        # the block reads sizes elsewhere than off its weights
        forward, residuals = _jaxprs(run, spec, whole, length, policy)
    count = len(named) + len(jax.tree.leaves(spec.model_state.get("blocks", {})))
    x = forward.invars[count]
    lanes = LANES if platform == "tpu" else 1
    kept = list(_kept(residuals, count, lanes))
    if platform == "gpu" and remat.RESIDUALS in remat.named_in(policy)["offload"]:
        # cuDNN's have no name by which they could be moved: they are computed again.
        kept = [(name, size) for name, size in kept if name != remat.RESIDUALS]
    call = next(filter(None, map(declared_call, forward.eqns)), None)
    if call:
        itemsize = jnp.dtype(run.precision.compute).itemsize
        own = call.kept(rules, length, itemsize, platform)
        names = {name for name, _ in kept}
        kept = [(name, size) for name, size in kept if name not in own]
        kept += [(name, size) for name, size in own.items() if name in names]
    needed = _needed(forward, x, lanes)
    largest = max(needed, default=0)
    again = (Counter(needed) - Counter(size for _, size in kept)).elements()
    heads = (
        d[n.index("heads")]
        for d, (_, n) in zip(local, named.values(), strict=True)
        if "heads" in n
    )
    working = sum(again) + _bytes(x) + largest
    weights = tuple(map(math.prod, local))
    logsumexps = length * next(heads, 0)
    return Block(
        length, _bytes(x), tuple(kept), working, largest, logsumexps, weights, call
    )


def _with_all_experts(
    dims: Sequence[int], part: Sequence[int], names: Names
) -> tuple[int, ...]:
    """Returns a device's part of a parameter's dims, but that of experts whole."""
    if not has_experts(names):
        return tuple(part)
    place = names.index(EXPERTS)
    return (*part[:place], dims[place], *part[place + 1 :])


def _jaxprs(run: RunConfig, spec: ModelSpec, dims, length: int, policy: str):
    """Returns the jaxprs of a block, (parameters, x, fields) -> y, and of what its vjp
    keeps.
    """
    trees = spec.trainable, spec.frozen
    blocks = [tree.get("blocks", {}) for tree in trees]
    dtypes = [stored_dtype(x, "float32") for x in jax.tree.leaves(blocks)]
    leaves = [
        jax.ShapeDtypeStruct((1, *d), dtype)
        for d, dtype in zip(dims, dtypes, strict=True)
    ]
    cut = jax.tree.unflatten(jax.tree.structure(blocks), leaves)
    trainable, frozen = (
        tree | {"blocks": part} for tree, part in zip(trees, cut, strict=True)
    )
    model = spec.assemble(trainable, spec.model_state, frozen)
    graph, stacked = nnx.split(model.blocks)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    batch = compose.batch_shapes(run, 1)
    if run.data.is_text:
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *[length] * (x.ndim - 1)), x.dtype),
            batch,
        )

    def block(parameters, x, fields):
        info = BlockInfo(jax.random.key(0), jnp.int32(0), fields)
        return apply_block(nnx.merge(graph, parameters), x, info).x

    def residuals(parameters, x, fields):
        kept = remat.rematerialised(block, policy)
        return jax.tree.leaves(
            jax.vjp(lambda p, x: kept(p, x, fields), parameters, x)[1]
        )

    with execution.activate(compute=run.precision.compute):
        fields = jax.eval_shape(lambda b: shared_fields(_zeros(model), b), batch)
        x = jax.eval_shape(lambda b: _zeros(model).embed(b), batch)
        return tuple(
            jax.make_jaxpr(f)(one, x, fields).jaxpr for f in (block, residuals)
        )


def _zeros(model):
    """Returns an abstract model with arrays in it, for use under a trace."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state))


def _kept(jaxpr, position: int, lanes: int) -> Iterator[tuple[str, int]]:
    """Yields (name, bytes) of a vjp's residuals but parameters and fields; x is input
    `position`.
    """
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}

    def origin(v, *more: str):
        while v in made and made[v].primitive.name in (*_SAME, *more):
            v = made[v].invars[0]
        return v

    names = {jaxpr.invars[position]: (remat.INPUT, jaxpr.invars[position])}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            # with and without bias
            for source in origin(eqn.invars[0]), origin(eqn.invars[0], "add"):
                names.setdefault(source, (eqn.params["name"], eqn.outvars[0]))
    for out in dict.fromkeys(v for v in jaxpr.outvars if not hasattr(v, "val")):
        if out in made or out is jaxpr.invars[position]:
            # TPU has it in the shape that is named
            name, array = names.get(origin(out), ("unnamed", out))
            same = (array.aval.size, array.aval.dtype) == (
                out.aval.size,
                out.aval.dtype,
            )
            yield name, _bytes(array if same else out, lanes)


_SAME = (
    "name",
    "reshape",
    "reduce_precision",
    "convert_element_type",
    "squeeze",
    "copy",
    "device_put",
    "optimization_barrier",
)
_CURVED = (
    "tanh",
    "logistic",
    "exp",
    "log",
    "erf",
    "rsqrt",
    "sqrt",
    "max",
    "integer_pow",
    "square",
    "pow",
)
_PRODUCTS = (
    "dot_general",
    "conv_general_dilated",
    "pallas_call",
    "ragged_dot",
    "ragged_dot_general",
)


def _needed(jaxpr, x, lanes: int) -> list[int]:
    """Returns the bytes of each forward value that a block's backward pass reads as an
    array.

    Those are operands of products (and kernels), and results of products that go into
    one by way of something curved: XLA computes what is element-wise between them
    again, inside the readers. A linear image of the same size (rotated queries) stands
    for its source, and a sum of products (a kernel's and its adapter's) for both.
    """
    sources: dict[Any, tuple[frozenset, bool]] = {x: (frozenset([x]), False)}
    needed: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not hasattr(v, "val") and v in sources]
        if not _any(eqn, _PRODUCTS):
            roots = frozenset().union(*(sources[v][0] for v in operands))
            several = eqn.primitive.name in ("mul", "div") and len(operands) > 1
            curved = (
                several or _any(eqn, _CURVED) or any(sources[v][1] for v in operands)
            )
            if (
                len(roots) > 1
                and eqn.primitive.name == "add"
                and not curved
                and x not in roots
            ):
                roots = frozenset(eqn.outvars)
            sources |= {out: (roots, curved) for out in eqn.outvars if roots}
            continue
        for v in operands:
            roots, curved = sources[v]
            (root, *more) = roots
            if more or curved or _bytes(root) != _bytes(v):
                needed[v] = _bytes(v, lanes)
            needed |= {root: _bytes(root, lanes) for root in roots}
        sources |= {out: (frozenset([out]), False) for out in eqn.outvars}
    needed.pop(x, None)  # kept, or its predecessor's
    return list(needed.values())


def _any(eqn, primitives: Sequence[str]) -> bool:
    """Returns whether an equation is one of the primitives or holds one."""
    inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
    return eqn.primitive.name in primitives or any(
        _any(e, primitives) for jaxpr in inner for e in getattr(jaxpr, "eqns", ())
    )


def _bytes(v, lanes: int = 1) -> int:
    """Returns the bytes of a value whose rows are padded to so many elements (but for
    single ones).
    """
    row = v.aval.shape[-1] if v.aval.ndim else 1
    padded = lanes if 1 < row < lanes else row
    return v.aval.size // max(row, 1) * padded * v.aval.dtype.itemsize


def sample_tokens(composition: Composition) -> int:
    """Returns a sample's tokens on a device; samples that are no text are counted
    whole.
    """
    run = composition.config
    if not run.data.is_text:
        return 1
    return run.batch.sequence_length // composition.shape.sizes["context"]
