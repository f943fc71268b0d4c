"""Multi-token prediction: modules that predict the tokens after the next one.

The module of depth k (DeepSeek-V3, arXiv:2412.19437, section 2.2) computes at place i

    h_k[i] = block([norm(embedding(t[i + k])), norm(h_(k-1)[i])] @ projection),

where h_0 is the output of the last block. It predicts token t[i + k + 1] by the head of
the model, which all modules share, as they share the embedding. The loss is a further
term of the objective. Decoding ignores the modules.

Letters: see `layers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.annotations import NonNegativeInt, PositiveFloat, TrainingOnly
from jaxdist.models import layers
from jaxdist.models.block import Block
from jaxdist.models.channels import CHANNELS
from jaxdist.models.mixers import MIXERS
from jaxdist.ops.matmul import project
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import (
    Batch,
    BlockInfo,
    BlockOutput,
    Loss,
    Recompute,
    Transform,
    apply_layer,
)
from jaxdist.protocols.objective import COUNT_PER_AUX

# Name of the loss among aux terms, times its weight, and among metrics.
LOSS = "mtp_loss"
# Attribute of the model that has the modules.
ATTRIBUTE = "multi_token"
# Beginning of the names of aux terms and stats of the modules' blocks.
PREFIX = "mtp_"


@dataclass(frozen=True)
class MultiTokenConfig:
    """Options of multi-token prediction."""

    # modules, each of which predicts one further token; 0 = none; DeepSeek-V3: 1
    depth: Annotated[NonNegativeInt, TrainingOnly()] = 0
    # factor of the modules' mean loss in the objective; DeepSeek-V3: 0.3, then 0.1
    weight: Annotated[PositiveFloat, TrainingOnly()] = 0.3


def belongs_to_modules(path: str) -> bool:
    """Checks whether a parameter or state, "multi_token/depth_1/...", is a module's.

    The model decodes without them. So weights without them fit the model, and an export
    leaves them out.
    """
    return path.startswith(f"{ATTRIBUTE}/")


def block_config(config: Any) -> Any:
    """Makes the config of a model that has only layers of the last layer's kind.

    Args:
      config: a `TransformerConfig`, and so is the result.
    """
    last = config.num_layers - 1
    return replace(
        config,
        first_dense_layers=0,
        layer_pattern=(config.mixer_kind(last),),
        feed_forward_pattern=(config.channel_kind(last),),
    )


class TokenModule(nnx.Module):
    """The module of one depth: norms of its two inputs, a projection, and a block.

    Args:
      config: options of the model.
      rngs: random streams for the parameters.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        c = block_config(config)
        mixer = MIXERS[c.layer_pattern[0]]
        channel = CHANNELS[c.feed_forward_pattern[0]]
        self.embedding_norm = layers.Norm(c.d_model, kind=c.norm, eps=c.norm_eps)
        self.hidden_norm = layers.Norm(c.d_model, kind=c.norm, eps=c.norm_eps)
        # The rows of the embedding come first, as in published folders (`eh_proj`). The
        # mesh axis `tensor` splits the rows.
        self.projection = layers.normal(
            rngs, (2 * c.d_model, c.d_model), c.init_std, ("d_ff", "d_model")
        )
        self.block = Block(c, mixer, channel, rngs, layer_pattern=c.layer_pattern)
        self.final_norm = layers.Norm(c.d_model, kind=c.norm, eps=c.norm_eps)

    def __call__(
        self,
        x_BSD: jax.Array,
        embedded_BSD: jax.Array,
        info: BlockInfo,
        transform: Transform | Recompute,
    ) -> BlockOutput:
        """Computes the input [B, S, D] of the next module, aux terms and stats.

        Args:
          x_BSD: output of the module before, or of the model's last block.
          embedded_BSD: embeddings of the tokens ahead.
          info: values that the block reads.
          transform: wraps the block's function, for rematerialisation.
        """
        inputs = [self.embedding_norm(embedded_BSD), self.hidden_norm(x_BSD)]
        joined = shard(jnp.concatenate(inputs, -1), "batch", "sequence", "d_ff")
        (projected,) = project(joined, self.projection)
        return apply_layer(self.block, layers.residual(projected), info, transform)


