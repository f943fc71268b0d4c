"""The possible remat policies of a run on a target, ranked by arithmetic.

A policy chooses the named activations to save and to offload, and the number of layers
that it applies to.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from jaxdist.config import ConfigError
from jaxdist.parallel.remat import INPUT, NAMES, RESIDUALS, RematConfig, named_in
from jaxdist.planner import layouts, memory
from jaxdist.planner.arithmetic import Estimate, Model
from jaxdist.planner.layouts import Candidate
from jaxdist.planner.observed import HIDES_TRANSFERS
from jaxdist.planner.on_target import validate_for
from jaxdist.planner.state import host_state_bytes
from jaxdist.planner.targets import Target
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

MOST_TRACED = 24  # policies whose blocks are traced, in a fraction of a second each
# relative difference of step times below which policies are ranked by bytes instead
SAME = 0.002


class Policies:
    """The possible remat policies of a run on a target, by arithmetic.

    Args:
      run: the config.
      target: the hardware.
      limit_bytes: bytes that a step may use of a device, if the device reports them.

    Raises:
      ConfigError: the layout has no policy to choose, or the memory is unknown.
    """

    def __init__(self, run: RunConfig, target: Target, limit_bytes: int | None) -> None:
        base = compose.with_overrides(run, {"remat": RematConfig("full")})
        self.full = validate_for(base, target)
        self.spec = self.full.spec
        if self.full.shape.sizes["pipeline"] > 1:
            raise ConfigError(
                "remat.policy=fit: stages of a pipeline recompute as pipeline.remat says; leave it at dots"
            )
        if not self.spec.staged:
            raise ConfigError(
                f"remat.policy=fit: {self.spec.model_class.__name__} has no blocks (embed, blocks, head) to "
                f"recompute; set remat.policy=dots"
            )
        self.target = target
        self.model = Model(self.full, target)
        known = target.usable_bytes
        # limit of the compiler's peak
        self.hard = min(limit_bytes or known or 0, known or limit_bytes or 0)
        if not self.hard:
            raise ConfigError(
                f"remat.policy=fit: the memory of {target.text} is unknown; set a policy by hand"
            )
        # limit of the peak by arithmetic
        self.most = int(target.freely_used(self.hard))
        self.layers = self.spec.depth * self.spec.block_layers
        full = memory.components(self.full, target)
        # the peak without saved activations, which leave the working set
        self.base_bytes = memory.accounted_peak(full) - full.get("working set", 0) // 2
        self._policies: list[tuple[float, int, str]] | None = None
        self._seen: dict[RematConfig, Candidate] = {}

    def correct(self, candidate: Candidate, needed_bytes: int) -> None:
        """Lowers the limit of the arithmetic after the compiler refused a policy.

        Args:
          candidate: the policy.
          needed_bytes: bytes that its step needs by the compiler.
        """
        excess = max(needed_bytes - self.needed(candidate), 0)
        self.most = min(self.most, self.hard - excess, self.needed(candidate) - 1)

    def best(self) -> list[Candidate]:
        """Lists the candidates that fit by arithmetic, the shortest step first.

        Each policy applies to as many layers as fit.
        """
        candidates = [self._largest(policy) for _, _, policy in self._promising()]
        candidates += [self.accounted(config) for config in self._grouped()]
        fits = [
            candidate
            for candidate in candidates
            if candidate and self._is_within(candidate)
        ]
        return sorted(fits, key=self._rank)

    def may_fit(self, candidate: Candidate) -> bool:
        """Checks whether a candidate fits, although the arithmetic may be too high."""
        return memory.may_fit(self.needed(candidate), self.most)

    def fits(self, config: RematConfig) -> bool:
        """Checks whether a policy fits by arithmetic."""
        return self._is_within(self.accounted(config))

    def least(self) -> Candidate:
        """Finds the candidate that needs the least memory."""
        configs = [RematConfig("full")]
        if self._can_offload:
            configs.append(RematConfig(f"offload:{INPUT}"))
        configs += self._grouped()
        return min(
            map(self.accounted, configs),
            key=lambda candidate: candidate.accounted_bytes,
        )

    @property
    def _can_offload(self) -> bool:
        # The memory of a CPU device is the host's.
        return self.target.platform != "cpu"

    def _rank(self, candidate: Candidate) -> tuple[int, float, int, bool]:
        """Makes the sort key of a candidate; smaller is better."""
        return (
            round(math.log(_careful(candidate.estimate)) / SAME),
            candidate.estimate.host,
            candidate.accounted_bytes,
            # Several policies may make the same program: prefer the usual names.
            candidate.run.remat.policy not in layouts.REMAT,
        )

    def _is_within(self, candidate: Candidate) -> bool:
        """Checks a candidate against the limits of the device and of the host."""
        # A host is assumed to have as much memory as its devices.
        on_host = candidate.components.get(memory.HOST, 0)
        on_host += host_state_bytes(candidate.components)
        return self.needed(candidate) <= self.most and on_host <= self.hard

    def needed(self, candidate: Candidate) -> int:
        """Counts a candidate's bytes, including offloaded activations in transfer."""
        crossing = candidate.components.get(memory.HOST, 0)
        layers = candidate.run.remat.layers // self.spec.block_layers or self.spec.depth
        return candidate.accounted_bytes + min(
            crossing // layers * self._in_flight, crossing
        )

    @property
    def _in_flight(self) -> int:
        return self.target.observed.layers_in_flight

    def accounted(self, config: RematConfig) -> Candidate:
        """Computes the time and the bytes of the run with a policy."""
        if config not in self._seen:
            self._seen[config] = Candidate(self._with(config), self.model)
        return self._seen[config]

    def _with(self, remat: RematConfig) -> Composition:
        run = compose.with_overrides(self.full.config, {"remat": remat})
        return replace(self.full, config=run)

    def _largest(self, policy: str) -> Candidate | None:
        """Applies a policy to as many layers as fit; None if a block is too much."""
        in_all_layers = self.accounted(RematConfig(policy))
        if self._is_within(in_all_layers):
            return in_all_layers
        fitting: Candidate | None = None
        low = 0  # blocks that fit
        high = self.spec.depth  # blocks that do not fit
        while high - low > 1:
            middle = (low + high) // 2
            layers = middle * self.spec.block_layers
            candidate = self.accounted(RematConfig(policy, layers))
            if self._is_within(candidate):
                fitting = candidate
                low = middle
            else:
                high = middle
        return fitting

    def _grouped(self) -> Iterator[RematConfig]:
        """Yields policies that recompute groups of layers, which need least memory."""
        group = self.spec.period * self.spec.block_layers
        for every in range(2, self.layers):
            config = RematConfig("full", every=every)
            if not [*config.stack_faults(self.layers, "", group)]:
                yield config

    def _promising(self) -> list[tuple[float, int, str]]:
        """Lists (seconds, bytes, policy) of the policies that are worth a trace.

        Seconds and bytes are sums over names. The policies of a search of layouts are
        listed as well.
        """
        if self._policies is None:
            sums = map(self._sum, self._choices())
            rows = heapq.nsmallest(MOST_TRACED, (row for row in sums if row))
            listed = {policy for _, _, policy in rows}
            rows += [
                (0.0, 0, policy)
                for policy in layouts.REMAT
                if policy not in listed
                and (self._can_offload or "offload" not in policy)
            ]
            self._policies = rows
        return self._policies

    def _choices(self) -> Iterator[str]:
        """Yields each policy that saves or offloads activations of the blocks."""
        self._sizes = self._bytes_of_names()
        names = [name for name in NAMES if name in self._sizes and name != INPUT]
        input_actions = ("save", "offload") if self._can_offload else ("save",)
        actions = [self._actions(name) for name in names]
        for input_action, *name_actions in product(input_actions, *actions):
            saved = []
            offloaded = [INPUT] if input_action == "offload" else []
            for name, action in zip(names, name_actions, strict=True):
                if action == "save":
                    saved.append(name)
                elif action == "offload":
                    offloaded.append(name)
            parts = []
            if saved:
                parts.append(f"save:{','.join(saved)}")
            if offloaded:
                parts.append(f"offload:{','.join(offloaded)}")
            yield "+".join(parts) or "full"

    def _actions(self, name: str) -> tuple[str, ...]:
        """Lists what a policy may do with an activation; "" recomputes it."""
        # cuDNN's residuals have no name, so they cannot be offloaded.
        by_cudnn = self.target.platform == "gpu" and name == RESIDUALS
        if by_cudnn or not self._can_offload:
            return "", "save"
        return "", "save", "offload"

    def _bytes_of_names(self) -> dict[str, int]:
        """Counts the bytes of each named activation in a block."""
        # The output of attention is the first of its residuals, which save more work.
        config = RematConfig(
            f"save:{','.join(name for name in NAMES if name != 'attention_out')}"
        )
        components = memory.components(self._with(config), self.target)
        kept = {name.removeprefix("saved: "): size for name, size in components.items()}
        return {name: kept[name] // self.spec.depth for name in NAMES if name in kept}

    def _sum(self, policy: str) -> tuple[float, int, str] | None:
        """Estimates (seconds, bytes, policy) of a policy in as many layers as may fit.

        None if not even one block may fit.
        """
        named = named_in(policy)
        depth = self.spec.depth
        base = self.base_bytes
        if INPUT in named["offload"]:
            base -= depth * self._sizes[INPUT]
        base += self._in_flight * sum(self._sizes[name] for name in named["offload"])
        saved = sum(self._sizes[name] for name in named["save"] if name != INPUT)
        offloaded = sum(self._sizes.get(name, 0) for name in named["offload"])
        spare = self.most - base
        if saved * depth <= spare:
            count = depth
        elif saved:
            count = int(spare // saved)
        else:
            count = 0
        if count < 1 or offloaded * count > self.hard:
            return None
        layers = count * self.spec.block_layers if count < depth else 0
        estimate = self.model.estimate(self._with(RematConfig(policy, layers)))
        return _careful(estimate), saved * count, policy


def _careful(estimate: Estimate) -> float:
    """Estimates the step time if only a part of compute hides transfers to the host."""
    return estimate.step_s + min(
        max(estimate.host - HIDES_TRANSFERS * estimate.busy_s, 0.0),
        (1 - HIDES_TRANSFERS) * estimate.busy_s,
    )
