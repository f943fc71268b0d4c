"""The remat policies that a run could have on a target, by arithmetic: every choice of
saves and offloads by name, and of how many layers they are for.
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
from jaxdist.planner.state import HOST_STATE
from jaxdist.planner.targets import Target, validate_for
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

MOST_TRACED = 24  # policies whose blocks are traced: fractions of a second each
SAME = 0.002  # of a step: what arithmetic does not tell apart is ranked by bytes


class Policies:
    """The policies of a run on a target by arithmetic."""

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
                f"compute again; set remat.policy=dots"
            )
        self.target = target
        self.model = Model(self.full, target)
        known = target.usable_bytes
        # of what the compiler says
        self.hard = min(limit_bytes or known or 0, known or limit_bytes or 0)
        if not self.hard:
            raise ConfigError(
                f"remat.policy=fit: nobody knows the memory of {target.text}; give a policy by hand"
            )
        self.most = int(target.freely_used(self.hard))
        self.layers = self.spec.depth * self.spec.block_layers
        full = memory.components(self.full, target)
        # Of names alone: what is saved is no longer part of the working set.
        self.base_bytes = memory.accounted_peak(full) - full.get("working set", 0) // 2
        self._policies: list[tuple[float, int, str]] | None = None
        self._seen: dict[RematConfig, Candidate] = {}

    def correct(self, candidate: Candidate, needed_bytes: int) -> None:
        """Takes into account what the compiler needs of a policy that it refused."""
        excess = max(needed_bytes - self.needed(candidate), 0)
        self.most = min(self.most, self.hard - excess, self.needed(candidate) - 1)

    def best(self) -> list[Candidate]:
        """Returns what fits by arithmetic: of each policy the most layers, the shortest
        step first.
        """
        fitting = [self._largest(policy) for _, _, policy in self._promising()]
        fitting += [self.accounted(config) for config in self._grouped()]
        fits = [
            candidate
            for candidate in fitting
            if candidate and self._is_within(candidate)
        ]
        return sorted(fits, key=self._rank)

    def fits(self, config: RematConfig) -> bool:
        """Returns whether a policy fits by arithmetic."""
        return self._is_within(self.accounted(config))

    def least(self) -> Candidate:
        """Returns what takes least memory."""
        plain = [RematConfig("full")]
        plain += [RematConfig(f"offload:{INPUT}")] if self._can_offload else []
        return min(
            map(self.accounted, [*plain, *self._grouped()]),
            key=lambda candidate: candidate.accounted_bytes,
        )

    @property
    def _can_offload(self) -> bool:
        return self.target.platform != "cpu"  # whose devices' memory is the host's

    def _rank(self, candidate: Candidate) -> tuple:
        return (
            round(math.log(_careful(candidate.estimate)) / SAME),
            candidate.estimate.host,
            candidate.accounted_bytes,
            # of equals, the policy of a word: the same program may have several names
            candidate.run.remat.policy not in layouts.REMAT,
        )

    def _is_within(self, candidate: Candidate) -> bool:
        # A host is taken to have as much memory as its devices.
        on_host = candidate.components.get(memory.HOST, 0)
        on_host += candidate.components.get(HOST_STATE, 0)
        return self.needed(candidate) <= self.most and on_host <= self.hard

    def needed(self, candidate: Candidate) -> int:
        """Returns the bytes of a candidate with those of offloaded activations on their
        way.
        """
        crossing = candidate.components.get(memory.HOST, 0)
        layers = candidate.run.remat.layers // self.spec.block_layers or self.spec.depth
        return candidate.accounted_bytes + min(
            crossing // layers * self._in_flight, crossing
        )

    @property
    def _in_flight(self) -> int:
        return self.target.observed.layers_in_flight

    def accounted(self, config: RematConfig) -> Candidate:
        """Returns the run's layout with a policy, its time and its bytes; kept."""
        if config not in self._seen:
            layout = self._with(config)
            seconds = self.model.estimate(layout)
            self._seen[config] = Candidate(layout, self.target, seconds)
        return self._seen[config]

    def _with(self, remat: RematConfig) -> Composition:
        run = compose.with_overrides(self.full.config, {"remat": remat})
        return replace(self.full, config=run)

    def _largest(self, policy: str) -> Candidate | None:
        """Returns the policy in as many layers as fit; None if one is too much."""
        low = 0
        high = self.spec.depth  # blocks; `high` is not known to be too much
        if self._is_within(whole := self.accounted(RematConfig(policy))):
            return whole
        while high - low > 1:
            middle = (low + high) // 2
            candidate = self.accounted(
                RematConfig(policy, middle * self.spec.block_layers)
            )
            low, high = (middle, high) if self._is_within(candidate) else (low, middle)
        return (
            self.accounted(RematConfig(policy, low * self.spec.block_layers))
            if low
            else None
        )

    def _grouped(self) -> Iterator[RematConfig]:
        """Yields groups of layers, for what does not fit otherwise."""
        group = self.spec.period * self.spec.block_layers
        for every in range(2, self.layers):
            config = RematConfig("full", every=every)
            if not [*config.stack_faults(self.layers, "", group)]:
                yield config

    def _promising(self) -> list[tuple[float, int, str]]:
        """Returns (seconds, bytes, policy), by sums over names: those worth a trace,
        and the search's own.
        """
        if self._policies is None:
            rows = heapq.nsmallest(
                MOST_TRACED, (row for row in map(self._sum, self._choices()) if row)
            )
            own = [
                (0.0, 0, policy)
                for policy in layouts.REMAT
                if self._can_offload or "offload" not in policy
            ]
            named = {policy for _, _, policy in rows}
            self._policies = rows + [row for row in own if row[2] not in named]
        return self._policies

    def _choices(self) -> Iterator[str]:
        """Yields every policy of names that the blocks have."""
        self._sizes = self._bytes_of_names()
        names = [name for name in NAMES if name in self._sizes and name != INPUT]
        # where attention's have no name by which they could be moved
        gpu = self.target.platform == "gpu"
        states = [
            ("", "save") if gpu and name == RESIDUALS else ("", "save", "offload")
            for name in names
        ]
        if not self._can_offload:
            states = [("", "save")] * len(names)
        for entry, *rest in product(
            ("save", "offload") if self._can_offload else ("save",), *states
        ):
            kinds: dict[str, list[str]] = {
                "save": [],
                "offload": [INPUT] if entry == "offload" else [],
            }
            for name, kind in zip(names, rest, strict=True):
                if kind:
                    kinds[kind].append(name)
            parts = [
                f"{kind}:{','.join(chosen)}" for kind, chosen in kinds.items() if chosen
            ]
            yield "+".join(parts) or "full"

    def _bytes_of_names(self) -> dict[str, int]:
        """Returns the bytes that each name takes in a layer of the stack's blocks."""
        # What attention gives is the first of its residuals, which are worth more.
        config = RematConfig(
            f"save:{','.join(name for name in NAMES if name != 'attention_out')}"
        )
        components = memory.components(self._with(config), self.target)
        kept = {name.removeprefix("saved: "): size for name, size in components.items()}
        return {name: kept[name] // self.spec.depth for name in NAMES if name in kept}

    def _sum(self, policy: str) -> tuple[float, int, str] | None:
        """Returns (seconds, bytes, policy) with as many layers as may fit; None if not
        one layer does.
        """
        named = named_in(policy)
        depth = self.spec.depth
        base = self.base_bytes
        if INPUT in named["offload"]:
            base -= depth * self._sizes[INPUT]
        base += self._in_flight * sum(self._sizes[name] for name in named["offload"])
        each = sum(self._sizes[name] for name in named["save"] if name != INPUT)
        spare = self.most - base
        count = depth if each * depth <= spare else int(spare // each) if each else 0
        if (
            count < 1
            or sum(self._sizes.get(n, 0) for n in named["offload"]) * count > self.hard
        ):
            return None
        layers = count * self.spec.block_layers if count < depth else 0
        estimate = self.model.estimate(self._with(RematConfig(policy, layers)))
        return _careful(estimate), each * count, policy


def _careful(estimate: Estimate) -> float:
    """Returns the seconds of a step of whose compute a part alone hides transfers."""
    return estimate.step_s + min(
        max(estimate.host - HIDES_TRANSFERS * estimate.busy_s, 0.0),
        (1 - HIDES_TRANSFERS) * estimate.busy_s,
    )
