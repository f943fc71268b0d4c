"""What a step of a run has to do, whatever its layout: products, kernels, parameters, as
the model's ops declare them (`ops.costs`).
"""

import math
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from jaxdist.ops.costs import Cost, Product, Share
from jaxdist.parallel import remat
from jaxdist.parallel.axes import STATE_AXES
from jaxdist.planner import memory
from jaxdist.planner.blocks import trace
from jaxdist.planner.targets import Target
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.param_names import has_experts
from jaxdist.trainer import compose, product_formats
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of, itemsize_of
from jaxdist.trainer.model_flops import model_flops, policy_flops


class Work:
    """The work of a run's step on a target's chips.

    Args:
      legal: the run in any layout, from whose optimizer state the bytes per parameter
        are taken.
    """

    def __init__(self, legal: Composition, target: Target) -> None:
        run = legal.config
        spec = legal.spec
        self.target = target
        self.peak = target.products_peak(run.precision.compute) or 1e12
        self.stored = jnp.dtype(run.precision.params).itemsize
        self.computed = itemsize_of(run)
        self.tokens = run.batch.global_size * compose.targets_per_sample(run)
        self.depth = max(spec.depth, 1)
        # Bytes of a parameter.
        state = memory.components(legal, target)
        shards = math.prod(legal.shape.sizes[axis] for axis in STATE_AXES)
        moments = state.get("optimizer state", 0) * shards
        self.moments = moments / spec.parameter_count
        # What flows from block to block, in bytes a token; 0 without blocks.
        block = trace(legal, run.remat.policy, target.platform)
        self.x = block.x / block.tokens
        self.in_experts = sum(
            x.size
            for x, names in spec.named_parameters().values()
            if has_experts(names)
        )
        self.dense = spec.parameter_count - self.in_experts
        self.in_modules = legal.spec.module_count
        self._sum_costs(legal)
        self._count_recipe(legal)

    def _sum_costs(self, legal: Composition) -> None:
        """Sums what the ops declare; of a model that declares nothing, its FLOPs."""
        flops = policy_flops(legal.config, legal.spec)["causal"]
        with_modules = model_flops(legal.config, legal.spec)["causal"]
        # FLOPs of frozen modules, all of them taken for products
        self.prepared = (with_modules - flops) * self.tokens
        self.costs = costs_of(legal.config) or _undeclared(legal.spec, flops)
        fused = [cost.fused_flops("causal") / 3 for cost in self.costs]
        # FLOPs of one forward pass of a step's fused kernels, and of those at the peak
        # that would take as long
        self.fused = math.fsum(fused) * self.tokens
        self.fused_at_peak = self.tokens * math.fsum(
            count / self.target.observed.attention_share(cost.fused_width)
            for count, cost in zip(fused, self.costs, strict=True)
        )
        self.products = flops * self.tokens - 3 * self.fused
        # by name of a result: parameters that make it, and its elements a token
        self.made = Counter[str]()
        self.sizes = Counter[str]()
        self.always_again = 0.0
        for cost in self.costs:
            if not cost.in_blocks:
                continue
            for product in cost.products:
                used = cost.layers * product.contracted * product.size
                self.made[product.makes] += used
                self.sizes[product.makes] += cost.layers * product.size
                self.always_again += used if product.always_again else 0
        self.in_blocks = max(self.made.total(), 1)
        # rows that are computed for nothing, hidden ones a second time
        self.spare = 0.0
        for cost in self.costs:
            again = sum(p.flops for p in cost.products if p.always_again)
            flops = cost.product_flops() + cost.layers * again
            self.spare += cost.spare_rows(self.target.platform) * flops * self.tokens

    def _count_recipe(self, legal: Composition) -> None:
        """Counts what matmuls of a recipe gather less, and take less time."""
        # Bytes of a parameter that are gathered, and the time of matmuls over that of
        # as many FLOPs in the compute dtype.
        self.gathered: float = self.computed
        self.paced = 1.0
        recipe = legal.config.precision.recipe
        coded = product_formats.parameters(legal.config, legal.spec)
        if recipe is None or not coded:
            return
        share = coded / legal.spec.parameter_count
        self.gathered -= (self.computed - recipe.gathered_bytes) * share
        peak = self.target.products_peak(recipe.peak)
        if peak is not None:
            saved = 1 - self.peak / (recipe.units.reached * peak)
            in_recipe = 2 * recipe.matmuls * coded * self.tokens
            self.paced -= saved * in_recipe / self.products

    def products_s(self, policy: str, places: int, again: float = 0) -> float:
        """Estimates the seconds of products at peak, split evenly.

        Args:
          places: that layers are padded to.
          again: share of a forward pass that runs beside what the policy says.
        """
        blocks = min(6.0 * self.in_blocks * self.tokens, self.products)
        padded = -(-self.depth // places) * places / self.depth
        recomputed = (self.again(policy) + again) / 3
        products = self.products + blocks * (padded * (1 + recomputed) - 1)
        products += self.spare + self.prepared
        return products * self.paced / self.target.num_devices / self.peak

    def kernels_s(
        self, policy: str, shares: Sequence[Share], more: bool = False
    ) -> float:
        """Estimates the seconds of fused kernels on the device that has most of them.

        Args:
          more: the forward pass runs once more.
        """
        if not self.fused:
            return 0.0
        kept = _kept_names(policy)
        gpu = self.target.platform == "gpu"
        # cuDNN's residuals have no name by which they could be moved to the host
        if gpu:
            kept = kept - {*remat.named_in(policy)["offload"]}
        once = policy in ("none", "dots") or remat.RESIDUALS in kept
        most = 1.0
        if not gpu:
            most = self._busiest(shares)
        elif any(share.by_parts for share in shares):
            # A GPU's kernel knows no parts of a sequence: XLA computes all of the
            # square.
            most = 2.0
        runs = 1 + (not once) + more + (2.5 if gpu else 3.5)
        flops = runs * self.fused_at_peak * most
        return flops / self.target.num_devices / self.peak

    def _busiest(self, shares: Sequence[Share]) -> float:
        """Compares the device with most work of fused kernels with the mean."""
        work = [cost.fused_flops("causal") for cost in self.costs]
        pairs = zip(work, shares, strict=True)
        return math.fsum(flops * share.busiest for flops, share in pairs) / sum(work)

    def again(self, policy: str) -> float:
        """Returns the share of blocks' products that are computed again."""
        if policy in ("none", "dots"):
            return self.always_again / self.in_blocks
        # No backward pass reads a block's output.
        kept = _kept_names(policy) | {remat.BLOCK_OUTPUT}
        return 1 - sum(map(self.part, sorted(kept)))

    def part(self, name: str) -> float:
        """Returns the share of blocks' products that make an activation of a name."""
        return self.made[name] / self.in_blocks

    def offloaded(self, policy: str) -> float:
        """Returns the bytes of a token that blocks send to the host."""
        sizes = {name: size * self.computed for name, size in self.sizes.items()}
        names = remat.named_in(policy)["offload"]
        return math.fsum(sizes.get(name, self.depth * self.x) for name in names)


def _kept_names(policy: str) -> set[str]:
    """Returns the activations that a policy keeps by name, on the device or
    the host.
    """
    named = remat.named_in(policy)
    return {*named["save"], *named["offload"]}


def _undeclared(spec: ModelSpec, flops: float) -> list[Cost]:
    """Returns costs of a model that declares none: its FLOPs, the blocks' apart.

    Args:
      flops: of a token, forward and backward, as counted in its program.
    """
    parameters = spec.named_parameters().items()
    blocks = sum(x.size for path, (x, _) in parameters if path.startswith("blocks/"))
    used = round(flops / 6)
    in_blocks = min(blocks, used)
    name = spec.model_class.__name__
    return [
        Cost(name=name, products=(Product(in_blocks, 1),)),
        Cost(name=name, products=(Product(used - in_blocks, 1),), in_blocks=False),
    ]
