"""Checks whether a split backward pass would beat interleaved 1F1B.

The split does dgrad now and wgrad later.

    python benchmarks/pipeline/zero_bubble.py           # half a minute; nothing is timed

1. FLOPs of a real block, from its jaxpr: forward F, recomputation F, dgrad D and wgrad
   W. The split is a prototype. A zero "tap" is added to the result of every matmul with
   a kernel. The taps' cotangents are the dy that W needs besides the matmul's input x,
   since dW = x^T dy. Its gradients are compared with the ordinary ones.
2. Time of a step in lockstep, where every stage does what any stage does in a tick: the
   plain tables, and the same tables with W as late as all stages allow. No order of W
   is faster; see `late_weights`.
3. Bytes that wait from B to W, by arithmetic and in compiled programs.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.models import layers
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.schedules.simulator import Costs, simulate
from jaxdist.parallel.pipeline.schedules.table import build_schedule
from jaxdist.protocols.model import BlockInfo, shared_fields
from jaxdist.protocols.model_spec import describe
from jaxdist.telemetry.flops import jaxpr_flops

LLAMA_8B = TransformerConfig(
    vocab_size=256,
    num_layers=2,
    d_model=4096,
    d_ff=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
SMALL = TransformerConfig(
    vocab_size=256,
    num_layers=2,
    d_model=256,
    d_ff=688,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
STAGES, MICROBATCHES, CHUNKS = (4, 8, 16), (8, 16, 32, 64), (2, 4)


# --- the tapped stage -----------------------------------------------------------------


class Stage:
    """The layers of one stage, on one device."""

    def __init__(
        self, config: TransformerConfig, batch: int, length: int, compute: str
    ):
        self.compute = compute
        self.spec = describe(lambda rngs: Transformer(config, rngs=rngs))
        self.params = self.spec.trainable["blocks"]
        row = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        self.fields = {"positions": row}
        self.x = jax.ShapeDtypeStruct((batch, length, config.d_model), compute)
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.params
        )
        self.recorded = jax.eval_shape(
            lambda p, x: self.layer(p, x, None)[1], one, self.x
        )

    def layer(self, params, x, taps):
        """Returns (y, [(x, y) of every product with a kernel]).

        Args:
          taps: added to those y; None adds nothing; "whole" leaves the products as they
            are, with their ordinary backward and nothing listed.
        """
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), self.spec.trainable)
        stacked = jax.tree.map(lambda x: x[None], params)
        model = self.spec.assemble(unused | {"blocks": stacked}, {})
        graph, state = nnx.split(model.blocks)
        block = nnx.merge(graph, jax.tree.map(lambda x: x[0], state))
        products, original = [], layers.project

        def tapped(x, *kernels, contract=1):
            out = []
            for kernel in kernels:
                weight = jax.lax.stop_gradient(kernel[...]).astype(x.dtype)
                y = jnp.tensordot(x, weight, contract)
                if taps is not None:
                    y = y + taps[len(products)]
                products.append((x, y))
                out.append(y)
            return tuple(out)

        layers.project = original if isinstance(taps, str) else tapped
        try:
            with execution.activate(compute=self.compute):
                fields = shared_fields(model, self.fields)
                y = block(x, BlockInfo(None, jnp.int32(0), fields)).x
        finally:
            layers.project = original
        return y, products

    def forward(self, params, x):
        """Returns the stage's output, as training computes it."""
        return jax.lax.scan(
            lambda x, p: (self.layer(p, x, "whole")[0], None), x, params
        )[0]

    def whole_backward(self, params, x, dy):
        """Returns (dx, dparams), recomputing the stage."""
        return jax.vjp(self.forward, params, x)[1](dy)[::-1]

    def taps(self):
        depth = jax.tree.leaves(self.params)[0].shape[0]
        return [jnp.zeros((depth, *y.shape), y.dtype) for _, y in self.recorded]

    def dgrad(self, params, x, dy):
        """B without W. Returns (dx, gradients of the vectors, stash of (x, dy) by
        product).
        """

        def tapped(params, x, taps):
            def one(x, item):
                y, products = self.layer(item[0], x, item[1])
                return y, [x for x, _ in products]

            return jax.lax.scan(one, x, (params, taps))

        _, pull, inputs = jax.vjp(tapped, params, x, self.taps(), has_aux=True)
        dparams, dx, dtaps = pull(dy)
        return dx, dparams, [inputs, dtaps]

    def wgrad(self, stash):
        """W. Returns the kernels' gradients, float32 [L, in, out], in the order of the
        products.
        """

        def product(x, dy):
            x, dy = (
                v.reshape(v.shape[0], math.prod(v.shape[1:3]), -1) for v in (x, dy)
            )
            return jnp.einsum("lti,lto->lio", x, dy, preferred_element_type=jnp.float32)

        return [product(x, dy) for x, dy in zip(*stash, strict=True)]


