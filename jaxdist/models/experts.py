"""The feed-forward part with experts: router, their kernels, shared experts, and what
keeps the load even.

All that is added up (load, balance, z-loss) is a sum over tokens with a weight in the
loss, so it is the same however a batch is split. What is no such sum is known a step
later: model state, changed by `update`.

Letters: see `layers`; `E` experts, `k` experts of a token.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models import layers
from jaxdist.models.transformer_config import TransformerConfig
from jaxdist.ops.experts import Routing, experts, route
from jaxdist.ops.experts.mixture import DOWN_NAMES, INPUT_NAMES
from jaxdist.ops.matmul import project
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import BlockInfo, BlockOutput

# field of a block's info: weights in the loss, [B, S]; absent: nothing is counted
WEIGHTS = "token_weights"
# Field of a batch, [B, S, L, k] int32: experts that tokens go to in each layer; below
# 0: as routers choose. Near-ties fall as rounding does, so what is compared in low
# precision is given them.
GIVEN_IDS = "expert_ids"
# stats: choices of each expert [E], and how many were dropped
LOAD, DROPS = "expert_load", "expert_drops"
ROUNDS, EXCHANGES = "expert_rounds", "expert_exchanges"
# a stat of models with dense layers, too: [L], not 0 at this layer's number
LAYER = "expert_layer"
LOAD_METRIC = "expert_load"  # [L, E], of a step


class Experts(nnx.Module):
    """Experts, of which a router chooses some for each token, and shared ones that see
    all (2401.06066).
    """

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        shared: nnx.Module | None = None,
    ):
        c, std = config, config.init_std
        E, D, F = c.num_experts, c.d_model, c.expert_width
        self.config = config
        self.router = layers.normal(rngs, (D, E), std, ("d_model", None))
        if c.gated:
            self.gate = layers.normal(rngs, (E, D, F), std, INPUT_NAMES)
        self.up = layers.normal(rngs, (E, D, F), std, INPUT_NAMES)
        self.down = layers.normal(rngs, (E, F, D), c.output_std, DOWN_NAMES)
        if shared is not None:
            self.shared = shared
        if c.balance == "bias":
            self.choice_bias = nnx.Variable(jnp.zeros(E, jnp.float32))
        if c.balance == "batch":
            self.last_load = nnx.Variable(
                jnp.full(E, 1 / E, jnp.float32)
            )  # shares of the last step's choices

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Returns the output [B, S, D], the terms of the objective, and the counts of
        this layer.
        """
        c, segments, weights = (
            self.config,
            info.fields.get("segment_ids"),
            info.fields.get(WEIGHTS),
        )
        logits, routing = self.route(x_BSD, _given_ids(info))
        out = experts(
            x_BSD,
            routing.ids,
            routing.weights,
            getattr(self, "gate", None),
            self.up,
            self.down,
            layers.ACTIVATIONS[c.activation],
            # As with dropout: what is evaluated or generated drops nothing.
            capacity_factor=(c.capacity_factor or None)
            if info.key is not None
            else None,
            valid_BS=None if segments is None else segments > 0,
            counted_BS=None if weights is None else weights > 0,
        )
        y = layers.shard_and_name(out.x, "mlp_out", "batch", "residual", None)
        y = y + self.shared(x_BSD) if hasattr(self, "shared") else y
        if weights is None:
            return BlockOutput(y)
        sums = out.stats
        stats = {
            LOAD: sums.load,
            DROPS: sums.dropped,
            ROUNDS: sums.rounds,
            EXCHANGES: sums.exchanges,
        }
        if len(c.sparse_layers) < c.num_layers:
            stats[LAYER] = sums.exchanges * jax.nn.one_hot(info.layer, c.num_layers)
        return BlockOutput(y, self._aux(logits, routing, weights), stats)

    def route(
        self, x_BSD: jax.Array, given: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Returns the router's float32 logits [B, S, E], and where it sends the tokens
        (to those given).
        """
        c = self.config
        (logits,) = project(x_BSD.astype(jnp.float32), self.router)
        logits = shard(logits, "batch", "sequence", None)
        routing = route(
            logits,
            c.experts_per_token,
            scores=c.scores,
            bias=self.choice_bias[...] if c.balance == "bias" else None,
            normalise=c.normalise_top_k,
            scale=c.route_scale,
            groups=c.expert_groups,
            top_groups=c.expert_top_groups,
            given=given,
        )
        return logits, routing

    def _aux(
        self, logits: jax.Array, routing: Routing, weights_BS: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns this layer's terms of the objective: sums over tokens, each times the
        token's weight.
        """
        c, aux = self.config, {}
        shares = routing.scores / (routing.scores.sum(-1, keepdims=True) + 1e-20)
        if c.balance == "sequence":
            aux["balance"] = c.balance_weight * sequence_balance(
                shares, routing.ids, weights_BS
            )
        elif c.balance == "batch":
            sums = (shares * weights_BS[..., None]).sum((0, 1))
            aux["balance"] = (
                c.balance_weight * c.num_experts * (self.last_load[...] * sums).sum()
            )
        if c.router_z_loss:
            z = jax.nn.logsumexp(logits, -1)
            aux["router_z_loss"] = c.router_z_loss * (weights_BS * z * z).sum()
        return aux

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Changes the state, of all layers if this is a stack, by a whole
        step's stats.
        """
        load = stats[LOAD]
        total, c = load.sum(-1, keepdims=True), self.config
        if c.balance == "bias":
            # DeepSeek-V3's (arXiv:2412.19437, 2.1.2), kept around 0: only differences
            # choose. Whole numbers, then a product whose last bits are cut: a compiler
            # may fuse no sum with it, which rounds once where two operations round
            # twice, as the layout has it.
            step = jnp.sign(total - c.num_experts * load)
            units = c.num_experts * step - step.sum(-1, keepdims=True)
            move = jax.lax.reduce_precision(
                c.balance_rate / c.num_experts * units, 8, 20
            )
            self.choice_bias.set_value(self.choice_bias[...] + move)
        elif c.balance == "batch":
            shares = load / jnp.maximum(total, 1)
            self.last_load.set_value(jnp.where(total > 0, shares, self.last_load[...]))


def _given_ids(info: BlockInfo) -> jax.Array | None:
    """Returns the batch's experts for this layer's tokens [B, S, k]; None if it has
    none.
    """
    ids_BSLk = info.fields.get(GIVEN_IDS)
    return (
        None
        if ids_BSLk is None
        else jax.lax.dynamic_index_in_dim(ids_BSLk, info.layer, 2, False)
    )


def sequence_balance(
    shares_BSE: jax.Array, ids_BSk: jax.Array, weights_BS: jax.Array
) -> jax.Array:
    """Returns the sum over sequences of their balance loss times their weight
    (arXiv:2412.19437, 17-20).

    A sequence's loss is the sum over experts of f P, f its share of choices times E, P
    its mean share of the scores; 1 if they are even. Means are weighted as the tokens
    are.
    """
    k, E = ids_BSk.shape[-1], shares_BSE.shape[-1]
    chosen = (ids_BSk[..., None] == jnp.arange(E).reshape(1, 1, 1, E)).any(-2)
    weights = weights_BS.astype(jnp.float32)[..., None]
    choices, scores = (chosen * weights).sum(1), (shares_BSE * weights).sum(1)
    total = weights.sum((1, 2))
    return E / k * ((choices * scores).sum(-1) / jnp.maximum(total, 1e-20)).sum()


def metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns figures of a step's load from the layers' stats, and other stats as they
    are.

    Stats have a row for each layer with experts (load [L, E]), or for each of a group
    ([groups, layers, E]). Of each such layer: `load_max_over_mean`, `load_entropy` (1:
    even), `dead_experts` that no token of the step chose, `dropped`, a share of
    choices, and `exchange_rounds`, 1 if even. `expert_load` [L, E], choices of each
    expert, has a row for dense layers too, of 0. And `fullest_layer`, where an expert
    has the most.
    """
    if LOAD not in stats:
        return dict(stats)
    E = stats[LOAD].shape[-1]
    load = stats[LOAD].reshape(-1, E)
    drops, rounds, exchanges = (
        stats[name].reshape(-1) for name in (DROPS, ROUNDS, EXCHANGES)
    )
    total = jnp.maximum(load.sum(-1), 1)
    shares = load / total[:, None]
    entropy = -(shares * jnp.log(jnp.maximum(shares, 1e-20))).sum(-1)
    fullest = shares.max(-1) * E
    of_all, number = load, jnp.argmax(fullest)
    if LAYER in stats:
        numbers = jnp.argmax(stats[LAYER].reshape(len(load), -1), -1)
        of_all = jnp.zeros((stats[LAYER].shape[-1], E)).at[numbers].set(load)
        number = numbers[number]
    own = (LOAD, DROPS, ROUNDS, EXCHANGES, LAYER)
    return {name: x for name, x in stats.items() if name not in own} | {
        LOAD_METRIC: of_all,
        "load_max_over_mean": fullest,
        "load_entropy": entropy / math.log(max(E, 2)),
        "fullest_layer": number,
        "dead_experts": (load == 0).sum(-1),
        "dropped": drops / total,
        "exchange_rounds": rounds / jnp.maximum(exchanges, 1),
    }
