"""Rematerialisation of blocks: which residuals are saved, and which are computed again.

A policy is a name: `none` saves all that autodiff wants, `full` only a block's input,
`dots` the outputs of matrix products with parameters and of attention (never its
scores). `save:NAME,NAME` saves a block's input and the activations so named with
`checkpoint_name`; `offload:NAME,NAME` moves them to the host's memory and back instead;
`save:NAME+offload:NAME` does both. All keep the order of experts' rows. The policy
`fit` is no policy yet: commands resolve it into one (`planner.fit_remat`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import ConfigError, suggest
from jaxdist.config.annotations import NonNegativeInt, PositiveInt, Searched
from jaxdist.protocols.model import Recompute

INPUT = "block_input"  # what is always kept; naming it says where
# what attention's backward pass reads: output and logsumexp
RESIDUALS = "attention_residuals"
PROJECTED = "attention_projection"
BLOCK_OUTPUT = "mlp_out"
# of rows with the experts' first kernels, where they are kept
EXPERT_PRODUCTS = "expert_products"
# of a device's rows, and their experts; always kept: sorting is done once,
EXPERT_ORDER = "expert_order"
# and a near-tie that is computed again cannot fall the other way
FP8_PRODUCTS = "fp8_products"  # of 8-bit floats, with their scales
# those that sequence parallelism splits over tensor
RESIDUAL_STREAM = (INPUT, PROJECTED, BLOCK_OUTPUT)
FIT = "fit"
NOT_RESOLVED = (
    "remat.policy=fit: the commands `jaxdist train` and `jaxdist plan --fix` resolve it for the devices at "
    "hand; elsewhere give the policy that they print"
)
# Names that our models give to activations, for `save:` and `offload:` policies.
NAMES = (
    INPUT,
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
    """What a block keeps for its backward pass."""

    # fit | none | full | dots | save:NAME,NAME | offload:NAME,NAME | save:..+offload:..
    policy: Annotated[str, Searched()] = "dots"
    # so many at the end follow the policy, others keep their input; 0 = all
    layers: Annotated[NonNegativeInt, Searched()] = 0
    # layers computed again together: of them the first one's input alone is kept
    every: Annotated[PositiveInt, Searched()] = 1
    # devices and layout that policy=fit was resolved for; `train` writes it
    fitted: str = ""

    def __str__(self) -> str:
        end = f" in the last {self.layers} layers" if self.layers else ""
        return (
            self.policy
            + end
            + (f" in groups of {self.every} layers" if self.every > 1 else "")
        )

    @property
    def others(self) -> str:
        """The policy of the layers before the last `layers`: their inputs lie where the
        others' do.
        """
        return (
            f"offload:{INPUT}" if INPUT in named_in(self.policy)["offload"] else "full"
        )

    def faults(self) -> list[str]:
        """Lists what is wrong with the values."""
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
        """Yields why `every` does not cut up the layers that lie somewhere, where
        `group` of them repeat.
        """
        if self.every == 1 or not (layers % self.every or self.every % group):
            return
        legal = [
            n
            for n in range(1, layers + 1)
            if layers % n == 0 and (n % group == 0 or n == 1)
        ]
        whole = (
            f" and hold whole groups of the {group} that repeat" if group > 1 else ""
        )
        yield (
            f"remat.every={self.every}: must divide the {layers} layers of {where}{whole}; set it to one of "
            f"{', '.join(map(str, legal))}"
        )


def policy_faults(policy: str, path: str, plain: Sequence[str]) -> list[str]:
    """Lists what is wrong with a policy, the value of the field `path`, which may be
    a `plain` name.
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
    twice = sorted({name for name in names if names.count(name) > 1})
    return unknown + [f"{path}: {name} is named twice; name it once" for name in twice]


def named_in(policy: str) -> dict[str, list[str]]:
    """Returns the names that a policy saves and offloads; none for a policy without
    names.
    """
    parts = [part.partition(":") for part in policy.split("+")]
    return {"save": [], "offload": []} | {
        kind: names.split(",") for kind, colon, names in parts if colon
    }


def recompute(config: RematConfig | str) -> Recompute:
    """Reads from a policy how a stack's layers are computed again.

    Raises:
      ConfigError: unknown policy or activation name.
    """
    config = RematConfig(config) if isinstance(config, str) else config
    own, full, others = (
        partial(rematerialised, policy=policy)
        for policy in (config.policy, "full", config.others)
    )
    return Recompute(own, full, config.every, config.layers, others)


def rematerialised(block: Callable, policy: str) -> Callable:
    """Returns the block under the named policy (`jax.checkpoint`).

    Args:
      block: called as `block(parameters, x, *more)`; x is its input in the sense of the
        policies.

    Raises:
      ConfigError: unknown policy or activation name.
    """
    faults = RematConfig(policy).faults()
    if faults:
        raise ConfigError(faults)
    if policy == "none":
        return block

    def named_block(parameters, x, *more):
        return block(
            parameters,
            jax.tree.map(lambda leaf: checkpoint_name(leaf, INPUT), x),
            *more,
        )

    # Blocks run inside a scan, whose loop already keeps XLA from merging the two
    # computations.
    named = named_in(policy)["offload"] + named_in(policy)["save"]
    return jax.checkpoint(
        named_block if INPUT in named else block,
        policy=_saveable(policy),
        prevent_cse=False,
    )


def _saveable(policy: str) -> Callable | None:
    """Returns the predicate that jax wants: which values are kept, and where."""
    policies = jax.checkpoint_policies
    if policy == "full":
        return policies.save_only_these_names(EXPERT_ORDER)
    if policy == "dots":
        # With attention's own residuals its forward pass runs once: faster, and smaller
        # than without, where the output projection's input is computed again (0.93 x
        # the time on CPU).
        names = policies.save_only_these_names(
            RESIDUALS, EXPERT_ORDER, EXPERT_PRODUCTS, FP8_PRODUCTS
        )
        return _keeps_fused_attention(
            policies.save_from_both_policies(_is_wide_product, names)
        )
    named = named_in(policy)
    saved = [*named["save"], EXPERT_ORDER]
    saveable = policies.save_only_these_names(*saved)
    if named["offload"]:
        saveable = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=named["offload"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return _keeps_fused_attention(saveable) if RESIDUALS in named["save"] else saveable


def _is_wide_product(primitive, *arguments, **parameters) -> bool:
    """Checks whether this is a product without a batch; those of 8-bit floats are kept
    with their scales.
    """
    keeps = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *arguments, **parameters
    )
    return keeps and arguments[0].dtype.itemsize > 1


def _keeps_fused_attention(saveable: Callable) -> Callable:
    """Returns the predicate that also keeps what cuDNN's attention gives: its output
    and statistics.

    They are made inside jax, which gives them no name, so they are known by their
    primitive's.
    """

    def kept(primitive, *arguments, **parameters):
        return "dot_product_attention_fwd" in primitive.name or saveable(
            primitive, *arguments, **parameters
        )

    return kept
