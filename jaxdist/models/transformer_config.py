"""Options of the transformer, and the checks of their values.

The options of mixers and channels are defined next to these parts, see `parts`. This
file has the options of the whole model: embedding, head, and the kind of each layer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Len

from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Resume,
    TrainingOnly,
)
from jaxdist.models.channels import CHANNELS, ChannelKind
from jaxdist.models.experts import ExpertsConfig
from jaxdist.models.latent_attention import LatentConfig
from jaxdist.models.mixers import MIXERS, MixerKind
from jaxdist.models.multi_token import MultiTokenConfig, block_config
from jaxdist.models.parts import Part
from jaxdist.ops.costs import Cost, Product, model_flops
from jaxdist.ops.cross_entropy import cross_entropy_cost
from jaxdist.telemetry.flops import Convention

_SMALL_CHUNK = 256  # tokens of the loss: smaller chunks make its matmuls slow


def all_parts() -> list[type[Part]]:
    """Lists the classes of all mixers and channels, each once."""
    return list(dict.fromkeys([*MIXERS.values(), *CHANNELS.values()]))


@dataclass(frozen=True)
class TransformerConfig(ExpertsConfig, LatentConfig):
    """Sizes and variants of the transformer; the defaults are Llama's."""

    vocab_size: PositiveInt = 256  # tokens
    # kinds of mixers, repeated over the depth, e.g. local,global (Gemma 2)
    layer_pattern: Annotated[tuple[MixerKind, ...], Len(1)] = ("global",)
    # kinds of channels, repeated over the layers after the first dense ones, e.g.
    # dense,sparse (Qwen's decoder_sparse_step 2)
    feed_forward_pattern: Annotated[tuple[ChannelKind, ...], Len(1)] = ("sparse",)
    # factor of the embeddings, rounded to their dtype (Gemma: sqrt d_model)
    embedding_scale: PositiveFloat = 1.0
    tie_embeddings: bool = False  # the head is the embedding table
    # output of the model: language = scores of the next token; score = one number for
    # each token, without a head of the vocabulary (objective.name=reward)
    head: Literal["language", "score"] = "language"
    # weight of log(Z)^2, e.g. 1e-4
    z_loss: Annotated[NonNegativeFloat, TrainingOnly()] = 0.0
    logit_softcap: NonNegativeFloat = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    # tokens per device scored at once; 0 = all
    loss_chunk: Annotated[NonNegativeInt, TrainingOnly(), Resume("harmless")] = 1024
    # modules that predict further tokens, as a training aid
    multi_token: MultiTokenConfig = MultiTokenConfig()

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens in a sequence; None means no limit."""
        return self.max_positions if self.positions == "learned" else None

    # --- which layer is of which kind ---

    def mixer_kind(self, layer: int) -> str:
        """Looks up the kind of a layer's mixer."""
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def channel_kind(self, layer: int) -> str:
        """Looks up the kind of a layer's channel; without experts it is dense."""
        number = layer - self.first_dense_layers
        if number < 0 or not self.num_experts:
            return "dense"
        return self.feed_forward_pattern[number % len(self.feed_forward_pattern)]

    @property
    def parts(self) -> list[type[Part]]:
        """The classes of this model's mixers and channels, each once."""
        used: set[type[Part]] = {MIXERS[kind] for kind in self.layer_pattern}
        for layer in range(self.num_layers):
            used.add(CHANNELS[self.channel_kind(layer)])
        return [part for part in all_parts() if part in used]

    @property
    def group_layers(self) -> int:
        """The number of layers in a repeated block; 1 unless their parts differ."""
        # unknown kinds are reported elsewhere
        unequal_mixers = len({MIXERS.get(kind) for kind in self.layer_pattern}) > 1
        if not unequal_mixers and not self._has_unequal_channels:
            return 1
        return math.lcm(len(self.feed_forward_pattern), len(self.layer_pattern))

    @property
    def _has_unequal_channels(self) -> bool:
        return self.num_experts > 0 and len(set(self.feed_forward_pattern)) > 1

    def layers_on(self, places: int) -> int:
        """Computes the smallest depth that gives each place of a pipeline all kinds.

        Args:
          places: stages times chunks of the pipeline.
        """
        period = math.lcm(self.group_layers, len(self.layer_pattern))
        return self.first_dense_layers + places * period

    # --- what follows from the options ---

    @property
    def tensor_parallel_dims(self) -> tuple[str, ...]:
        """The names of the sizes that the mesh axis `tensor` must divide."""
        names = [
            name for part in self.parts for name in part.tensor_parallel_dims(self)
        ]
        if self.multi_token.depth:
            names.append("d_model")
        return tuple(dict.fromkeys([*names, "vocab_size"]))

    def costs(self, sequence_length: int) -> list[Cost]:
        """Lists the costs of the model's parts, for sequences of this many tokens."""
        first = range(self.first_dense_layers)
        others = range(self.first_dense_layers, self.num_layers)
        costs = []
        for part in self.parts:
            for layers, in_blocks in ((first, False), (others, True)):
                kinds = [kind for layer in layers for kind in self._kinds(layer, part)]
                if not kinds:
                    continue
                for cost in part.costs(self, kinds, sequence_length):
                    costs.append(replace(cost, in_blocks=in_blocks))
        return [*costs, self._head_cost(), *self._multi_token_costs(sequence_length)]

    def _multi_token_costs(self, sequence_length: int) -> list[Cost]:
        """Lists the costs of multi-token prediction, whose blocks run with the head."""
        depth = self.multi_token.depth
        if not depth:
            return []
        products = (Product(2 * self.d_model, self.d_model),)
        costs = [Cost(name="multi-token projection", layers=depth, products=products)]
        block: TransformerConfig = block_config(self)
        for part in block.parts:
            kinds = block._kinds(0, part) * depth
            costs += part.costs(block, kinds, sequence_length)
        costs.append(replace(self._head_cost(), layers=depth))
        return [replace(cost, in_blocks=False) for cost in costs]

    def _kinds(self, layer: int, part: type[Part]) -> list[str]:
        """Lists the kind of the layer that stands for this part; [] if it lacks it."""
        mixer = self.mixer_kind(layer)
        channel = self.channel_kind(layer)
        parts = [(mixer, MIXERS[mixer]), (channel, CHANNELS[channel])]
        return [kind for kind, candidate in parts if candidate is part]

    def _head_cost(self) -> Cost:
        if self.head == "score":
            products = (Product(self.d_model, 1),)
            return Cost(name="score", products=products, in_blocks=False)
        edits: tuple[tuple[str, str], ...] = ()
        if self.loss_chunk == 0 or self.loss_chunk > _SMALL_CHUNK:
            override = f"model.loss_chunk={_SMALL_CHUNK}"
            edits = ((override, "same losses; smaller matmuls in the loss"),)
        return cross_entropy_cost(self.d_model, self.vocab_size, self.loss_chunk, edits)

    def flops_per_token(self, sequence_length: int, convention: Convention) -> float:
        """Computes model FLOPs per token, forward and backward.

        Only the experts that a token is routed to count.

        Args:
          sequence_length: in tokens.
          convention: "causal" or "full" attention.
        """
        return model_flops(self.costs(sequence_length), convention)

    def choices(self) -> list[str]:
        """Lists the choices that parts make on the active mesh, with reasons."""
        return [line for part in self.parts for line in part.choices(self)]

    def tiny(self, sequence_length: int) -> dict[str, Any]:
        """Lists the options that differ in a tiny variant, which keeps every choice."""
        values: dict[str, Any] = {"d_model": 64, "vocab_size": 128}
        if self.max_positions:
            values["max_positions"] = sequence_length
        if self.loss_chunk:
            values["loss_chunk"] = 64  # several chunks on any layout
        for part in self.parts:
            values |= part.tiny(self, sequence_length)
        depth = min(self.multi_token.depth, 2)  # the second reads the first
        values["multi_token"] = replace(self.multi_token, depth=depth)
        # each kind of layer once
        values["layer_pattern"] = tuple(dict.fromkeys(self.layer_pattern))
        # whole patterns on two stages
        values["num_layers"] = replace(self, **values).layers_on(2)
        return values

    def faults(self) -> Iterator[str]:
        """Yields a message for each conflict of options, with its fix."""
        if self.positions == "learned" and self.max_positions < 1:
            yield "model.max_positions: learned positions need the longest sequence, >= 1"
        for part in all_parts():
            yield from part.faults(self)
        yield from self._group_faults()
        yield from self._multi_token_faults()

    def _multi_token_faults(self) -> Iterator[str]:
        depth = self.multi_token.depth
        default = MultiTokenConfig()
        if not depth and self.multi_token.weight != default.weight:
            yield (
                f"model.multi_token.weight={self.multi_token.weight} has no effect: "
                f"model.multi_token.depth=0 predicts no further tokens; set "
                f"model.multi_token.depth=1, or leave the weight out"
            )
        if depth and self.head == "score":
            yield (
                f"model.multi_token.depth={depth} predicts tokens, and model.head=score "
                f"does not; set model.multi_token.depth=0, or model.head=language"
            )

    def _group_faults(self) -> Iterator[str]:
        first = self.first_dense_layers
        in_groups = self.num_layers - first
        group = self.group_layers
        remainder = in_groups % group
        if in_groups < 1 or not remainder:
            return
        names = []
        if self._has_unequal_channels:
            names.append(f"feed_forward_pattern={','.join(self.feed_forward_pattern)}")
            if group > len(self.feed_forward_pattern):
                names.append("layer_pattern")
        else:
            names.append(f"layer_pattern={','.join(self.layer_pattern)}")
        pattern = " with ".join(f"model.{name}" for name in names)
        which = f"{in_groups} layers"
        if first:
            which += f" after model.first_dense_layers={first}"
        yield (
            f"{pattern} repeats every {group} layers, which do not divide the {which}; "
            f"set model.num_layers={self.num_layers - remainder + group}"
        )