class MultiToken(nnx.Module):
    """The modules of all depths, the attributes `depth_1`, `depth_2`, ...

    Args:
      config: options of the model.
      rngs: random streams for the parameters.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        self.weight = config.multi_token.weight
        self.first_layer = config.num_layers
        for depth in range(1, config.multi_token.depth + 1):
            setattr(self, f"depth_{depth}", TokenModule(config, rngs))
        self.count = config.multi_token.depth

    @property
    def modules(self) -> list[TokenModule]:
        """The modules in order."""
        return [getattr(self, f"depth_{n}") for n in range(1, self.count + 1)]

    def terms(
        self,
        x_BSD: jax.Array,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute,
        *,
        embed: Callable[[Batch], jax.Array],
        fields_of: Callable[[Batch], dict[str, jax.Array]],
        sum_loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> Loss:
        """Computes the modules' part of the objective.

        Args:
          x_BSD: output of the model's last block.
          batch: fields by name. Its field `count_per_aux/mtp_loss` makes the term a
            mean over the modules' own targets.
          key: random key of the step; None: the modules are deterministic.
          transform: wraps the functions of blocks, for rematerialisation.
          embed: embeds the tokens of a batch.
          fields_of: computes `BlockInfo.fields` for a batch.
          sum_loss: (hidden states, targets, weights) -> weighted sum of the losses.

        Returns:
          A loss whose sum and count are 0, with aux terms, stats and a metric.
        """
        ratio = batch.get(COUNT_PER_AUX + LOSS)
        total = jnp.float32(0)
        aux: dict[str, jax.Array] = {}
        stats: dict[str, list[jax.Array]] = {}
        for depth, module in enumerate(self.modules, 1):
            ahead = batch_ahead(batch, depth)
            info = BlockInfo(
                key,
                jnp.int32(self.first_layer + depth - 1),
                fields_of({**batch, "weights": ahead["weights"]}),
                module.block.layer_pattern[0],
            )
            output = module(x_BSD, embed(ahead), info, transform)
            x_BSD = output.x
            weights = ahead["weights"]
            if ratio is not None:
                weights = weights * ratio[:, None]
            total = total + sum_loss(
                shard(module.final_norm(x_BSD), "batch", "sequence", None),
                ahead["targets"],
                weights,
            )
            for name, term in output.aux.items():
                aux[PREFIX + name] = aux.get(PREFIX + name, 0) + term
            for name, value in output.stats.items():
                stats.setdefault(PREFIX + name, []).append(value)
        return Loss(
            sum=jnp.float32(0),
            count=jnp.float32(0),
            aux={LOSS: self.weight * total, **aux},
            stats={name: jnp.stack(values) for name, values in stats.items()},
            metrics={LOSS: total},
        )

    def target_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the weights of the targets of all modules, as the divisor of `LOSS`."""
        weights = [
            batch_ahead(batch, depth)["weights"].sum()
            for depth in range(1, self.count + 1)
        ]
        return {LOSS: jnp.stack(weights).sum()}

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Updates the state of the blocks' parts from the stats of a step."""
        for index, module in enumerate(self.modules):
            for part in module.block.parts:
                values = {name: stats[PREFIX + name][index] for name in part.stat_names}
                if values:
                    part.update(values)


def batch_ahead(batch: Batch, depth: int) -> dict[str, jax.Array]:
    """Computes what a module reads at each place: the fields of the place `depth` ahead.

    The weight of a place is 0 if the place ahead is in another document, or after the
    end of the row. Otherwise all tokens up to the target are in the same document.

    Args:
      batch: fields [B, S]. Without `segment_ids` a row is one document.
      depth: number of places.

    Returns:
      The fields `tokens`, `targets`, `weights` and `positions`.
    """
    names = ("tokens", "targets", "weights", "positions")
    ahead = {name: _ahead(batch[name], depth) for name in names}
    segments = batch.get("segment_ids")
    if segments is not None:
        is_same = _ahead(segments, depth) == segments
        ahead["weights"] = jnp.where(is_same, ahead["weights"], 0)
    return ahead


def _ahead(x_BS: jax.Array, places: int) -> jax.Array:
    """Moves the values of each row to the front, and fills its end with zeros."""
    moved = jnp.pad(x_BS[:, places:], [(0, 0), (0, places)])
    return shard(moved, "batch", "sequence")


def split_stats(
    stats: Mapping[str, jax.Array],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits stats into those of the model's blocks, and those of the modules' blocks.

    The latter get the names that the parts of a block give them.
    """
    of_blocks = {name: x for name, x in stats.items() if not name.startswith(PREFIX)}
    of_modules = {
        name.removeprefix(PREFIX): x
        for name, x in stats.items()
        if name.startswith(PREFIX)
    }
    return of_blocks, of_modules
