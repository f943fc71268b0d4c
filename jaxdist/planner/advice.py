"""What would make a run smaller: edits of its config, the cheapest first, each with its
saving.

A saving is the difference of two accounts of `planner.memory`, so it costs no compile.
Nothing that changes the losses goes without saying so.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxdist.config import ConfigError, files, schema
from jaxdist.parallel import axes, remat
from jaxdist.planner import layouts, memory, targets
from jaxdist.planner.arithmetic import CONTEXT
from jaxdist.planner.document import Edit
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn, until_one_fits
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of
from jaxdist.trainer.run_config import RunConfig, from_config, full_schema

MIN_SAVING = 0.01  # of the peak: what saves less is no advice
SAFE_SHARE = 0.95  # of the capacity: what an account may be off by is left free


def edits(
    composition: Composition,
    target: Target,
    peak: int,
    *,
    needed_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> list[Edit]:
    """Returns the edits that save memory, the cheapest first; one that joins several if
    none is enough.

    Args:
      peak: bytes of the run as it is, by `memory`.
      needed_bytes: the compiler's peak where it is known; savings are taken off the
        larger of both.
      capacity_bytes: what a device has; None: nothing is said of `enough`.
    """
    run = composition.config
    # The compiler's number may be of a program that it could not finish, so lower than
    # the peak.
    short = None
    if capacity_bytes:
        short = max(max(peak, needed_bytes or 0) - int(SAFE_SHARE * capacity_bytes), 1)

    @functools.cache
    def saving(override: str, target: Target = target) -> int:
        """Returns what an override saves; 0 if the run is then not legal."""
        try:
            edited = targets.validate_for(_edited(run, override), target)
        except ConfigError:
            return 0
        return peak - memory.accounted_peak(memory.components(edited, target))

    least = MIN_SAVING * peak
    offers = [
        (override, cost, saving(override), "")
        for override, cost in _candidates(composition, short, saving)
    ]
    if larger := next(
        (more for more in _larger_targets(target) if saving("", more) >= least), None
    ):
        cost = (
            f"same losses; {math.ceil(larger.num_chips / target.num_chips)} x the chips"
        )
        offers.append(("", cost, saving("", larger), larger.text))
    single = [
        Edit(override, saves, cost, None if short is None else saves >= short, on=on)
        for override, cost, saves, on in offers
        if saves >= least
    ]
    if short and not any(edit.enough for edit in single if edit.override):
        return [*_combined(single, short, saving), *single]
    return single


def check(
    run: RunConfig,
    edits: Sequence[Edit],
    compile: Callable[[RunConfig], Any],
    most: int = 3,
) -> list[Edit]:
    """Returns the edits, the first of them compiled in order until one fits.

    Args:
      compile: returns the `Plan` of a run; where the compiler does not answer nothing
        is said of the edit.
      most: compiles at most.
    """

    def checked(edit: Edit) -> Edit:
        try:
            plan = compile(_edited(run, edit.override))
        except ConfigError:
            return edit
        peak = plan.peak_bytes if plan.fits else None
        return replace(edit, checked=plan.fits, peak_bytes=peak)

    of_config = [edit for edit in edits if edit.override]
    promising = [edit for edit in of_config if edit.enough is not False]
    chosen = (promising or of_config)[:most]
    asked = compile_in_turn(until_one_fits(chosen), checked)
    by_override = {edit.override: edit for edit in asked}
    return [by_override.get(edit.override, edit) for edit in edits]


def _edited(run: RunConfig, override: str) -> RunConfig:
    """Returns the run with an edit's override, read as on the command line."""
    config = schema.to_config_dict(run)
    words = dict(word.split("=", 1) for word in override.split())
    files.apply_overrides(config, words, full_schema(run.model["target"]))
    return from_config(config)


