"""Mixture of experts, the channel of "sparse" layers.

It has a router, the kernels of the experts, shared experts, and load balancing. Load,
balance loss and z-loss are sums over the tokens that count in the loss, so they do not
depend on how a batch is split. Values that are no such sums are known one step later:
they are model state, which `update` changes.

Letters: see `layers`; E experts, k experts per token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TrainingOnly,
)
from jaxdist.models import layers
from jaxdist.models.feed_forward import (
    FeedForward,
    FeedForwardConfig,
    feed_forward_cost,
)
from jaxdist.models.parts import Channel
from jaxdist.ops.costs import Cost, Product
from jaxdist.ops.experts import Routing, experts, experts_cost, explain, route
from jaxdist.ops.experts.mixture import DOWN_NAMES, INPUT_NAMES
from jaxdist.ops.matmul import project
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import Batch, BlockInfo, BlockOutput

# Field of a block's info, [B, S]: weights of the tokens in the loss. Without it,
# nothing is counted.
WEIGHTS = "token_weights"
# Field of a batch, [B, S, L, k] int32: the experts of each token in each layer. Below
# 0 the router chooses. Comparisons in low precision set them, because rounding decides
# near-ties.
GIVEN_IDS = "expert_ids"
# Stats of a layer: number of choices of each expert [E], of dropped choices, of rounds
# of exchange, and of exchanges.
LOAD = "expert_load"
DROPS = "expert_drops"
ROUNDS = "expert_rounds"
EXCHANGES = "expert_exchanges"
# Stat of models that also have dense layers: [L], not 0 at this layer's number.
LAYER = "expert_layer"
LOAD_METRIC = "expert_load"  # [L, E], of a step


@dataclass(frozen=True)
class ExpertsConfig(FeedForwardConfig):
    """Options of experts; their width defaults to that of feed-forward parts."""

    num_experts: NonNegativeInt = 0  # experts of each sparse layer; 0 = dense model
    # dense layers before those with experts (DeepSeek-V3: 3)
    first_dense_layers: NonNegativeInt = 0
    experts_per_token: PositiveInt = 2  # experts that the router chooses for a token
    expert_d_ff: NonNegativeInt = 0  # width inside an expert; 0 = d_ff
    num_shared_experts: NonNegativeInt = 0  # further experts, which see all tokens
    # whether a token scales its shared experts' output by the sigmoid of a learned
    # product (Qwen2-MoE)
    shared_expert_gate: bool = False
    # function that turns the router's logits into scores; DeepSeek-V3: sigmoid
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True  # divide a token's weights by their sum
    route_scale: PositiveFloat = 1.0  # factor of the weights
    expert_groups: NonNegativeInt = 0  # equal groups of experts; 0 = none
    # number of groups whose experts a token may use, the best ones. Softmax scores rank
    # a group by its best expert (DeepSeek-V2), sigmoid scores by the sum of its best two
    # (DeepSeek-V3)
    expert_top_groups: NonNegativeInt = 0
    # balancing of the load. bias = a bias of the choice, changed after each step
    # (DeepSeek-V3). sequence = a loss of each sequence. batch = a loss of the batch, by
    # the load of the previous step
    balance: Literal["none", "bias", "sequence", "batch"] = "bias"
    # change of a bias in a step
    balance_rate: Annotated[PositiveFloat, TrainingOnly()] = 1e-3
    # weight of the balance loss of each layer; sequence in DeepSeek-V3: 1e-4
    balance_weight: Annotated[PositiveFloat, TrainingOnly()] = 1e-2
    # weight of log(Z)^2 of the router's logits, e.g. 1e-3
    router_z_loss: Annotated[NonNegativeFloat, TrainingOnly()] = 0.0
    # capacity of an expert in training, as a multiple of its even share of a sequence;
    # further choices are dropped; 0 = no limit
    capacity_factor: Annotated[NonNegativeFloat, TrainingOnly()] = 0.0

    @property
    def expert_width(self) -> int:
        """The width inside an expert."""
        return self.expert_d_ff or self.d_ff

    @property
    def group_experts(self) -> int:
        """The number of a group's best experts whose scores rank the group."""
        if self.scores == "softmax":
            return 1  # DeepSeek-V2
        return 2  # DeepSeek-V3

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts; stats have a row for each."""
        if not self.num_experts:
            return ()
        parts = self.feed_forward_pattern
        first = self.first_dense_layers
        return tuple(
            layer
            for layer in range(first, self.num_layers)
            if parts[(layer - first) % len(parts)] == "sparse"
        )


# Options that have no effect in a dense model.
EXPERT_FIELDS = (
    *(name for name in ExpertsConfig.__annotations__ if name != "num_experts"),
    "feed_forward_pattern",
)


class Experts(Channel):
    """A mixture of experts (arXiv:2401.06066).

    A router chooses some experts for each token. Shared experts see all tokens.
    """

    Config = ExpertsConfig
    stat_names = (LOAD,)

    def __init__(self, config: ExpertsConfig, rngs: nnx.Rngs) -> None:
        c = self.config = config
        std = c.init_std
        E = c.num_experts
        D = c.d_model
        F = c.expert_width
        if c.num_shared_experts:  # one part as wide as all shared experts together
            shared = FeedForward(c, rngs, c.num_shared_experts * F)
        self.router = layers.normal(rngs, (D, E), std, ("d_model", None))
        if c.gated:
            self.gate = layers.normal(rngs, (E, D, F), std, INPUT_NAMES)
        self.up = layers.normal(rngs, (E, D, F), std, INPUT_NAMES)
        self.down = layers.normal(rngs, (E, F, D), c.output_std, DOWN_NAMES)
        if c.num_shared_experts:
            self.shared = shared
        if c.shared_expert_gate:
            self.shared_gate = layers.normal(rngs, (D, 1), std, ("d_model", None))
        if c.balance == "bias":
            self.choice_bias = nnx.Variable(jnp.zeros(E, jnp.float32))
        if c.balance == "batch":  # each expert's share of the last step's choices
            self.last_load = nnx.Variable(jnp.full(E, 1 / E, jnp.float32))

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Computes the output [B, S, D], aux losses and stats of this layer."""
        c = self.config
        segments = info.fields.get("segment_ids")
        weights = info.fields.get(WEIGHTS)
        # As with dropout, evaluation and generation drop nothing.
        capacity_factor = None
        if info.key is not None:
            capacity_factor = c.capacity_factor or None
        logits, routing = self.route(x_BSD, _given_ids(info))
        out = experts(
            x_BSD,
            routing.ids,
            routing.weights,
            getattr(self, "gate", None),
            self.up,
            self.down,
            layers.ACTIVATIONS[c.activation],
            capacity_factor=capacity_factor,
            valid_BS=None if segments is None else segments > 0,
            counted_BS=None if weights is None else weights > 0,
        )
        y = layers.shard_and_name(out.x, "mlp_out", "batch", "residual", None)
        if hasattr(self, "shared"):
            y = y + self._shared_output(x_BSD, info)
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

    def _shared_output(self, x_BSD: jax.Array, info: BlockInfo) -> jax.Array:
        """Computes the output [B, S, D] of the shared experts, gated if configured.

        As the router, the gate computes in float32.
        """
        y = self.shared(x_BSD, info).x
        if not self.config.shared_expert_gate:
            return y
        (logits,) = project(x_BSD.astype(jnp.float32), self.shared_gate)
        gate = shard(jax.nn.sigmoid(logits), "batch", "residual", None)
        return (y.astype(jnp.float32) * gate).astype(y.dtype)

    def route(
        self, x_BSD: jax.Array, given_ids: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Routes tokens to experts.

        Args:
          x_BSD: input of the layer.
          given_ids: experts to use, [B, S, k]; below 0 the router chooses. None: the router
            chooses all.

        Returns:
          The router's float32 logits [B, S, E], and the routing.
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
            group_experts=c.group_experts,
            given=given_ids,
        )
        return logits, routing

    def _aux(
        self, logits: jax.Array, routing: Routing, weights_BS: jax.Array
    ) -> dict[str, jax.Array]:
        """Computes the aux losses of this layer, weighted sums over tokens."""
        c = self.config
        aux = {}
        shares = routing.scores / (routing.scores.sum(-1, keepdims=True) + 1e-20)
        if c.balance == "sequence":
            aux["balance"] = c.balance_weight * sequence_balance(
                shares, routing.ids, weights_BS
            )
        elif c.balance == "batch":
            sums = (shares * weights_BS[..., None]).sum((0, 1))
            last_load = self.last_load[...]
            aux["balance"] = c.balance_weight * c.num_experts * (last_load * sums).sum()
        if c.router_z_loss:
            z = jax.nn.logsumexp(logits, -1)
            aux["router_z_loss"] = c.router_z_loss * (weights_BS * z * z).sum()
        return aux

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Updates the balance state from a step's stats, for all layers of a stack."""
        load = stats[LOAD]
        total = load.sum(-1, keepdims=True)
        c = self.config
        if c.balance == "bias":
            # The rule of DeepSeek-V3 (arXiv:2412.19437, 2.1.2), with a mean of 0, since
            # only differences matter. `units` are whole numbers, and the last bits of
            # the product are cut. So the result is the same on every layout: fused with
            # the addition, the product would round once in place of twice.
            step = jnp.sign(total - c.num_experts * load)
            units = c.num_experts * step - step.sum(-1, keepdims=True)
            change = jax.lax.reduce_precision(
                c.balance_rate / c.num_experts * units, 8, 20
            )
            self.choice_bias.set_value(self.choice_bias[...] + change)
        elif c.balance == "batch":
            shares = load / jnp.maximum(total, 1)
            self.last_load.set_value(jnp.where(total > 0, shares, self.last_load[...]))

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Computes metrics of the load, see `metrics`."""
        return metrics(stats)

    @staticmethod
    def prepare(
        config: ExpertsConfig, batch: Batch, length: int
    ) -> dict[str, jax.Array]:
        """Passes the tokens' weights to the layers, so that they can count choices."""
        return {WEIGHTS: batch["weights"]} if "weights" in batch else {}

    @staticmethod
    def costs(
        config: ExpertsConfig, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields the cost of experts, and that of shared experts."""
        c = config
        yield experts_cost(
            experts=c.num_experts,
            chosen=c.experts_per_token,
            width=c.d_model,
            hidden=c.expert_width,
            gated=c.gated,
            layers=len(kinds),
        )
        if c.num_shared_experts:
            hidden = c.num_shared_experts * c.expert_width
            yield feed_forward_cost(c, hidden, len(kinds))
        if c.shared_expert_gate:
            gate = (Product(c.d_model, 1),)
            yield Cost(name="shared experts' gate", layers=len(kinds), products=gate)

    @staticmethod
    def choices(config: ExpertsConfig) -> list[str]:
        """Lists the kernels of experts, their exchange of tokens, and the reasons."""
        return explain(config.num_experts, config.experts_per_token)

    @staticmethod
    def tensor_parallel_dims(config: ExpertsConfig) -> tuple[str, ...]:
        """Names the widths inside feed-forward parts and experts."""
        return ("d_ff", "expert_d_ff") if config.expert_d_ff else ("d_ff",)

    @staticmethod
    def tiny(config: ExpertsConfig, sequence_length: int) -> dict[str, Any]:
        """Lists the sizes of at most eight experts.

        A token has one, two or all experts. Groups of experts are kept.
        """
        c = config
        values = FeedForward.tiny(c, sequence_length)
        E = min(c.num_experts, 8)
        k = min(c.experts_per_token, 2, E)
        if c.experts_per_token == c.num_experts:
            k = E
        values["num_experts"] = E
        values["experts_per_token"] = k
        values["first_dense_layers"] = min(c.first_dense_layers, 1)
        values["feed_forward_pattern"] = tuple(dict.fromkeys(c.feed_forward_pattern))
        if c.expert_d_ff:
            values["expert_d_ff"] = 48
        if c.num_shared_experts:
            values["num_shared_experts"] = min(c.num_shared_experts, 2)
        if c.expert_groups:
            values["num_experts"] = 8 if k < E else E
            values |= _tiny_groups(c, k)
        return values

    @staticmethod
    def faults(config: ExpertsConfig) -> Iterator[str]:
        """Yields a message for each conflict of expert options."""
        c = config
        E = c.num_experts
        k = c.experts_per_token
        if not E:
            yield from _faults_without_experts(c)
            return
        yield from _balance_faults(c)
        if k > E:
            yield (
                f"model.experts_per_token={k} of model.num_experts={E}; set it to at "
                f"most {E}"
            )
        if c.bias == "all":
            yield (
                "model.bias=all: experts have no biases; set model.bias to none, qkv "
                "or attention"
            )
        if c.shared_expert_gate and not c.num_shared_experts:
            yield (
                "model.shared_expert_gate=true: the model has no shared experts; set "
                "model.num_shared_experts, or model.shared_expert_gate=false"
            )
        yield from _layer_faults(c)
        if c.expert_groups or c.expert_top_groups:
            yield from _choice_faults(c)


def _tiny_groups(c: ExpertsConfig, per_token: int) -> dict[str, Any]:
    groups = 1
    if c.expert_groups > 1:
        groups = 4 if c.expert_groups >= 4 and per_token <= 2 else 2
    top = groups
    if c.expert_top_groups != c.expert_groups:
        top = min(c.expert_top_groups, groups - 1)
    return {"expert_groups": groups, "expert_top_groups": top}


def _first_changed(c: ExpertsConfig, names: tuple[str, ...]) -> str:
    """Finds the first of these options that is not at its default; "" for none."""
    for name in names:
        if getattr(c, name) != getattr(type(c), name):
            return name
    return ""


def _faults_without_experts(c: ExpertsConfig) -> Iterator[str]:
    name = _first_changed(c, EXPERT_FIELDS)
    if name:
        yield (
            f"model.{name}={getattr(c, name)} needs experts, and model.num_experts=0 "
            f"is a dense model; set model.num_experts, or leave model.{name} as it is"
        )


def _balance_faults(c: ExpertsConfig) -> Iterator[str]:
    unused: tuple[str, ...] = ()
    if c.balance != "bias":
        unused += ("balance_rate",)
    if c.balance not in ("sequence", "batch"):
        unused += ("balance_weight",)
    name = _first_changed(c, unused)
    if name:
        yield (
            f"model.{name}={getattr(c, name)} has no effect with model.balance="
            f"{c.balance}; leave it as it is, or set model.balance"
        )


def _layer_faults(c: ExpertsConfig) -> Iterator[str]:
    L = c.num_layers
    first = c.first_dense_layers
    if first >= L:
        yield (
            f"model.first_dense_layers={first} of model.num_layers={L} leaves no layer "
            f"with experts; set it to at most {L - 1}, or model.num_experts=0"
        )
    elif "sparse" not in c.feed_forward_pattern:
        yield (
            f"model.feed_forward_pattern={','.join(c.feed_forward_pattern)} has no "
            f"layer with experts; add sparse to it, or set model.num_experts=0"
        )


def _choice_faults(c: ExpertsConfig) -> Iterator[str]:
    E = c.num_experts
    k = c.experts_per_token
    groups = c.expert_groups
    top = c.expert_top_groups
    if not groups or E % groups or E // groups < 2:
        yield (
            f"model.expert_groups={groups} for model.num_experts={E}: groups are "
            f"equal, of two experts or more; set a divisor of {E} up to {E // 2}, or "
            f"expert_groups and expert_top_groups to 0"
        )
    elif not 1 <= top <= groups or top * (E // groups) < k:
        yield (
            f"model.expert_top_groups={top}: {k} experts a token from groups of "
            f"{E // groups}; set it between {-(-k // (E // groups))} and "
            f"model.expert_groups={groups}"
        )


def _given_ids(info: BlockInfo) -> jax.Array | None:
    """Reads the experts [B, S, k] that the batch sets for this layer, if it does."""
    ids_BSLk = info.fields.get(GIVEN_IDS)
    if ids_BSLk is None:
        return None
    ids_BSk: jax.Array = jax.lax.dynamic_index_in_dim(
        ids_BSLk, info.layer, axis=2, keepdims=False
    )
    return ids_BSk


def sequence_balance(
    shares_BSE: jax.Array, ids_BSk: jax.Array, weights_BS: jax.Array
) -> jax.Array:
    """Sums the balance losses of all sequences (arXiv:2412.19437, 17-20).

    The loss of a sequence is the sum over experts of f P. f is the expert's share of
    the choices times E, and P its mean share of the scores. An even load gives 1. Means
    are weighted like the tokens, and so is the sum over sequences.

    Args:
      shares_BSE: each expert's share of a token's scores.
      ids_BSk: experts of each token.
      weights_BS: weights of the tokens in the loss.
    """
    k = ids_BSk.shape[-1]
    E = shares_BSE.shape[-1]
    chosen = (ids_BSk[..., None] == jnp.arange(E).reshape(1, 1, 1, E)).any(-2)
    weights = weights_BS.astype(jnp.float32)[..., None]
    choices = (chosen * weights).sum(1)
    scores = (shares_BSE * weights).sum(1)
    total = weights.sum((1, 2))
    return E / k * ((choices * scores).sum(-1) / jnp.maximum(total, 1e-20)).sum()


def metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Computes metrics of a step's load from the stats of experts.

    Args:
      stats: of a step. Those of experts have a row for each layer with experts (load
        [L, E]), or for each such layer of a group ([groups, layers, E]).

    Returns:
      Stats of other parts as they are, and these metrics. For each layer with experts:
      `load_max_over_mean`; `load_entropy`, 1 if the load is even; `dead_experts`, the
      number that no token chose; `dropped`, a share of the choices; and
      `exchange_rounds`, 1 if the load is even. `expert_load` [L, E] counts the choices
      of each expert; rows of dense layers are 0. `fullest_layer` is the layer of the
      expert with the largest share.
    """
    if LOAD not in stats:
        return dict(stats)
    E = stats[LOAD].shape[-1]
    load = stats[LOAD].reshape(-1, E)
    drops = stats[DROPS].reshape(-1)
    rounds = stats[ROUNDS].reshape(-1)
    exchanges = stats[EXCHANGES].reshape(-1)
    total = jnp.maximum(load.sum(-1), 1)
    shares = load / total[:, None]
    entropy = -(shares * jnp.log(jnp.maximum(shares, 1e-20))).sum(-1)
    max_over_mean = shares.max(-1) * E
    load_of_all_layers = load
    fullest_layer = jnp.argmax(max_over_mean)
    if LAYER in stats:
        numbers = jnp.argmax(stats[LAYER].reshape(len(load), -1), -1)
        num_layers = stats[LAYER].shape[-1]
        load_of_all_layers = jnp.zeros((num_layers, E)).at[numbers].set(load)
        fullest_layer = numbers[fullest_layer]
    replaced = (LOAD, DROPS, ROUNDS, EXCHANGES, LAYER)
    others = {name: x for name, x in stats.items() if name not in replaced}
    return others | {
        LOAD_METRIC: load_of_all_layers,
        "load_max_over_mean": max_over_mean,
        "load_entropy": entropy / math.log(max(E, 2)),
        "fullest_layer": fullest_layer,
        "dead_experts": (load == 0).sum(-1),
        "dropped": drops / total,
        "exchange_rounds": rounds / jnp.maximum(exchanges, 1),
    }
