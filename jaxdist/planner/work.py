"""The work of a step: matmuls, fused kernels and parameters, in any layout.

The model's ops declare their work (`ops.costs`).
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
from jaxdist.protocols.dim_names import has_experts
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import compose, product_formats
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of, itemsize_of
from jaxdist.trainer.model_flops import model_flops, policy_flops


class Work:
    """The work of a run's step on a target's chips.

    Args:
      legal: the run in any legal layout; its optimizer state gives the bytes per
        parameter.
      target: the hardware.
    """

    def __init__(self, legal: Composition, target: Target) -> None:
        run = legal.config
        spec = legal.spec
        self.target = target
        # FLOP/s of a device; without a published peak any number ranks layouts
        self.peak = target.matmul_peak(run.precision.compute) or 1e12
        # bytes of a parameter as it is stored, and in the compute dtype
        self.stored = jnp.dtype(run.precision.params).itemsize
        self.computed = itemsize_of(run)
        # tokens of a step on all devices
        self.tokens = run.batch.global_size * compose.targets_per_sample(run)
        # number of blocks
        self.depth = max(spec.depth, 1)
        # bytes of optimizer state per parameter
        state = memory.components(legal, target)
        shards = math.prod(legal.shape.sizes[axis] for axis in STATE_AXES)
        moments = state.get("optimizer state", 0) * shards
        self.moments = moments / spec.parameter_count
        # bytes per token of the input of a block; 0 without blocks
        block = trace(legal, run.remat.policy, target.platform)
        self.input_bytes = block.x / block.tokens
        # numbers of parameters: in experts, outside of experts, and in frozen modules
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
        """Sums the declared costs of ops, or else the FLOPs of an undeclared model."""
        flops = policy_flops(legal.config, legal.spec)["causal"]
        with_modules = model_flops(legal.config, legal.spec)["causal"]
        # FLOPs of frozen modules, which are counted as matmuls
        self.module_flops = (with_modules - flops) * self.tokens
        self.costs = costs_of(legal.config) or _undeclared(legal.spec, flops)
        fused = [cost.fused_flops("causal") / 3 for cost in self.costs]
        # FLOPs of a step's fused kernels in one forward pass, and the FLOPs that would
        # take as long at the peak
        self.fused = math.fsum(fused) * self.tokens
        self.fused_at_peak = self.tokens * math.fsum(
            count / self.target.observed.attention_share(cost.fused_width)
            for count, cost in zip(fused, self.costs, strict=True)
        )
        self.matmul_flops = flops * self.tokens - 3 * self.fused
        # by name of an activation: the parameters that compute it, and its elements per
        # token
        self.parameters_of = Counter[str]()
        self.sizes = Counter[str]()
        self.always_again = 0.0
        for cost in self.costs:
            if not cost.in_blocks:
                continue
            for product in cost.products:
                used = cost.layers * product.contracted * product.size
                self.parameters_of[product.makes] += used
                self.sizes[product.makes] += cost.layers * product.size
                if product.always_again:
                    self.always_again += used
        self.in_blocks = max(self.parameters_of.total(), 1)
        # FLOPs of spare rows; hidden activations of them are computed twice
        self.spare_flops = 0.0
        for cost in self.costs:
            again = sum(p.flops for p in cost.products if p.always_again)
            flops = cost.product_flops() + cost.layers * again
            spare = cost.spare_rows(self.target.platform)
            self.spare_flops += spare * flops * self.tokens

    def _count_recipe(self, legal: Composition) -> None:
        """Counts how much less time and communication matmuls of a recipe take."""
        # bytes of a parameter that are gathered
        self.gathered: float = self.computed
        # time of matmuls relative to as many FLOPs in the compute dtype
        self.matmul_pace = 1.0
        recipe = legal.config.precision.recipe
        coded = product_formats.parameters(legal.config, legal.spec)
        if recipe is None or not coded:
            return
        share = coded / legal.spec.parameter_count
        self.gathered -= (self.computed - recipe.gathered_bytes) * share
        peak = self.target.matmul_peak(recipe.peak)
        if peak is not None:
            saved = 1 - self.peak / (recipe.units.reached * peak)
            in_recipe = 2 * recipe.matmuls * coded * self.tokens
            self.matmul_pace -= saved * in_recipe / self.matmul_flops

    def matmuls_s(self, policy: str, places: int, again: float = 0) -> float:
        """Estimates the seconds of matmuls at the peak, split evenly over devices.

        Args:
          policy: the remat policy.
          places: stages times chunks; layers are padded to a multiple of it.
          again: share of a forward pass that runs once more than the policy requires.
        """
        blocks = min(6.0 * self.in_blocks * self.tokens, self.matmul_flops)
        padded = -(-self.depth // places) * places / self.depth
        recomputed = (self.again(policy) + again) / 3
        flops = self.matmul_flops + blocks * (padded * (1 + recomputed) - 1)
        flops += self.spare_flops + self.module_flops
        return flops * self.matmul_pace / self.target.num_devices / self.peak

    def kernels_s(
        self, policy: str, shares: Sequence[Share], more: bool = False
    ) -> float:
        """Estimates the seconds of fused kernels on the busiest device.

        Args:
          policy: the remat policy.
          shares: a device's share of each op.
          more: whether the forward pass runs once more than the policy requires.
        """
        if not self.fused:
            return 0.0
        kept = _kept_names(policy)
        gpu = self.target.platform == "gpu"
        # cuDNN's residuals have no name, so they cannot be offloaded.
        if gpu:
            kept = kept - {*remat.named_in(policy)["offload"]}
        runs_once = policy in ("none", "dots") or remat.RESIDUALS in kept
        busiest = 1.0
        if not gpu:
            busiest = self._busiest(shares)
        elif any(share.by_parts for share in shares):
            # A GPU's kernel cannot attend to parts of a sequence, so XLA computes the
            # whole square instead of its causal half.
            busiest = 2.0
        backward = 2.5 if gpu else 3.5
        runs = 1 + (not runs_once) + more + backward
        flops = runs * self.fused_at_peak * busiest
        return flops / self.target.num_devices / self.peak

    def _busiest(self, shares: Sequence[Share]) -> float:
        """Computes the busiest device's work of fused kernels relative to the mean."""
        work = [cost.fused_flops("causal") for cost in self.costs]
        pairs = zip(work, shares, strict=True)
        return math.fsum(flops * share.busiest for flops, share in pairs) / sum(work)

    def again(self, policy: str) -> float:
        """Computes the share of blocks' matmuls that a policy recomputes."""
        if policy in ("none", "dots"):
            return self.always_again / self.in_blocks
        # A block's output is not recomputed, because no backward pass reads it.
        kept = _kept_names(policy) | {remat.BLOCK_OUTPUT}
        return 1 - sum(map(self.part, sorted(kept)))

    def part(self, name: str) -> float:
        """Computes the share of blocks' matmuls that compute a named activation."""
        return self.parameters_of[name] / self.in_blocks

    def offloaded(self, policy: str) -> float:
        """Counts the bytes per token that blocks send to the host."""
        sizes = {name: size * self.computed for name, size in self.sizes.items()}
        names = remat.named_in(policy)["offload"]
        return math.fsum(
            sizes.get(name, self.depth * self.input_bytes) for name in names
        )


def _kept_names(policy: str) -> set[str]:
    """Lists the activations that a policy saves or offloads by name."""
    named = remat.named_in(policy)
    return {*named["save"], *named["offload"]}


def _undeclared(spec: ModelSpec, flops: float) -> list[Cost]:
    """Makes the costs of a model that declares none from its FLOPs.

    Args:
      spec: the model.
      flops: FLOPs of a token, forward and backward, as counted in its program.
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
