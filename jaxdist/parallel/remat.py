"""Rematerialisation policies: the residuals of blocks that are saved or recomputed.

A policy is a name:

- `none` saves all residuals of autodiff.
- `full` saves only the input of a block.
- `dots` saves the outputs of matmuls with parameters, and of attention (never its
  scores).
- `save:NAME,NAME` saves the input of a block and activations with these names, which
  `checkpoint_name` gives.
- `offload:NAME,NAME` moves these activations to the host's memory and back.
- `save:NAME+offload:NAME` does both.
- `fit` stands for one of the others; commands choose it (`planner.fit_remat`).

All but `none` keep the order of experts' rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import ConfigError, suggest
from jaxdist.config.annotations import NonNegativeInt, PositiveInt, Searched
from jaxdist.protocols.model import Recompute

# A policy of `jax.checkpoint`: called with a primitive, decides about its outputs.
Predicate = Callable[..., Any]

INPUT = "block_input"  # always kept; a policy with this name says where
# output and logsumexp, which the backward pass of attention reads
RESIDUALS = "attention_residuals"
PROJECTED = "attention_projection"
BLOCK_OUTPUT = "mlp_out"
# outputs of the experts' first kernels
EXPERT_PRODUCTS = "expert_products"
# order of a device's rows, and their experts. It is always kept: rows are sorted only
# once, and a router's near-tie cannot change when it is recomputed.
EXPERT_ORDER = "expert_order"
FP8_PRODUCTS = "fp8_products"  # outputs of 8-bit matmuls, after their scales
# activations that sequence parallelism splits over tensor
RESIDUAL_STREAM = (INPUT, PROJECTED, BLOCK_OUTPUT)
FIT = "fit"
NOT_RESOLVED = (
    "remat.policy=fit: the commands `jaxdist train` and `jaxdist plan --fix` resolve it for the devices "
    "here; elsewhere give the policy that they print"
)
# Names of activations in the models of this package, for `save:` and `offload:`.
NAMES = (
    INPUT,
    "query_down",
    "latent",
    "query",
    "key",
    "value",
    RESIDUALS,
    "attention_out",
    PROJECTED,
    "mlp_gate",
    "mlp_up",
    BLOCK_OUTPUT,
)


@dataclass(frozen=True)
class RematConfig:
    """Options of rematerialisation: the values that blocks keep for backward passes."""

    # fit | none | full | dots | save:NAME,NAME | offload:NAME,NAME | save:..+offload:..
    policy: Annotated[str, Searched()] = "dots"
    # number of final layers that use `policy`; earlier ones keep only their input;
    # 0 = all
    layers: Annotated[NonNegativeInt, Searched()] = 0
    # layers that are recomputed together; only the input of the first one is kept
    every: Annotated[PositiveInt, Searched()] = 1
    # devices and layout that policy=fit was resolved for; `train` writes it
    fitted: str = ""

    def __str__(self) -> str:
        text = self.policy
        if self.layers:
            text += f" in the last {self.layers} layers"
        if self.every > 1:
            text += f" in groups of {self.every} layers"
        return text

    @property
    def others(self) -> str:
        """The policy of the layers before the last `layers`, which keep only inputs.

        If `policy` offloads inputs, so do these layers.
        """
        if INPUT in named_in(self.policy)["offload"]:
            return f"offload:{INPUT}"
        return "full"

    def faults(self) -> list[str]:
        """Lists the faults of the values."""
        if self.policy == FIT:
            return [NOT_RESOLVED]
        faults = policy_faults(self.policy, "remat.policy", ("none", "full", "dots"))
        if self.layers and self.every > 1:
            faults.append(
                f"remat.layers={self.layers} and remat.every={self.every}: groups are of layers of one "
                f"policy; set remat.layers=0 or remat.every=1"
            )
        return faults

    def stack_faults(self, layers: int, where: str, group: int = 1) -> Iterator[str]:
        """Yields a message if `every` does not divide a stack of layers.

        Args:
          layers: number of layers in the stack.
          where: name of the stack, for the message.
          group: number of layers that repeat as one block.
        """
        divides = layers % self.every == 0 and self.every % group == 0
        if self.every == 1 or divides:
            return
        legal = [1]
        legal += [n for n in range(2, layers + 1) if layers % n == 0 and n % group == 0]
        rule = f"must divide the {layers} layers of {where}"
        if group > 1:
            rule += f" and hold whole groups of the {group} that repeat"
        yield (
            f"remat.every={self.every}: {rule}; set it to one of "
            f"{', '.join(map(str, legal))}"
        )


def policy_faults(policy: str, path: str, plain: Sequence[str]) -> list[str]:
    """Lists the faults of a policy.

    Args:
      policy: the value of a config key.
      path: the key.
      plain: policies that are allowed there besides save: and offload:.
    """
    if policy in plain:
        return []
    kinds = [part.partition(":")[0] for part in policy.split("+")]
    if kinds not in (["save"], ["offload"], ["save", "offload"]):
        return [
            f"{path}={policy!r}: must be {', '.join(plain)}, save:NAME,NAME, offload:NAME,NAME "
            f"or save:NAME+offload:NAME"
        ]
    names = [name for part in named_in(policy).values() for name in part]
    unknown = [
        f"{path}: no activation is named {name!r}.{suggest(name, NAMES)} Names: {', '.join(NAMES)}"
        for name in names
        if name not in NAMES
    ]
    repeated = sorted({name for name in names if names.count(name) > 1})
    return unknown + [
        f"{path}: {name} is named twice; name it once" for name in repeated
    ]


def named_in(policy: str) -> dict[str, list[str]]:
    """Parses the names in a policy.

    Returns:
      The names under "save" and under "offload"; empty lists for a policy without
      names.
    """
    named: dict[str, list[str]] = {"save": [], "offload": []}
    for part in policy.split("+"):
        kind, colon, names = part.partition(":")
        if colon:
            named[kind] = names.split(",")
    return named


def recompute(config: RematConfig | str) -> Recompute:
    """Creates the transforms of a stack's layers from a config or a policy.

    Raises:
      ConfigError: the policy or the name of an activation is unknown.
    """
    if isinstance(config, str):
        config = RematConfig(config)
    return Recompute(
        layer=partial(rematerialised, policy=config.policy),
        group=partial(rematerialised, policy="full"),
        every=config.every,
        last=config.layers,
        others=partial(rematerialised, policy=config.others),
    )


def rematerialised(block: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Applies a policy to a block (`jax.checkpoint`).

    Args:
      block: called as `block(parameters, x, *more)`. x is its input in the sense of the
        policies.
      policy: any but `fit`.

    Raises:
      ConfigError: the policy or the name of an activation is unknown.
    """
    faults = RematConfig(policy).faults()
    if faults:
        raise ConfigError(faults)
    if policy == "none":
        return block

    named = named_in(policy)
    if INPUT in named["offload"] + named["save"]:
        block = _with_named_input(block)
    # Blocks run inside a scan, whose loop already keeps XLA from merging the two
    # computations.
    return jax.checkpoint(block, policy=_saveable(policy), prevent_cse=False)


