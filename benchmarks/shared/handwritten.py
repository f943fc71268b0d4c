"""The yardstick: a decoder's train step by hand in plain JAX, as fast as possible.

RMSNorm, rotary halves, grouped-query attention, SwiGLU, untied head, float32
cross-entropy, AdamW with float32 masters. Nothing of jaxdist is imported. Three forms
were measured to be faster (benchmarks/step/README.md): projections on flat [T, D]
activations, attention as causal tiles with its own backward pass, and the logits'
gradient computed in the forward pass.

Letters: B batch, S sequence, T = B * S, D model, F feed-forward, H heads, K kv heads, G
= H / K, N head size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

B1, B2, ADAM_EPS, DECAY, INIT_STD = 0.9, 0.95, 1e-8, 0.1, 0.02
# of the mesh's axes data, fsdp and tensor, those that split the batch
BATCH = ("data", "fsdp")
# The dim of a weight [.., in, out] that tensor splits (Megatron-LM): columns, then
# rows.
_TENSOR_DIM = dict.fromkeys(("query", "key", "value", "gate", "up", "head"), -1) | {
    "out": -2,
    "down": -2,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch."""

    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    sequence: int
    batch: int
    theta: float = 10000.0  # base of the rotary frequencies
    eps: float = 1e-5  # of the norms

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


SHAPES = {
    "pico": Shape(1, 16, 48, 2, 1, 64, 16, 8),
    "nano": Shape(2, 64, 176, 4, 2, 512, 64, 8),
    "quick": Shape(4, 256, 688, 8, 4, 4096, 256, 8),
    "std": Shape(8, 512, 1376, 8, 4, 8192, 512, 8),
    "1b": Shape(22, 2048, 5632, 16, 4, 32768, 4096, 8),  # TinyLlama's widths
    # Llama 3.2 3B's widths, smaller vocabulary
    "3b": Shape(28, 3072, 8192, 24, 8, 32768, 4096, 4),
}


@dataclass(frozen=True)
class Options:
    """What the step computes with; `loss_chunk` is tokens scored at once, 0 for all."""

    remat: str = "dots"  # none | dots | full
    dtype: str = "float32"  # of activations and matmuls; masters are float32
    clip_norm: float = 1.0  # 0 = no clipping
    loss_chunk: int = 1024
    kernel: str = "tiles"  # attention: tiles (plain XLA) | cudnn | splash


