"""The memory of one block of a model on a device, read from its trace.

The jaxpr of a block is traced on a device's shapes with a few tokens. All sizes but
those of weights are proportional to the tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxdist.parallel import execution, remat
from jaxdist.planner.observed import LANES
from jaxdist.protocols.dim_names import EXPERTS, Names, has_experts
from jaxdist.protocols.model import BlockInfo, apply_block, shared_fields
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.telemetry.flops import Call, declared_call
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

SHORT = 64  # tokens of a trace: one block of the reference attention


@dataclass(frozen=True)
class Block:
    """The sizes of one block on one device, in bytes unless a field says otherwise.

    All sizes but those of weights are for a trace of `tokens` tokens.
    """

    tokens: int = 1
    x: int = 0  # the block's input, which is as large as its output
    # (name, size) of each value that the remat policy keeps
    kept: tuple[tuple[str, int], ...] = ()
    # alive in the backward pass: forward values that are not kept, and two gradients
    working: int = 0
    largest: int = 0  # largest forward value that the backward pass reads
    logsumexps: int = 0  # elements of attention's logsumexp
    # attention scores of a sample that is not text; those of a text do not follow from
    # a short trace
    scores: int = 0
    weights: tuple[int, ...] = ()  # elements of each weight in the layout of compute
    trained: tuple[int, ...] = ()  # the same for the weights that are trained
    # an op that declares its own memory; the sizes above contain only its inputs and
    # outputs
    call: Call | None = None


_traced: dict[str, Block] = {}


def trace(composition: Composition, policy: str, platform: str) -> Block:
    """Traces one block as a device computes it; results are cached by content.

    A model without blocks has a block of size zero.

    Args:
      composition: the run on its mesh.
      policy: the remat policy of the block.
      platform: tpu, gpu or cpu.
    """
    run = composition.config
    if not composition.spec.staged:
        return Block()
    sizes = composition.shape.sizes
    length = sample_tokens(composition)
    if length % SHORT == 0:
        length = SHORT  # all sizes are proportional to the tokens
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
    """Traces a block of a model that has blocks, with a sample of `length` tokens."""
    run = composition.config
    spec = composition.spec
    rules = composition.rules
    named = {
        path: parameter
        for path, parameter in spec.named_parameters().items()
        if path.startswith("blocks/")
    }
    whole = [x.shape[1:] for x, _ in named.values()]
    local = [
        rules.shard_dims(rules.computed(names, x.shape[1:]), x.shape[1:])
        for x, names in named.values()
    ]
    # Ids refer to all experts, so the trace must see all of them. It does not enter
    # their call.
    traced_dims = [
        _with_all_experts(dims, local_dims, names)
        for dims, local_dims, (_, names) in zip(
            whole, local, named.values(), strict=True
        )
    ]
    try:
        forward, residuals = _jaxprs(run, spec, traced_dims, length, policy)
    except (TypeError, ValueError):
        # The block does not read its sizes from its weights, so they must be whole.
        forward, residuals = _jaxprs(run, spec, whole, length, policy)
    count = len(named) + len(jax.tree.leaves(spec.model_state.get("blocks", {})))
    x = forward.invars[count]
    lanes = LANES if platform == "tpu" else 1
    kept = list(_kept(residuals, count, lanes))
    if platform == "gpu" and remat.RESIDUALS in remat.named_in(policy)["offload"]:
        # cuDNN's residuals have no name, so they are recomputed instead of offloaded.
        kept = [(name, size) for name, size in kept if name != remat.RESIDUALS]
    call = next(filter(None, map(declared_call, forward.eqns)), None)
    if call:
        itemsize = jnp.dtype(run.precision.compute).itemsize
        declared = call.kept(rules, length, itemsize, platform)
        kept = _with_declared(kept, declared)
    needed = _needed(forward, x, lanes)
    largest = max(needed, default=0)
    if platform == "tpu":
        alive = list((Counter(needed) - Counter(size for _, size in kept)).elements())
    else:
        # XLA for GPUs postpones the gradients of kernels, so the gradients of values
        # outlive the values, and those of kept values take memory of their own.
        alive = needed
    local_heads = (
        dims[names.index("heads")]
        for dims, (_, names) in zip(local, named.values(), strict=True)
        if "heads" in names
    )
    return Block(
        tokens=length,
        x=_bytes(x),
        kept=tuple(kept),
        working=sum(alive) + _bytes(x) + largest,
        largest=largest,
        logsumexps=length * next(local_heads, 0),
        scores=0 if run.data.is_text else _inner_products(forward),
        weights=tuple(map(math.prod, local)),
        trained=tuple(
            math.prod(dims)
            for path, dims in zip(named, local, strict=True)
            if path in spec.named_trainable()
        ),
        call=call,
    )


def _with_declared(
    kept: Sequence[tuple[str, int]], declared: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Replaces sizes of kept values by those that an op declares."""
    names = {name for name, _ in kept}
    traced = [(name, size) for name, size in kept if name not in declared]
    return traced + [(name, size) for name, size in declared.items() if name in names]