def _with_named_input(block: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a block so that policies can refer to its input by name."""

    def name(leaf: jax.Array) -> jax.Array:
        named: jax.Array = checkpoint_name(leaf, INPUT)
        return named

    def named_block(parameters: Any, x: Any, *more: Any) -> Any:
        return block(parameters, jax.tree.map(name, x), *more)

    return named_block


def _saveable(policy: str) -> Predicate:
    """Creates the predicate of `jax.checkpoint` for a policy."""
    policies: Any = jax.checkpoint_policies
    saveable: Predicate
    if policy == "full":
        saveable = policies.save_only_these_names(EXPERT_ORDER)
        return saveable
    if policy == "dots":
        # With attention's residuals its forward pass runs once. This is faster (0.93 x
        # the time on CPU) and takes less memory than to recompute the input of the
        # output projection.
        names = policies.save_only_these_names(
            RESIDUALS, EXPERT_ORDER, EXPERT_PRODUCTS, FP8_PRODUCTS
        )
        saveable = policies.save_from_both_policies(_is_wide_matmul, names)
        return _or_fused_attention(saveable)
    named = named_in(policy)
    saved = [*named["save"], EXPERT_ORDER]
    if named["offload"]:
        saveable = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=named["offload"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = policies.save_only_these_names(*saved)
    if RESIDUALS in named["save"]:
        saveable = _or_fused_attention(saveable)
    return saveable


def _is_wide_matmul(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """Checks whether a primitive is a matmul without batch dims.

    8-bit matmuls do not count: their outputs are saved by name, after their scales.
    """
    is_matmul = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *arguments, **parameters
    )
    return bool(is_matmul and arguments[0].dtype.itemsize > 1)


def _or_fused_attention(saveable: Predicate) -> Predicate:
    """Extends a predicate so that output and statistics of cuDNN's attention are kept.

    jax computes them without a name, so the name of their primitive identifies them.
    """

    def predicate(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if "dot_product_attention_fwd" in primitive.name:
            return True
        return saveable(primitive, *arguments, **parameters)

    return predicate
