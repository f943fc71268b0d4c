"""Advice for a run that does not fit: edits of its config, the cheapest first.

The saving of an edit is the difference of two results of `planner.memory`, so nothing
is compiled. An edit that changes the losses says so.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxdist.config import ConfigError, files, schema
from jaxdist.parallel import axes, remat
from jaxdist.planner import memory, on_target, targets
from jaxdist.planner.document import Edit
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn, until_one_fits
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of
from jaxdist.trainer.run_config import RunConfig, from_config, full_schema

MIN_SAVING = 0.01  # least share of the peak that an edit must save
SAFE_SHARE = 0.95  # share of the capacity to use, as arithmetic may be wrong

_Saving = Callable[[str], int]  # bytes that an override saves
_Choose = Callable[[Sequence[str]], str | None]  # the best of several overrides


def edits(
    composition: Composition,
    target: Target,
    peak: int,
    *,
    needed_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> list[Edit]:
    """Lists edits that save memory, the cheapest first.

    If no edit of the config is enough, a combination of several comes first.

    Args:
      composition: the run on its mesh.
      target: the hardware.
      peak: bytes of the run by `memory`.
      needed_bytes: the compiler's peak, if known; edits must save enough for the larger
        of both.
      capacity_bytes: bytes that a step may use of a device; None leaves `enough` open.
    """
    run = composition.config
    # The compiler may refuse a program before it is complete, so its number may be
    # below the peak.
    short = None
    if capacity_bytes:
        needed = max(peak, needed_bytes or 0)
        short = max(needed - int(SAFE_SHARE * capacity_bytes), 1)

    @functools.cache
    def saving(override: str, target: Target = target) -> int:
        """Computes the bytes that an override saves; 0 if the run is then illegal."""
        try:
            edited = on_target.validate_for(_edited(run, override), target)
        except ConfigError:
            return 0
        return peak - memory.accounted_peak(memory.components(edited, target))

    least = MIN_SAVING * peak
    offers = [
        (override, cost, saving(override), "")
        for override, cost in _candidates(composition, target, short, saving)
    ]
    for larger in _larger_targets(target):
        if saving("", larger) >= least:
            factor = math.ceil(larger.num_chips / target.num_chips)
            cost = f"same losses; {factor} x the chips"
            offers.append(("", cost, saving("", larger), larger.text))
            break
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
    """Compiles the first edits of the config in order until one fits.

    Args:
      run: the config.
      edits: its edits, the cheapest first.
      compile: makes the `Plan` of an edited run.
      most: most edits to compile.

    Returns:
      The edits, with the compiler's answers where there are any.
    """

    def checked(edit: Edit) -> Edit:
        """Compiles an edit and records whether it fits."""
        try:
            plan = compile(_edited(run, edit.override))
        except ConfigError:
            return edit
        peak = plan.peak_bytes if plan.fits else None
        return replace(edit, checked=plan.fits, peak_bytes=peak)

    of_config = [edit for edit in edits if edit.override]
    promising = [edit for edit in of_config if edit.enough is not False]
    chosen = (promising or of_config)[:most]
    compiled = compile_in_turn(until_one_fits(chosen), checked)
    by_override = {edit.override: edit for edit in compiled}
    return [by_override.get(edit.override, edit) for edit in edits]


def _edited(run: RunConfig, override: str) -> RunConfig:
    """Applies an edit's override as the command line does."""
    config = schema.to_config_dict(run)
    words = dict(word.split("=", 1) for word in override.split())
    files.apply_overrides(config, words, full_schema(run.model["target"]))
    return from_config(config)


