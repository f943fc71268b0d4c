"""`remat.policy=fit`: what blocks keep so that a step fits a device with the least
recomputation.

Every choice of saves and offloads by name, and of how many layers they are for, is
weighed by the planner's arithmetic; the compiler is asked of the best, and what it says
against the arithmetic counts for the next.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.parallel.remat import FIT, INPUT, NAMES, RESIDUALS, RematConfig, named_in
from jaxdist.planner import arithmetic, layouts, memory, targets
from jaxdist.planner.arithmetic import Estimate
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.layouts import Candidate
from jaxdist.planner.observed import HIDES_TRANSFERS
from jaxdist.planner.plan import Plan, make_plan
from jaxdist.planner.search import Compiled
from jaxdist.planner.targets import Target, validate_for
from jaxdist.telemetry.units import gib_text, time_text
from jaxdist.trainer import compose, elastic, workdir
from jaxdist.trainer.run_config import RunConfig

MOST_TRACED = 24  # policies whose blocks are traced: fractions of a second each
MOST_REFUSED = 4  # compiles of steps that do not fit
SAME = 0.002  # of a step: what arithmetic does not tell apart is ranked by bytes

_PLAIN = tuple(map(RematConfig, layouts.REMAT))
Say = Callable[[str], None]


@dataclass(frozen=True)
class Fitted:
    """What `fit` came to."""

    run: RunConfig  # with the policy
    plan: Plan  # compiled
    seconds: float  # by what it was ranked
    # every policy that was compiled, and what came of it
    tried: tuple[tuple[RematConfig, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the policy, as on the command line too, and what was compiled."""
        tried = [{"remat": str(remat), "why": why} for remat, why in self.tried]
        return {
            "overrides": overrides(self.run.remat),
            "step_s": self.seconds,
            "tried": tried,
        }

    def lines(self) -> Iterator[str]:
        """Yields what to say of it."""
        for remat, why in self.tried:
            yield f"compiled: remat {remat}: {why}"
        yield f"remat.policy=fit: {' '.join(overrides(self.run.remat))}"


def fit(
    run: RunConfig,
    target: Target,
    *,
    limit_bytes: int | None = None,
    finalists: int = 1,
    options: CompileOptions | None = None,
    say: Say = lambda line: None,
) -> Fitted:
    """Returns the run with the policy that fits the target with the shortest step.

    Args:
      limit_bytes: what a step may use of a device, where it says so itself; default:
        the planner's.
      finalists: policies compiled that fit; of several the compiler's estimate decides.

    Raises:
      ConfigError: nothing fits, or the layout has no policy to choose.
      MissingExtra: the target's compiler is not installed.
    """
    weigh = Weigher(run, target, limit_bytes)
    say(
        f"remat.policy=fit: {gib_text(weigh.most)} of a {target.text} device may be used"
    )
    tried, fitting = list[tuple[RematConfig, str]](), list[Compiled]()
    for _ in range(MOST_REFUSED + finalists):
        if not (one := _next(weigh, [one for one, _ in tried], fitting)):
            break
        say(
            f"compiling remat {one.run.remat}: by arithmetic {time_text(one.estimate.step_s)}"
        )
        plan = make_plan(one.run, target, options=options, say=say)
        fits = plan.fits and (plan.peak_bytes or 0) <= weigh.hard
        made = Compiled(one, plan)
        took = f", {time_text(_seconds(made))} a step" if plan.fits else ""
        tried.append((one.run.remat, plan.exit_reason.partition("\n")[0] + took))
        say(f"  {tried[-1][1]}")
        if plan.fits is None:
            raise ConfigError(
                f"remat.policy=fit: {plan.exit_reason}; give a policy by hand"
            )
        if fits:
            fitting.append(made)
        else:
            weigh.correct(one, plan.peak_bytes or 0)
        if len(fitting) == finalists:
            break
    if not fitting:
        raise ConfigError(_nothing_fits(weigh, tried))
    winner = min(fitting, key=lambda one: (_seconds(one), one.plan.peak_bytes or 0))
    return Fitted(winner.layout.run, winner.plan, _seconds(winner), tuple(tried))


def _next(
    weigh: "Weigher", done: Sequence[RematConfig], fitting: Sequence[Compiled]
) -> Candidate | None:
    """Returns what to compile: the best of all, then the search's own."""
    best = min(map(_seconds, fitting), default=math.inf)
    fresh = (
        c for c in weigh.best() if c.run.remat not in done and c.estimate.bound_s < best
    )
    return next((c for c in fresh if not fitting or c.run.remat in _PLAIN), None)