class State(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array
    params: dict
    first: dict
    second: dict


def init_params(shape: Shape, seed: int) -> dict:
    """Returns float32 parameters, layers stacked [L, ...]; biases and norms aside,
    normal(0.02).
    """
    c, L = shape, shape.num_layers
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def normal(*dims: int) -> jax.Array:
        return INIT_STD * jax.random.normal(next(keys), dims)

    blocks = {
        "query": normal(L, c.d_model, q_width),
        "key": normal(L, c.d_model, kv_width),
        "value": normal(L, c.d_model, kv_width),
        "out": normal(L, q_width, c.d_model),
        "gate": normal(L, c.d_model, c.d_ff),
        "up": normal(L, c.d_model, c.d_ff),
        "down": normal(L, c.d_ff, c.d_model),
        "attention_norm": jnp.ones((L, c.d_model)),
        "mlp_norm": jnp.ones((L, c.d_model)),
    }
    embedding, head = normal(c.vocab_size, c.d_model), normal(c.d_model, c.vocab_size)
    return {
        "embedding": embedding,
        "blocks": blocks,
        "norm": jnp.ones(c.d_model),
        "head": head,
    }


def init(shape: Shape, seed: int) -> State:
    """Returns the state before the first step."""
    params = init_params(shape, seed)
    return State(
        jnp.int32(0), params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    )


# ---------------------------------------------------------------------------- the model


def rms_norm(x, scale, eps: float):
    """Returns x over its root mean square, computed in float32, in the dtype of x."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def rotary_tables(shape: Shape):
    """Returns cos and sin, float32 [S, 1, N / 2]."""
    half = shape.head_dim // 2
    angles = jnp.arange(shape.sequence)[:, None] * shape.theta ** (
        -jnp.arange(half) / half
    )
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def rotate(x_BSHN, cos, sin):
    """Returns x with each head's two halves rotated."""
    a, b = jnp.split(x_BSHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(
        x_BSHN.dtype
    )


def _tiles(length: int) -> list[tuple[int, int]]:
    """Returns up to 4 query tiles (from, to): a tile needs no key after its own end."""
    size = max(64, length // 4)
    return [(lo, min(lo + size, length)) for lo in range(0, length, size)]


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q, k, lo: int, hi: int):
    """Returns masked scores [B, K, G * (hi - lo), hi] of query rows lo to hi, all G
    heads below one another, against the keys before hi."""
    bias = jnp.where(jnp.arange(lo, hi)[:, None] >= jnp.arange(hi), 0.0, -1e30)
    return _dot("bksn,bktn->bkst", _rows(q, lo, hi), k[:, :, :hi]) + jnp.tile(
        bias, (q.shape[2], 1)
    )


def _rows(x, lo: int, hi: int):
    """Returns [B, K, G * (hi - lo), ...] of [B, K, G, S, ...]."""
    return x[:, :, :, lo:hi].reshape(*x.shape[:2], -1, *x.shape[4:])


@jax.custom_vjp
def tiled_attention(q, k, v):
    """Returns causal attention, like q [B, K, G, S, N], already scaled; k, v: [B, K, S,
    N].
    """
    return _attend(q, k, v)[0]


def _attend(q, k, v):
    B, K, G, S, N = q.shape
    outputs, normalisers = [], []
    for lo, hi in _tiles(S):
        s = _scores(q, k, lo, hi)
        top = s.max(-1, keepdims=True)
        p = jnp.exp(s - top)
        total = p.sum(-1, keepdims=True)
        o = _dot("bkst,bktn->bksn", p.astype(v.dtype), v[:, :, :hi]) / total
        outputs.append(o.astype(v.dtype).reshape(B, K, G, hi - lo, N))
        normalisers.append((top + jnp.log(total)).reshape(B, K, G, hi - lo))
    out = checkpoint_name(jnp.concatenate(outputs, 3), "attention")
    return out, (
        q,
        k,
        v,
        out,
        checkpoint_name(jnp.concatenate(normalisers, 3), "attention"),
    )


def _attend_backward(residuals, dout):
    q, k, v, out, normaliser = residuals
    S = q.shape[3]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1)
    dq, dk, dv = [], 0.0, 0.0
    for lo, hi in _tiles(S):
        rows = partial(_rows, lo=lo, hi=hi)
        p = jnp.exp(_scores(q, k, lo, hi) - rows(normaliser)[..., None])
        dp = _dot("bksn,bktn->bkst", rows(dout), v[:, :, :hi])
        ds = (p * (dp - rows(delta)[..., None])).astype(q.dtype)
        dq.append(
            _dot("bkst,bktn->bksn", ds, k[:, :, :hi]).reshape(q[:, :, :, lo:hi].shape)
        )
        past = ((0, 0), (0, 0), (0, 0), (0, S - hi))
        dk += jnp.pad(_dot("bkns,bkst->bknt", _turned(rows(q)), ds), past)
        dv += jnp.pad(
            _dot("bkns,bkst->bknt", _turned(rows(dout)), p.astype(v.dtype)), past
        )
    dk, dv = (_turned(x).astype(k.dtype) for x in (dk, dv))
    return jnp.concatenate(dq, 3).astype(q.dtype), dk, dv


def _turned(x):
    """Returns [.., N, rows] of [.., rows, N], as an array of its own: on a CPU its
    products with p and ds are twice as fast as products that have p and ds
    transposed."""
    return lax.optimization_barrier(x.swapaxes(-1, -2))


tiled_attention.defvjp(_attend, _attend_backward)


def attention(q_BSHN, k_BSKN, v_BSKN, kernel: str, mesh: Mesh | None):
    """Returns causal grouped-query attention, [T, H * N]."""
    B, S, H, N = q_BSHN.shape
    if kernel == "cudnn":
        mixed = jax.nn.dot_product_attention(
            q_BSHN, k_BSKN, v_BSKN, is_causal=True, implementation="cudnn"
        )
        return mixed.reshape(B * S, H * N)
    if kernel == "splash":
        mixed, whole = splash, P(BATCH, None, "tensor", None)
        if mesh is not None:  # a kernel is opaque to the partitioner
            mixed = jax.shard_map(
                splash,
                mesh=mesh,
                in_specs=(whole,) * 3,
                out_specs=whole,
                check_vma=False,
            )
        return mixed(
            q_BSHN * jnp.asarray(N**-0.5, q_BSHN.dtype), k_BSKN, v_BSKN
        ).reshape(B * S, H * N)
    K = k_BSKN.shape[2]
    q = (q_BSHN * N**-0.5).reshape(B, S, K, H // K, N).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k_BSKN, v_BSKN))
    return tiled_attention(q, k, v).transpose(0, 3, 1, 2, 4).reshape(B * S, H * N)


def splash(q_BSHN, k_BSKN, v_BSKN, interpret: bool = False):
    """Returns causal attention of a device's own rows and heads by JAX's TPU kernel, q
    already scaled.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    S, H = q_BSHN.shape[1:3]
    block = max(b for b in (128, 256, 384, 512) if S % b == 0)
    fields = (
        "block_q",
        "block_kv",
        "block_q_dkv",
        "block_kv_dkv",
        "block_q_dq",
        "block_kv_dq",
    )
    kernel = pallas.make_splash_mha(
        pallas.MultiHeadMask([pallas.CausalMask((S, S))] * H),
        block_sizes=pallas.BlockSizes(**dict.fromkeys(fields, block)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    return jax.vmap(kernel)(
        *(x.swapaxes(1, 2) for x in (q_BSHN, k_BSKN, v_BSKN))
    ).swapaxes(1, 2)


def block(x_TD, p, tables, shape: Shape, kernel: str, mesh: Mesh | None):
    """Returns the output of one layer, [T, D]."""
    x_TD, p, h = attention_part(x_TD, p, tables, shape, kernel, mesh)
    return x_TD + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def attention_part(x_TD, p, tables, shape: Shape, kernel: str, mesh: Mesh | None):
    """Returns x with attention added, a layer's gathered weights, and what its other
    part takes.
    """

    def heads(y):
        y = y.reshape(shape.batch, shape.sequence, -1, shape.head_dim)
        return _pinned(y, mesh, P(BATCH, None, "tensor"))

    # fsdp: gathered here, layer by layer
    p = {
        name: _pinned(w, mesh, weight_spec(name, w.shape, mesh, gathered=True))
        for name, w in p.items()
    }
    x_TD = _pinned(x_TD, mesh, P(BATCH))
    h = rms_norm(x_TD, p["attention_norm"], shape.eps)
    q, k, v = heads(h @ p["query"]), heads(h @ p["key"]), heads(h @ p["value"])
    mixed = attention(rotate(q, *tables), rotate(k, *tables), v, kernel, mesh)
    x_TD = x_TD + mixed @ p["out"]
    return x_TD, p, rms_norm(x_TD, p["mlp_norm"], shape.eps)


def _pinned(x, mesh: Mesh | None, spec: P):
    return (
        x
        if mesh is None
        else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(x_BSD, head_DV, targets_BS, weights_BS, parts: int):
    """Returns the sum of weights * nats; a sequence is scored in `parts`, one after
    another.
    """
    return _score(x_BSD, head_DV, targets_BS, weights_BS, parts)[0]


def _score(x_BSD, head_DV, targets_BS, weights_BS, parts: int):
    """Returns the loss and its gradients: the logits are never needed again."""

    def part(total, rows):
        loss, dhead = total
        x, targets, weights = rows
        logits = jnp.matmul(x, head_DV, preferred_element_type=jnp.float32)
        top = logits.max(-1, keepdims=True)
        p = jnp.exp(logits - top)
        norm = p.sum(-1, keepdims=True)
        picked = jnp.take_along_axis(logits, targets[:, None], 1)
        loss += jnp.sum(weights * (jnp.log(norm) + top - picked)[:, 0])
        hit = targets[:, None] == jnp.arange(head_DV.shape[1])
        dlogits = p * (weights[:, None] / norm) - jnp.where(hit, weights[:, None], 0)
        dlogits = dlogits.astype(x.dtype)
        dhead += jnp.matmul(x.T, dlogits, preferred_element_type=jnp.float32)
        return (loss, dhead), dlogits @ head_DV.T

    start = (0.0, jnp.zeros(head_DV.shape))
    rows = jax.tree.map(lambda a: _cut(a, parts), (x_BSD, targets_BS, weights_BS))
    if parts == 1:
        (loss, dhead), dx = part(start, jax.tree.map(lambda a: a[0], rows))
    else:
        (loss, dhead), dx = lax.scan(part, start, rows)
    B, S, D = x_BSD.shape
    dx = dx.reshape(parts, B, S // parts, D).swapaxes(0, 1).reshape(B, S, D)
    return loss, (dx, dhead.astype(head_DV.dtype))


def _cut(x, parts: int):
    """Returns [parts, B * S / parts, ...] of [B, S, ...]: a part has a piece of every
    sequence.
    """
    B, S, *rest = x.shape
    return (
        x.reshape(B, parts, S // parts, *rest).swapaxes(0, 1).reshape(parts, -1, *rest)
    )


def _score_backward(_, gradients, scale):
    dx, dhead = gradients
    return (
        (dx * scale).astype(dx.dtype),
        (dhead * scale).astype(dhead.dtype),
        None,
        None,
    )


cross_entropy.defvjp(_score, _score_backward)


def _remat_policy(name: str):
    """Returns what `dots` keeps: outputs of projections and of attention, no scores."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def saveable(primitive, *args, **params):
        return "dot_product_attention_fwd" in primitive.name or dots(
            primitive, *args, **params
        )

    names = jax.checkpoint_policies.save_only_these_names("attention", "experts")
    both = jax.checkpoint_policies.save_from_both_policies(saveable, names)
    return {"dots": both, "full": jax.checkpoint_policies.nothing_saveable}[name]


def loss(params, batch, shape: Shape, options: Options, mesh: Mesh | None = None):
    """Returns mean nats per weighted token, a float32 scalar."""
    # cast once, outside the scan; norm scales stay float32
    if options.dtype != "float32":
        dtype = jnp.dtype(options.dtype)
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x if "norm" in path[-1].key else x.astype(dtype), params
        )
    tables = rotary_tables(shape)

    def layer(x, p):
        return block(x, p, tables, shape, options.kernel, mesh), None

    return scanned_loss(layer, params["blocks"], params, batch, shape, options, mesh)[0]


def scanned_loss(
    layer, inputs, params, batch, shape: Shape, options: Options, mesh: Mesh | None
):
    """Returns the loss after `x, y = layer(x, inputs of a layer)` of all layers, and
    the stacked y.
    """
    c = shape
    if options.remat != "none":
        layer = jax.checkpoint(
            layer, policy=_remat_policy(options.remat), prevent_cse=False
        )
    x_TD = _pinned(params["embedding"], mesh, P())[batch["tokens"].reshape(-1)]
    x_TD, ys = lax.scan(layer, _pinned(x_TD, mesh, P(BATCH)), inputs)
    x_BSD = rms_norm(x_TD, params["norm"], c.eps).reshape(
        c.batch, c.sequence, c.d_model
    )
    shards = 1 if mesh is None else mesh.size // mesh.shape["tensor"]
    wanted = (
        c.batch * c.sequence // (shards * options.loss_chunk)
        if options.loss_chunk
        else 1
    )
    parts = math.gcd(max(wanted, 1), c.sequence)
    head = params["head"]
    head = _pinned(head, mesh, weight_spec("head", head.shape, mesh, gathered=True))
    total = cross_entropy(x_BSD, head, batch["targets"], batch["weights"], parts)
    return total / batch["weights"].sum(), ys


# ----------------------------------------------------------------------------- the step


def adamw(path, p, g, m, v, step, learning_rate):
    """Returns the new parameter and moments of one leaf; norm scales do not decay."""
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
    done = (step + 1).astype(jnp.float32)
    update = (m / (1 - B1**done)) / (jnp.sqrt(v / (1 - B2**done)) + ADAM_EPS)
    decay = 0.0 if "norm" in path[-1].key else DECAY
    return p - learning_rate * (update + decay * p), m, v


def train_step(
    state: State, batch, learning_rate, *, shape: Shape, options: Options, mesh
):
    """Returns the next state and {"loss", "grad_norm"}."""
    value, grads = jax.value_and_grad(loss)(state.params, batch, shape, options, mesh)
    specs = weight_specs(grads, mesh)
    grads = jax.tree.map(lambda g, spec: _pinned(g, mesh, spec), grads, specs)
    new, norm = updated(state, grads, learning_rate, options)
    return State(state.step + 1, *new), {"loss": value, "grad_norm": norm}


def updated(state, grads, learning_rate, options: Options):
    """Returns the new parameters and moments, and the norm of the gradients."""
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    if options.clip_norm:
        scale = options.clip_norm / jnp.maximum(norm, options.clip_norm)
        grads = jax.tree.map(lambda g: g * scale, grads)
    update = partial(adamw, step=state.step, learning_rate=learning_rate)
    leaves = jax.tree_util.tree_map_with_path(
        update, state.params, grads, state.first, state.second
    )
    return jax.tree.transpose(
        jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), leaves
    ), norm