def _with_all_experts(
    dims: Sequence[int], local_dims: Sequence[int], names: Names
) -> tuple[int, ...]:
    """Replaces a device's part of the expert dim by the whole dim."""
    if not has_experts(names):
        return tuple(local_dims)
    dim = names.index(EXPERTS)
    return (*local_dims[:dim], dims[dim], *local_dims[dim + 1 :])


def _jaxprs(
    run: RunConfig,
    spec: ModelSpec,
    dims: Sequence[Sequence[int]],
    length: int,
    policy: str,
) -> tuple[Jaxpr, Jaxpr]:
    """Traces a block, and the residuals that its vjp keeps.

    Both jaxprs have the inputs (parameters, x, fields).

    Args:
      run: the config.
      spec: the model.
      dims: the dims of each of the block's parameters.
      length: tokens of the sample.
      policy: the remat policy.
    """
    model = _with_single_block(spec, dims)
    graph, stacked = nnx.split(model.blocks)
    parameters = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked
    )
    batch = compose.batch_shapes(run, 1)
    if run.data.is_text:
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *[length] * (x.ndim - 1)), x.dtype),
            batch,
        )

    def block(parameters: Any, x: jax.Array, fields: Any) -> jax.Array:
        info = BlockInfo(jax.random.key(0), jnp.int32(0), fields)
        y: jax.Array = apply_block(nnx.merge(graph, parameters), x, info).x
        return y

    def residuals(parameters: Any, x: jax.Array, fields: Any) -> list[jax.Array]:
        with_remat = remat.rematerialised(block, policy)
        _, vjp = jax.vjp(lambda p, x: with_remat(p, x, fields), parameters, x)
        return jax.tree.leaves(vjp)

    with execution.activate(compute=run.precision.compute):
        fields = jax.eval_shape(lambda b: shared_fields(_zeros(model), b), batch)
        x = jax.eval_shape(lambda b: _zeros(model).embed(b), batch)
        return (
            jax.make_jaxpr(block)(parameters, x, fields).jaxpr,
            jax.make_jaxpr(residuals)(parameters, x, fields).jaxpr,
        )


def _with_single_block(spec: ModelSpec, dims: Sequence[Sequence[int]]) -> Any:
    """Assembles the abstract model with a stack of a single block.

    Args:
      spec: the model.
      dims: the dims of each of the block's parameters.
    """
    trees = spec.trainable, spec.frozen
    blocks = [tree.get("blocks", {}) for tree in trees]
    dtypes = [stored_dtype(x, "float32") for x in jax.tree.leaves(blocks)]
    leaves = [
        jax.ShapeDtypeStruct((1, *parameter_dims), dtype)
        for parameter_dims, dtype in zip(dims, dtypes, strict=True)
    ]
    stacks = jax.tree.unflatten(jax.tree.structure(blocks), leaves)
    trainable, frozen = (
        tree | {"blocks": stack} for tree, stack in zip(trees, stacks, strict=True)
    )
    return spec.assemble(trainable, spec.model_state, frozen)