def _candidates(
    composition: Composition, short: int | None, saving: Callable[[str], int]
) -> Iterator[tuple[str, str]]:
    """Yields (override, what it costs), the cheapest first."""

    def best(overrides: Sequence[str]) -> str | None:
        """Returns the first override that is enough, or else the one that
        saves most.
        """
        enough = (
            override
            for override in overrides
            if short is not None and saving(override) >= short
        )
        return next(enough, max(overrides, key=saving, default=None))

    run = composition.config
    sizes = composition.shape.sizes
    if sizes["data"] > 1 and run.mesh.zero:
        yield (
            "mesh.data=1 mesh.fsdp=-1",
            "same losses; shards are gathered from more devices",
        )
    if sizes["tensor"] > 1 and not run.mesh.sequence_parallel:
        yield (
            "mesh.sequence_parallel=true",
            "same losses; two gathers of activations more in each layer",
        )
    yield from _smaller_parts(composition, best)
    yield from _stronger_remat(run, sizes["pipeline"] > 1)
    for cost in costs_of(run):
        yield from cost.edits
    yield from _split_sequences(composition, best)
    for axis in reversed(axes.TABLE):  # what splits least of the program first
        larger = [
            n for n in (2, 4, 8, 16) if sizes[axis.name] < n <= axis.advised_up_to
        ]
        if override := best(
            [f"mesh.{axis.name}={n} mesh.fsdp=-1 mesh.data=1" for n in larger]
        ):
            yield override, axis.advice
    if run.mesh.zero < 3:
        yield (
            "mesh.zero=3",
            "same losses; weights are gathered in every layer, forward and backward",
        )
    if run.remat.policy == "full" and sizes["pipeline"] == 1:
        yield (
            f"remat.policy=offload:{remat.INPUT}",
            "same losses; layer inputs go to the host and back",
        )
    if not run.offload.optimizer and not offload_obstacle(run.optimizer):
        seconds = memory.transfer_s(saving("offload.optimizer=true"))
        yield (
            "offload.optimizer=true",
            f"same losses; moments wait on the host: {seconds:.2f} s a step to cross and back at 16 GB/s",
        )
    if run.optimizer.momentum_dtype == "float32":
        yield (
            "optimizer.momentum_dtype=bfloat16",
            "CHANGES THE LOSSES a little: momentum is rounded",
        )
    if run.precision.params == "float32":
        yield "precision.params=bfloat16", "CHANGES THE LOSSES: small updates are lost"
    if run.batch.global_size % 2 == 0:
        yield (
            f"batch.global_size={run.batch.global_size // 2}",
            "CHANGES THE LOSSES: half the batch a step",
        )


def _smaller_parts(composition: Composition, best) -> Iterator[tuple[str, str]]:
    flow = composition.microbatches
    batch = composition.config.batch
    parts = batch.accumulation
    shards = composition.parts * composition.shape.batch_shards
    factors = axes.divisors(batch.global_size // shards)[1:]
    if flow > 1:
        if override := best([f"pipeline.microbatches={flow * n}" for n in factors]):
            yield override, "same losses, less bubble; smaller products"
    elif override := best([f"batch.accumulation={parts * n}" for n in factors]):
        factor = int(override.partition("=")[2]) // parts
        yield (
            override,
            f"same losses; weights are gathered {factor} x as often, products are smaller",
        )


def _split_sequences(composition: Composition, best) -> Iterator[tuple[str, str]]:
    """Yields a larger `mesh.context` where a device has one sequence at a time, so that
    parts cannot help.
    """
    run = composition.config
    shape = composition.shape
    parts = run.batch.accumulation
    own = shape.sizes[CONTEXT]
    if (
        composition.microbatches > 1
        or run.batch.global_size != parts * shape.batch_shards
    ):
        return
    sizes = [
        n
        for n in layouts.context_sizes(run, shape.num_devices)
        if n > own and n % own == 0
    ]
    if override := best(
        [
            f"mesh.context={n} mesh.fsdp=-1 mesh.data=1 batch.accumulation={parts * n // own}"
            for n in sizes
        ]
    ):
        yield (
            override,
            "same losses; attention sends queries, keys and values in every layer, so within fast links only",
        )


def _stronger_remat(run: RunConfig, staged: bool) -> Iterator[tuple[str, str]]:
    field, policy = (
        ("pipeline.remat", run.pipeline.remat)
        if staged
        else ("remat.policy", run.remat.policy)
    )
    forward_again = "same losses; up to +33 % compute, as the forward pass runs twice"
    if policy == "none" and not staged:
        yield (
            "remat.policy=dots",
            "same losses; element-wise work and little else runs twice",
        )
    if policy not in ("full", "layers"):
        yield (
            f"{field}=full",
            forward_again if not staged else "same losses; layers run a third time",
        )


def _combined(
    edits: Sequence[Edit], short: int, saving: Callable[[str], int]
) -> list[Edit]:
    """Returns the edits taken together, in order, until they are enough; [] if they
    never are.
    """
    taken: dict[str, str] = {}
    best = 0
    notes = list[str]()
    for edit in edits:
        words = dict(word.split("=", 1) for word in edit.override.split())
        if not words or taken.keys() & words.keys():
            continue
        override = " ".join(
            f"{name}={value}" for name, value in (taken | words).items()
        )
        if (saves := saving(override)) <= best:
            continue
        taken = taken | words
        best = saves
        notes = [*notes, *edit.cost_note.split("; ")]
        if best >= short:
            return [Edit(override, best, "; ".join(dict.fromkeys(notes)), True)]
    return []


def _larger_targets(target: Target) -> Iterator[Target]:
    """Yields hardware of the family with one dim doubled, the smallest step first."""
    dims = [*target.shape]
    order: Sequence[int] = ()
    if target.platform == "gpu":
        order = (1, 0)  # more GPUs of a host, then more hosts
    elif target.chip:
        order = sorted(range(len(dims)), key=dims.__getitem__)
    if target.num_slices > 1:
        dims.append(target.num_slices)
    for dim in order:
        grown = [n * (2 if i == dim else 1) for i, n in enumerate(dims)]
        with contextlib.suppress(ConfigError):
            yield targets.parse(target.with_shape(grown))