def weight_spec(
    name: str,
    dims: tuple[int, ...],
    mesh: Mesh | None,
    *,
    stacked=False,
    gathered=False,
) -> P:
    """Returns where a weight lies: tensor has its dim of it, fsdp the largest other
    that it divides.

    Args:
      stacked: the first dim is that of the layers, which nothing splits.
      gathered: as it is computed with, not split over fsdp.
    """
    axes: list[str | None] = [None] * len(dims)
    if mesh is None or len(dims) - stacked < 2:
        return P()
    if name in _TENSOR_DIM and mesh.shape["tensor"] > 1:
        axes[_TENSOR_DIM[name]] = "tensor"
    legal = [
        i
        for i in range(stacked, len(dims))
        if axes[i] is None and dims[i] % mesh.shape["fsdp"] == 0
    ]
    if legal and not gathered:
        axes[max(legal, key=lambda i: dims[i])] = "fsdp"
    return P(*axes)


def weight_specs(params: dict, mesh: Mesh | None) -> dict:
    """Returns the spec of every parameter, or of a moment or gradient of it."""

    def of(path, x):
        return weight_spec(path[-1].key, x.shape, mesh, stacked=path[0].key == "blocks")

    return jax.tree_util.tree_map_with_path(of, params)


def state_shardings(shape: Shape, mesh: Mesh) -> State:
    """Returns the sharding of every leaf of the state on a mesh of data, fsdp and
    tensor.
    """
    specs = weight_specs(jax.eval_shape(partial(init_params, shape, 0)), mesh)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), State(P(), specs, specs, specs)
    )


def build_step(shape: Shape, options: Options, mesh: Mesh | None = None):
    """Returns the jitted `(state, batch, learning_rate) -> (state, metrics)`, its state
    donated.
    """
    step = partial(train_step, shape=shape, options=options, mesh=mesh)
    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    whole = NamedSharding(mesh, P())
    return jax.jit(
        step, donate_argnums=0, out_shardings=(state_shardings(shape, mesh), whole)
    )


def random_batch(
    size: int, sequence: int, vocab_size: int, seed: int = 0
) -> dict[str, jax.Array]:
    """Returns random tokens, their next tokens as targets and weights of 1, each [B,
    S].
    """
    tokens = jax.random.randint(
        jax.random.key(seed), (size, sequence + 1), 0, vocab_size, jnp.int32
    )
    weights = jnp.ones((size, sequence), jnp.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