def _zeros(model: Any) -> Any:
    """Fills an abstract model with zeros, for use under a trace."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state))


def _kept(jaxpr: Jaxpr, position: int, lanes: int) -> Iterator[tuple[str, int]]:
    """Yields the name and bytes of each residual, without parameters and fields.

    Args:
      jaxpr: a function whose outputs are the residuals of a vjp.
      position: the number of its input x.
      lanes: see `_bytes`.
    """
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}

    def origin(value: Any, *more: str) -> Any:
        """Follows a value back through ops that only change its form, and `more`."""
        while value in producers and producers[value].primitive.name in (*_SAME, *more):
            value = producers[value].invars[0]
        return value

    x = jaxpr.invars[position]
    names = {x: (remat.INPUT, x)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            named = eqn.outvars[0]
            # The residual may be the value before or after a bias is added.
            for source in origin(eqn.invars[0]), origin(eqn.invars[0], "add"):
                names.setdefault(source, (eqn.params["name"], named))
    residuals = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal))
    for residual in residuals:
        if residual not in producers and residual is not x:
            continue  # a parameter or a field
        name, named = names.get(origin(residual), ("unnamed", residual))
        if _elements(named) == _elements(residual):
            yield name, _bytes(named, lanes)  # TPUs keep it in the shape that is named
        else:
            yield name, _bytes(residual, lanes)


def _elements(value: Var) -> tuple[int, Any]:
    """Reads the size and dtype of a value."""
    aval: Any = value.aval
    return aval.size, aval.dtype


# primitives that change at most the form of a value
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
# element-wise primitives whose derivative depends on the value
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
_MATMULS = (  # and kernels
    "dot_general",
    "conv_general_dilated",
    "pallas_call",
    "ragged_dot",
    "ragged_dot_general",
)


def _needed(jaxpr: Jaxpr, x: Var, lanes: int) -> list[int]:
    """Counts the bytes of each forward value that the backward pass reads as an array.

    These are the operands of matmuls and kernels, and their sources: the results of
    matmuls that reach them through element-wise ops. XLA recomputes element-wise ops
    inside the readers of their results. A value that is a linear image of one source of
    the same size (such as rotated queries) is not counted, only its source. A sum of
    matmuls (such as those of a kernel and its adapter) is a source in place of both.

    Args:
      jaxpr: the forward pass of a block.
      x: its input, which is not counted: it is kept, or its predecessor's.
      lanes: see `_bytes`.
    """
    # by value: its sources, and whether a non-linear op is between them
    sources: dict[Var, tuple[frozenset[Var], bool]] = {x: (frozenset([x]), False)}
    needed: dict[Var, int] = {}
    for eqn in jaxpr.eqns:
        operands = [
            v for v in eqn.invars if not isinstance(v, Literal) and v in sources
        ]
        if not _contains(eqn, _MATMULS):
            roots: frozenset[Var] = frozenset().union(
                *(sources[v][0] for v in operands)
            )
            curved = (
                (eqn.primitive.name in ("mul", "div") and len(operands) > 1)
                or _contains(eqn, _CURVED)
                or any(sources[v][1] for v in operands)
            )
            is_sum = eqn.primitive.name == "add" and len(roots) > 1 and not curved
            if is_sum and x not in roots:
                roots = frozenset(eqn.outvars)
            if roots:
                sources |= dict.fromkeys(eqn.outvars, (roots, curved))
            continue
        for operand in operands:
            roots, curved = sources[operand]
            (root, *others) = roots
            if others or curved or _bytes(root) != _bytes(operand):
                needed[operand] = _bytes(operand, lanes)
            needed |= {root: _bytes(root, lanes) for root in roots}
        sources |= {out: (frozenset([out]), False) for out in eqn.outvars}
    needed.pop(x, None)
    return list(needed.values())


def _inner_products(jaxpr: Jaxpr) -> int:
    """Counts the bytes of matmuls inside of calls that return nothing of their size."""
    total = 0
    for eqn in jaxpr.eqns:
        returned = {_elements(out)[0] for out in eqn.outvars}
        for inner in (getattr(value, "jaxpr", value) for value in eqn.params.values()):
            total += sum(
                _bytes(product.outvars[0])
                for product in getattr(inner, "eqns", ())
                if product.primitive.name == "dot_general"
                and _elements(product.outvars[0])[0] not in returned
            )
    return total


def _contains(eqn: JaxprEqn, primitives: Sequence[str]) -> bool:
    """Checks whether an equation is, or contains, one of the primitives."""
    if eqn.primitive.name in primitives:
        return True
    inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
    return any(
        _contains(inner_eqn, primitives)
        for jaxpr in inner
        for inner_eqn in getattr(jaxpr, "eqns", ())
    )


def _bytes(value: Var, lanes: int = 1) -> int:
    """Counts the bytes of a value.

    Args:
      value: the value.
      lanes: elements that rows of more than one element are padded to.
    """
    aval: Any = value.aval
    row = aval.shape[-1] if aval.ndim else 1
    padded = lanes if 1 < row < lanes else row
    size: int = aval.size // max(row, 1) * padded * aval.dtype.itemsize
    return size


def sample_tokens(composition: Composition) -> int:
    """Counts a sample's tokens on a device; 1 for a sample that is not text."""
    run = composition.config
    if not run.data.is_text:
        return 1
    return run.batch.sequence_length // composition.shape.sizes["context"]