class Flops(NamedTuple):
    """FLOPs of a stage, in forwards."""

    dgrad: float
    wgrad: float
    whole: float  # the ordinary backward, without its recomputation


def count(stage: Stage) -> Flops:
    """Returns how D and W compare with F."""

    def flops(function, *arguments):
        return jaxpr_flops(jax.make_jaxpr(function)(*arguments))

    forward = flops(stage.forward, stage.params, stage.x)
    whole = flops(stage.whole_backward, stage.params, stage.x, stage.x)
    dgrad = flops(stage.dgrad, stage.params, stage.x, stage.x)
    stash = jax.eval_shape(stage.dgrad, stage.params, stage.x, stage.x)[2]
    return Flops(
        dgrad / forward - 1, flops(stage.wgrad, stash) / forward, whole / forward - 1
    )


def check(stage: Stage) -> float:
    """Returns the largest relative difference between split and ordinary gradients."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape, scale=0.05), jnp.float32),
        stage.params,
    )
    x, dy = (
        jnp.asarray(rng.normal(size=stage.x.shape), stage.x.dtype) for _ in range(2)
    )
    dx, whole = jax.jit(stage.whole_backward)(params, x, dy)
    split_dx, vectors, stash = jax.jit(stage.dgrad)(params, x, dy)
    names = (
        ("attention", "query"),
        ("attention", "key"),
        ("attention", "value"),
        ("attention", "out"),
    )
    names += (("mlp", "gate"), ("mlp", "up"), ("mlp", "down"))
    pairs = [(split_dx, dx), (vectors["mlp_norm"]["scale"], whole["mlp_norm"]["scale"])]
    for (part, name), gradient in zip(names, stage.wgrad(stash), strict=True):
        pairs.append((gradient.reshape(whole[part][name].shape), whole[part][name]))
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


# --- time -----------------------------------------------------------------------------


def late_weights(
    stages: int, microbatches: int, chunks: int, flops: Flops
) -> tuple[float, int]:
    """Returns (time of a step, chunks' stashes held at the peak) with W split off, in
    forwards.

    W of each op waits until the stage that is last to do the op's B has done it, so
    that all stages do W in one tick. Lower bound of any lockstep order, which this
    meets: stage 0's vm forwards stand in different ticks and p - 1 more must follow the
    last, so vm + p - 1 ticks pay for F; as many for B; and vm ticks at least for W.
    """
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = build_schedule(name, stages, microbatches, chunks)
    done = schedule.table >= 0
    forwards, backwards = (done[:, :, slot].any(axis=1).sum() for slot in (0, 1))
    count = microbatches * chunks
    unit = np.array([forwards, backwards, count]) / chunks
    time = float(unit @ [1, 1 + flops.dgrad, flops.wgrad])
    b_ticks = np.stack([np.nonzero(done[:, s, 1])[0] for s in range(stages)])
    w_ticks = b_ticks.max(axis=0)
    held = max(
        int(((b_ticks[s] <= t) & (w_ticks >= t)).sum())
        for s in range(stages)
        for t in range(len(done))
    )
    return time, held


def times(flops: Flops) -> None:
    """Prints the table of step times."""
    whole = flops.dgrad + flops.wgrad
    print(
        f"time of a step over m (2F + D + W), F = 1, D = {flops.dgrad:.2f}, W = {flops.wgrad:.2f}\n"
    )
    head = ["p, m", "1f1b", "1f1b, late W", "ZB-H1, own clocks"]
    for v in CHUNKS:
        head += [f"interleaved v={v}", f"v={v}, late W", "gain"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for p in STAGES:
        for m in [m for m in MICROBATCHES if m % p == 0]:
            ideal = m * (2 + whole)
            cells = [f"{p}, {m}"]
            plain = simulate(build_schedule("1f1b", p, m), Costs(1.0, 1 + whole)).time
            # arXiv:2401.10241, table 2: (p - 1) (F + B - W) idle, B with our
            # recomputation
            own = ideal + (p - 1) * (2 + flops.dgrad - flops.wgrad)
            cells += [
                f"{t / ideal:.3f}"
                for t in (plain, late_weights(p, m, 1, flops)[0], own)
            ]
            for v in CHUNKS:
                plain = simulate(
                    build_schedule("interleaved", p, m, v), Costs(1.0, 1 + whole)
                ).time
                late = late_weights(p, m, v, flops)[0]
                cells += [
                    f"{plain / ideal:.3f}",
                    f"{late / ideal:.3f}",
                    f"{1 - late / plain:.1%}",
                ]
            print("| " + " | ".join(cells) + " |")


# --- bytes ----------------------------------------------------------------------------


def stash_elements(config: TransformerConfig) -> int:
    """Returns numbers a token and layer that wait from B to W: each product's input and
    dy.

    Inputs: two normed x, the heads' output, the gated hidden. dy: q, k, v, out, gate,
    up, down.
    """
    heads, kv = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    inputs = 2 * config.d_model + heads + config.d_ff
    return inputs + heads + 2 * kv + config.d_model + 2 * config.d_ff + config.d_model


def compiled_bytes(stage: Stage, slots: int, microbatches: int = 8) -> int:
    """Returns temporary bytes of a compiled loop over B and the W of `slots - 1` turns
    before.
    """

    def loop(params, xs, dys):
        shapes = jax.eval_shape(stage.dgrad, params, xs[0], dys[0])[2]
        ring = jax.tree.map(
            lambda s: jnp.zeros((slots, *s.shape), s.dtype), unique(shapes)
        )
        sums = [
            jnp.zeros(s.shape, s.dtype) for s in jax.eval_shape(stage.wgrad, shapes)
        ]

        def turn(carry, item):
            number, (x, dy) = item
            ring, sums, dx_sum = carry
            dx, _, stash = stage.dgrad(params, x, dy)
            ring = jax.tree.map(
                lambda r, s: r.at[number % slots].set(s), ring, unique(stash)
            )
            old = whole(jax.tree.map(lambda r: r[(number + 1) % slots], ring))
            return (
                ring,
                jax.tree.map(jnp.add, sums, stage.wgrad(old)),
                dx_sum + dx,
            ), None

        items = (jnp.arange(microbatches), (xs, dys))
        return jax.lax.scan(turn, (ring, sums, jnp.zeros_like(xs[0])), items)[0][1:]

    many = jax.ShapeDtypeStruct((microbatches, *stage.x.shape), stage.x.dtype)
    compiled = jax.jit(loop).lower(stage.params, many, many).compile()
    return compiled.memory_analysis().temp_size_in_bytes


# q, k and v share an input, gate and up too: the stash holds it once.
SAME_INPUT = (0, 0, 0, 1, 2, 2, 3)


def unique(stash):
    first = [SAME_INPUT.index(i) for i in range(4)]
    return [[stash[0][i] for i in first], stash[1]]


def whole(stash):
    return [[stash[0][i] for i in SAME_INPUT], stash[1]]


def main() -> None:
    print(
        f"gradients of the split backward differ by {check(Stage(SMALL, 2, 64, 'float32')):.1e}\n"
    )
    for name, config, length in (
        ("256 wide", SMALL, 256),
        ("Llama 3 8B", LLAMA_8B, 8192),
    ):
        found = count(
            Stage(config, 1, length, "bfloat16" if config is LLAMA_8B else "float32")
        )
        print(
            f"{name}, {length} tokens: D = {found.dgrad:.3f} F, W = {found.wgrad:.3f} F, "
            f"ordinary backward {found.whole:.3f} F"
        )
    print()
    times(found)
    print(
        "\nnumbers that wait from B to W, against the one input that a recomputing stage keeps:\n"
    )
    print(
        "| p, m | v | stashes | a layer's, in inputs | 80 layers: stash | inputs of the plain table |"
    )
    print("|---|---|---|---|---|---|")
    each = stash_elements(LLAMA_8B) / LLAMA_8B.d_model
    for p in STAGES:
        for v in (1, 2, 4):
            held = late_weights(p, 64, v, found)[1]
            schedule = build_schedule("interleaved" if v > 1 else "1f1b", p, 64, v)
            inputs = max(simulate(schedule).live_inputs)
            print(
                f"| {p}, 64 | {v} | {held} | {each:.1f} | {held * each * 80 / (p * v):.0f} | {inputs} |"
            )
    stage = Stage(SMALL, 4, 256, "float32")
    slot = 4 * 4 * 256 * SMALL.num_layers * stash_elements(SMALL)
    found_bytes = [compiled_bytes(stage, slots) for slots in (1, 2, 3, 4)]
    growth = [b - a for a, b in itertools.pairwise(found_bytes)]
    print(
        f"\ncompiled, 2 layers x 256, 4 x 256 tokens, 1 to 4 slots: {found_bytes} bytes; a slot more:"
    )
    print(f"{growth} bytes; by arithmetic {slot}; a stage's input {4 * 4 * 256 * 256}")


if __name__ == "__main__":
    main()