def _seconds(one: Compiled) -> float:
    """Returns the compiler's estimate, or what offloaded activations take to cross if
    that is longer.
    """
    return max(one.seconds, one.layout.estimate.host)


def _careful(one: Estimate) -> float:
    """Returns the seconds of a step of whose compute a part alone hides transfers."""
    return one.step_s + min(
        max(one.host - HIDES_TRANSFERS * one.busy_s, 0.0),
        (1 - HIDES_TRANSFERS) * one.busy_s,
    )


def _nothing_fits(weigh: "Weigher", tried: list[tuple[RematConfig, str]]) -> str:
    least = weigh.least()
    said = f"; the compiler of {tried[-1][0]}: {tried[-1][1]}" if tried else ""
    return (
        f"remat.policy=fit: no policy makes the step fit {gib_text(weigh.most)}: by arithmetic remat "
        f"{least.run.remat} takes least, {gib_text(least.accounted_bytes)}{said}; raise mesh.fsdp or "
        f"batch.accumulation, or see what `jaxdist plan` advises for remat.policy=full"
    )


class Weigher:
    """The policies of a run on a target by arithmetic."""

    def __init__(self, run: RunConfig, target: Target, limit_bytes: int | None):
        base = compose.with_overrides(run, {"remat": RematConfig("full")})
        composition = validate_for(base, target)
        self.shape = composition.shape
        self.rules = composition.rules
        self.spec = composition.spec
        if self.shape.sizes["pipeline"] > 1:
            raise ConfigError(
                "remat.policy=fit: stages of a pipeline recompute as pipeline.remat says; leave it at dots"
            )
        if not self.spec.staged:
            raise ConfigError(
                f"remat.policy=fit: {self.spec.model_class.__name__} has no blocks (embed, blocks, head) to "
                f"compute again; set remat.policy=dots"
            )
        self.run, self.target = base, target
        self.model = arithmetic.Model(base, target, self.spec, base, self.shape)
        known = target.usable_bytes
        # of what the compiler says
        self.hard = min(limit_bytes or known or 0, known or limit_bytes or 0)
        if not self.hard:
            raise ConfigError(
                f"remat.policy=fit: nobody knows the memory of {target.text}; give a policy by hand"
            )
        self.most = int(target.freely_used(self.hard))
        self.layers = self.spec.depth * self.spec.block_layers
        full = memory.components(base, self.spec, self.rules, target)
        # Of names alone: what is saved is no longer part of the working set.
        self.base_bytes = memory.accounted_peak(full) - full.get("working set", 0) // 2
        self._policies: list[tuple[float, int, str]] | None = None
        self._seen: dict[RematConfig, Candidate] = {}

    def correct(self, one: Candidate, needed_bytes: int) -> None:
        """Takes into account what the compiler needs of a policy that it refused."""
        excess = max(needed_bytes - self.needed(one), 0)
        self.most = min(self.most, self.hard - excess, self.needed(one) - 1)

    def best(self) -> list[Candidate]:
        """Returns what fits by arithmetic: of each policy the most layers, the shortest
        step first.
        """
        fitting = [self._largest(policy) for _, _, policy in self._promising()]
        fitting += [self.accounted(config) for config in self._grouped()]
        fits = [one for one in fitting if one and self._is_within(one)]
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
            key=lambda one: one.accounted_bytes,
        )

    @property
    def _can_offload(self) -> bool:
        return self.target.platform != "cpu"  # whose devices' memory is the host's

    def _rank(self, one: Candidate) -> tuple:
        return (
            round(math.log(_careful(one.estimate)) / SAME),
            one.estimate.host,
            one.accounted_bytes,
        )

    def _is_within(self, one: Candidate) -> bool:
        # A host is taken to have as much memory as its devices.
        on_host = one.components.get(memory.HOST, 0)
        on_host += one.components.get(memory.HOST_STATE, 0)
        return self.needed(one) <= self.most and on_host <= self.hard

    def needed(self, one: Candidate) -> int:
        """Returns the bytes of a candidate with those of offloaded activations on their
        way.
        """
        crossing = one.components.get(memory.HOST, 0)
        layers = one.run.remat.layers // self.spec.block_layers or self.spec.depth
        return one.accounted_bytes + min(crossing // layers * self._in_flight, crossing)

    @property
    def _in_flight(self) -> int:
        return self.target.observed.layers_in_flight

    def accounted(self, config: RematConfig) -> Candidate:
        """Returns the run's layout with a policy, its time and its bytes; kept."""
        if config not in self._seen:
            run = compose.with_overrides(self.run, {"remat": config})
            one = Candidate(run, self.shape, self.model.estimate(run, self.shape), 0)
            self._seen[config] = layouts.accounted(one, self.target, self.spec)
        return self._seen[config]

    def _largest(self, policy: str) -> Candidate | None:
        """Returns the policy in as many layers as fit; None if one is too much."""
        low, high = 0, self.spec.depth  # blocks; `high` is not known to be too much
        if self._is_within(whole := self.accounted(RematConfig(policy))):
            return whole
        while high - low > 1:
            middle = (low + high) // 2
            one = self.accounted(RematConfig(policy, middle * self.spec.block_layers))
            low, high = (middle, high) if self._is_within(one) else (low, middle)
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
        components = memory.components(
            compose.with_overrides(self.run, {"remat": config}),
            self.spec,
            self.rules,
            self.target,
        )
        kept = {name.removeprefix("saved: "): size for name, size in components.items()}
        return {name: kept[name] // self.spec.depth for name in NAMES if name in kept}

    def _sum(self, policy: str) -> tuple[float, int, str] | None:
        """Returns (seconds, bytes, policy) with as many layers as may fit; None if not
        one layer does.
        """
        named, depth = named_in(policy), self.spec.depth
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
        run = compose.with_overrides(self.run, {"remat": RematConfig(policy, layers)})
        return _careful(self.model.estimate(run, self.shape)), each * count, policy


# --- a run's policy -------------------------------------------------------------------


def resolve(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    folder: Path | None = None,
    full_devices: int | None = None,
    say: Say = print,
) -> RunConfig:
    """Returns a run whose policy `fit` is resolved for its devices; each process makes
    the call.

    A run that goes on keeps the policy that it had. On other devices, or in another
    layout, it does so if that still fits by arithmetic; else one is found anew.

    Args:
      folder: of the run; None: it has none.
      full_devices: see `trainer.train`.

    Raises:
      ConfigError: nothing fits, or nothing is known of the devices.
    """
    chosen: RematConfig | None = None
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            refitted = elastic.refit(
                run, devices=len(devices), full_devices=full_devices
            )
            chosen = _resolve(refitted, devices, _before(run, folder), say)
    return replace(
        run, remat=RematConfig(**coordination.broadcast(chosen and asdict(chosen)))
    )


def _before(run: RunConfig, folder: Path | None) -> RematConfig | None:
    """Returns what was resolved for the run before: its own, or that of the run in its
    folder.
    """
    if run.remat.policy != FIT:
        return run.remat
    if folder is None or not (folder / workdir.CONFIG).is_file():
        return None
    stored = workdir.read_config(
        folder, named=run.model["target"], trust_code=None
    ).remat
    return stored if stored.fitted else None


def _resolve(
    run: RunConfig, devices: Sequence[jax.Device], before: RematConfig | None, say: Say
) -> RematConfig:
    try:
        target = targets.parse("here", devices)
    except ConfigError:
        if before:
            return replace(before, fitted="")
        raise ConfigError(
            f"remat.policy=fit: nothing is known of compiling for {devices[0].device_kind}; set remat.policy "
            f"to dots, or to full if that is too large"
        ) from None
    full = compose.with_overrides(run, {"remat": RematConfig("full")})
    shape = validate_for(full, target).shape
    where = f"{target.text}, {shape}, accumulation {run.batch.accumulation}"
    if before:
        plain, (own, _, place) = (
            replace(before, fitted=""),
            before.fitted.partition(" for "),
        )
        if own != str(plain):  # changed by hand since
            return plain
        if place == where:
            say(f"remat: {plain}, as it was resolved for {place}")
            return before
        weigh = Weigher(run, target, _limit(devices))
        if weigh.fits(plain):
            say(
                f"remat: {plain}, resolved for {place}, fits {where} by arithmetic: kept"
            )
            return replace(plain, fitted=f"{plain} for {where}")
        say(
            f"remat: {plain}, resolved for {place}, does not fit {where} by arithmetic: resolved anew"
        )
    found = fit(run, target, limit_bytes=_limit(devices), say=say)
    say(
        f"remat.policy=fit: {' '.join(overrides(found.run.remat))} ({time_text(found.seconds)} a step)"
    )
    return replace(found.run.remat, fitted=f"{found.run.remat} for {where}")


def _limit(devices: Sequence[jax.Device]) -> int | None:
    """Returns what a step may use of each device, as the devices say; None where they
    do not.
    """
    local = [
        device for device in devices if device.process_index == jax.process_index()
    ]
    known = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min(filter(None, known), default=None)


def overrides(found: RematConfig) -> list[str]:
    """Returns a policy as on the command line."""
    plain = RematConfig("")
    return [
        f"--config.remat.{name}={value}"
        for name, value in asdict(found).items()
        if name != "fitted" and value != getattr(plain, name)
    ]