def _candidates(
    composition: Composition, target: Target, short: int | None, saving: _Saving
) -> Iterator[tuple[str, str]]:
    """Yields (override, its cost), the cheapest first.

    Args:
      composition: the run on its mesh.
      target: the hardware.
      short: bytes to save; None if unknown.
      saving: computes the bytes that an override saves.
    """

    def best(overrides: Sequence[str]) -> str | None:
        """Chooses the first override that is enough, or else the one that saves most."""
        if short is not None:
            for override in overrides:
                if saving(override) >= short:
                    return override
        return max(overrides, key=saving, default=None)

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
            "same losses; two more gathers of activations in each layer",
        )
    yield from _smaller_parts(composition, best)
    yield from _stronger_remat(run, sizes["pipeline"] > 1)
    for cost in costs_of(run):
        yield from cost.edits
    yield from _split_sequences(composition, best)
    for axis in reversed(axes.TABLE):  # axes that split least of the program first
        overrides = [
            f"mesh.{axis.name}={n} mesh.fsdp=-1 mesh.data=1"
            for n in (2, 4, 8, 16)
            if sizes[axis.name] < n <= axis.advised_up_to
        ]
        override = best(overrides)
        if override:
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
        moved = 2 * saving("offload.optimizer=true")
        seconds = memory.transfer_s(moved, target.chip)
        rate = memory.host_rate(target.chip) / 1e9
        yield (
            "offload.optimizer=true",
            f"same losses; moments stay on the host: {seconds:.2f} s a step to move them and back at {rate:g} GB/s",
        )
    if not run.offload.parameters and not offload_obstacle(run.optimizer):
        yield (
            "offload.optimizer=true offload.parameters=true",
            f"same losses in float32, gradients rounded to {run.precision.compute}; parameters and moments stay "
            f"on the host",
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


def _smaller_parts(
    composition: Composition, best: _Choose
) -> Iterator[tuple[str, str]]:
    """Yields more microbatches or accumulation steps, so that each is smaller."""
    microbatches = composition.microbatches
    batch = composition.config.batch
    parts = batch.accumulation
    shards = composition.total_microbatches * composition.shape.batch_shards
    factors = axes.divisors(batch.global_size // shards)[1:]
    if microbatches > 1:
        override = best([f"pipeline.microbatches={microbatches * n}" for n in factors])
        if override:
            yield override, "same losses, less bubble; smaller matmuls"
        return
    override = best([f"batch.accumulation={parts * n}" for n in factors])
    if override:
        factor = int(override.partition("=")[2]) // parts
        yield (
            override,
            f"same losses; weights are gathered {factor} x as often, matmuls are smaller",
        )


def _split_sequences(
    composition: Composition, best: _Choose
) -> Iterator[tuple[str, str]]:
    """Yields a larger `mesh.context` if each device already has one sequence at a time.

    A device with several sequences needs only more parts.
    """
    run = composition.config
    shape = composition.shape
    parts = run.batch.accumulation
    size = shape.sizes[axes.CONTEXT]
    has_one_sequence = run.batch.global_size == parts * shape.batch_shards
    if composition.microbatches > 1 or not has_one_sequence:
        return
    overrides = [
        f"mesh.context={n} mesh.fsdp=-1 mesh.data=1 batch.accumulation={parts * n // size}"
        for n in on_target.context_sizes(run, shape.num_devices)
        if n > size and n % size == 0
    ]
    override = best(overrides)
    if override:
        yield (
            override,
            "same losses; attention sends queries, keys and values in every layer, so within fast links only",
        )


def _stronger_remat(run: RunConfig, staged: bool) -> Iterator[tuple[str, str]]:
    """Yields policies that recompute more.

    Args:
      run: the config.
      staged: whether the run has a pipeline, whose policy is `pipeline.remat`.
    """
    if staged:
        if run.pipeline.remat not in ("full", "layers"):
            yield "pipeline.remat=full", "same losses; layers run a third time"
        return
    if run.remat.policy == "none":
        yield (
            "remat.policy=dots",
            "same losses; little besides element-wise work runs twice",
        )
    if run.remat.policy not in ("full", "layers"):
        yield (
            "remat.policy=full",
            "same losses; up to +33 % compute, as the forward pass runs twice",
        )


def _combined(edits: Sequence[Edit], short: int, saving: _Saving) -> list[Edit]:
    """Combines edits in their order until they are enough; [] if they never are.

    Args:
      edits: edits that are not enough alone.
      short: bytes to save.
      saving: computes the bytes that an override saves.
    """
    combined: dict[str, str] = {}
    best = 0
    notes = list[str]()
    for edit in edits:
        words = dict(word.split("=", 1) for word in edit.override.split())
        if not words or combined.keys() & words.keys():
            continue
        pairs = (combined | words).items()
        override = " ".join(f"{name}={value}" for name, value in pairs)
        saves = saving(override)
        if saves <= best:
            continue
        combined |= words
        best = saves
        notes += edit.cost_note.split("; ")
        if best >= short:
            cost = "; ".join(dict.fromkeys(notes))
            return [Edit(override, saves_bytes=best, cost_note=cost, enough=True)]
    return []


def _larger_targets(target: Target) -> Iterator[Target]:
    """Yields hardware of the family with one dim doubled, the smallest step first."""
    dims = [*target.shape]
    order: Sequence[int] = ()
    if target.platform == "gpu":
        order = (1, 0)  # more GPUs per host, then more hosts
    elif target.chip:
        order = sorted(range(len(dims)), key=dims.__getitem__)
    if target.num_slices > 1:
        dims.append(target.num_slices)
    for dim in order:
        doubled = [*dims]
        doubled[dim] *= 2
        with contextlib.suppress(ConfigError):
            yield targets.parse(target.with_shape(doubled))
