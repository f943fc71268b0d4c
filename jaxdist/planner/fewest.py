"""The smallest machine of a family that a run fits: sizes and ZeRO stages by
arithmetic, the best compiled.

The global batch and the numerics stay; the axes other than data and fsdp, too. Where a
size does not hold the batch at once, it is cut into accumulation steps, and where it
does not hold a sequence, that is split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from jaxdist.config import ConfigError
from jaxdist.hardware import chips
from jaxdist.parallel.axes import divisors
from jaxdist.planner import layouts, memory, targets
from jaxdist.planner.document import CANNOT_TELL, DOES_NOT_FIT, FITS, Plan
from jaxdist.planner.plan import make_plan
from jaxdist.planner.show import new_table, print_lines
from jaxdist.planner.state import held_bytes
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn, until_one_fits
from jaxdist.telemetry.units import GIB
from jaxdist.trainer import compose
from jaxdist.trainer.run_config import RunConfig

MOST_CHIPS = 16_384
MOST_SIZES = 3  # of which rows are compiled
BEYOND = 1  # sizes of the table after the first that fits
_ZEROS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Row:
    """A size and a ZeRO stage."""

    run: RunConfig  # with the least accumulation that fits, or else the most
    target: Target
    zero: int
    peak_bytes: int  # by arithmetic
    state_bytes: int  # of it, whatever the batch
    capacity_bytes: int
    plan: Plan | None = None  # compiled

    @property
    def fits(self) -> bool | None:
        """By the compiler where it was asked, else by arithmetic."""
        return self.plan.fits if self.plan else self.peak_bytes <= self.capacity_bytes

    def overrides(self) -> list[str]:
        """What it sets, as on the command line."""
        mesh = self.run.mesh
        words = [
            f"mesh.data={mesh.data}",
            f"mesh.fsdp={mesh.fsdp}",
            f"mesh.zero={mesh.zero}",
        ]
        if mesh.context > 1:
            words.append(f"mesh.context={mesh.context}")
        return [*words, f"batch.accumulation={self.run.batch.accumulation}"]

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.text,
            "chips": self.target.num_chips,
            "zero": self.zero,
            "accumulation": self.run.batch.accumulation,
            "arithmetic_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "compiled_bytes": self.plan and self.plan.peak_bytes,
            "step_s": self.plan and self.plan.time.step_s,
            "fits": self.fits,
            "overrides": self.overrides(),
        }


@dataclass(frozen=True)
class Fewest:
    """The table, and the first row that the compiler takes."""

    rows: Sequence[Row]
    illegal: Mapping[str, str]  # size -> why the run cannot be laid out there
    best: Row | None

    @property
    def exit_code(self) -> int:
        if self.best:
            return FITS
        if any(row.fits is not False for row in self.rows):
            return CANNOT_TELL
        return DOES_NOT_FIT

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self.best and self.best.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "illegal": dict(self.illegal),
        }


def fewest(
    run: RunConfig, family: str, *, say: Callable[[str], None] = lambda line: None
) -> Fewest:
    """Returns the sizes of a family, h100 or h100@25GB/s, up to one beyond the first
    that fits.

    Raises:
      ConfigError: no such family, or the run is legal on none of its sizes.
      MissingExtra: the family's compiler is not installed.
    """
    rows = list[Row]()
    illegal = dict[str, str]()
    tried = 0
    beyond = 0
    best: Row | None = None

    def compile(row: Row) -> Row:
        return replace(row, plan=make_plan(row.run, row.target, say=say))

    for target in sizes(family):
        try:
            stages = list(_rows(run, target))
        except ConfigError as error:
            illegal[target.text] = error.faults[0]
            continue
        verdict = "fits" if any(row.fits for row in stages) else "too small"
        say(f"{target.text}: {verdict} by arithmetic")
        if best is None and tried < MOST_SIZES:
            compiled = compile_in_turn(until_one_fits(_to_compile(stages)), compile)
            asked = {row.zero: row for row in compiled}
            stages = [asked.get(row.zero, row) for row in stages]
            best = next((row for row in compiled if row.fits), None)
            tried += bool(compiled)
        rows += stages
        beyond += bool(best) or tried == MOST_SIZES
        if beyond > BEYOND:
            break
    if not rows:
        raise ConfigError(
            f"--fewest={family}: {next(iter(illegal.values()), 'there are no sizes')}"
        )
    return Fewest(rows, illegal, best)


def _to_compile(stages: Sequence[Row]) -> list[Row]:
    """Returns of a size's rows that fit by arithmetic that with least work, then that
    with least memory.
    """
    fit = [row for row in stages if row.fits]
    # Weights are gathered once more for each part, so fewer parts come before a lower
    # ZeRO stage.
    by_work = sorted(fit, key=lambda row: (row.run.batch.accumulation, row.zero))
    chosen = [*by_work[:1], *sorted(fit, key=lambda row: row.peak_bytes)[:1]]
    return chosen[:1] if chosen[:1] == chosen[1:] else chosen


def sizes(family: str) -> Iterator[Target]:
    """Yields the targets of a family that are sold, the smallest first; `family` may
    name a network.

    Raises:
      ConfigError: there is no such family.
    """
    name, at, network = family.strip().partition("@")
    name = chips.FAMILY_ALIASES.get(name.lower(), name.lower())
    chip = chips.FAMILIES.get(name)
    if chip is None:
        known = ", ".join(chips.FAMILIES)
        raise ConfigError(
            f"--fewest={family}: must be a family of chips, {known}, as in --fewest h100"
        )
    texts = (
        "x".join(map(str, dims))
        for dims in (_slices(chip) if chip.torus_dims else _hosts(chip))
    )
    for text in (f"{name}:{dims}{at}{network}" for dims in texts):
        try:
            yield targets.parse(text)
        except ConfigError as error:
            if at or chip.network_bytes_per_s:
                raise ConfigError(
                    f"--fewest={family}:{error.faults[0].removeprefix(f'--on={text}:')}"
                ) from error
            return  # larger ones need a network


def _hosts(chip: chips.Chip) -> Iterator[tuple[int, int]]:
    """Yields (hosts, GPUs of each) in powers of two."""
    most = chip.chips_per_host
    inside = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most]
    yield from ((1, n) for n in [*inside, most])
    yield from ((2**n, most) for n in range(1, 15) if 2**n * most <= MOST_CHIPS)


def _slices(chip: chips.Chip) -> Iterator[tuple[int, ...]]:
    """Yields shapes of slices, then of several of the largest where those are not built
    from cubes.
    """
    yield from chip.slices
    dims = [4, 4, 4]
    while chip.max_slice_chips and chip.legal_slice(tuple(dims)):
        yield tuple(dims)
        dims[dims.count(min(dims)) - 1] *= 2  # 4x4x4, 4x4x8, 4x8x8, 8x8x8 ...
    if not chip.max_slice_chips:
        yield from ((*chip.slices[-1], n) for n in (2, 4, 8, 16))


def _rows(run: RunConfig, target: Target) -> Iterator[Row]:
    """Yields a row for each ZeRO stage that is another layout on this size.

    Raises:
      ConfigError: none is legal.
    """
    error = ConfigError(f"{target.text}: no layout")
    found = False
    for zero in _ZEROS if target.num_devices > 1 else (0,):
        if zero:  # fsdp within a slice
            mesh = {
                "mesh.data": target.num_slices,
                "mesh.fsdp": -1,
                "mesh.zero": zero,
            }
        else:
            mesh = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.zero": 3}
        try:
            yield _split(compose.with_overrides(run, mesh), target, zero)
            found = True
        except ConfigError as refusal:
            error = refusal
    if not found:
        raise error


def _split(run: RunConfig, target: Target, zero: int) -> Row:
    """Returns the row with the fewest devices to a sequence that fits by arithmetic, or
    else the smallest.

    Raises:
      ConfigError: none is legal.
    """
    rows = list[Row]()
    error = ConfigError(f"{target.text}: no layout")
    own = max(run.mesh.context, 1)
    for size in layouts.context_sizes(run, target.num_devices):
        if size < own:
            continue
        try:
            split = compose.with_overrides(run, {"mesh.context": size})
            rows.append(_row(split, target, zero, proposed=size > own))
        except ConfigError as refusal:
            # of too few sequences for so many devices, perhaps
            error = refusal if size == own else error
            continue
        # A split sequence has fewer activations, and more state, as fsdp has fewer
        # devices.
        if rows[-1].fits or rows[-1].state_bytes > rows[-1].capacity_bytes:
            break
    if not rows:
        raise error
    return min(rows, key=lambda row: (not row.fits, row.peak_bytes))


def _row(run: RunConfig, target: Target, zero: int, *, proposed: bool = False) -> Row:
    """Returns the row with the least accumulation that fits by arithmetic, or else with
    the most.

    Args:
      proposed: the mesh is not the config's, so its axes keep to fast links.
    """
    most = target.usable_bytes or 0
    best: Row | None = None
    run = compose.with_overrides(run, {"batch.accumulation": 1})
    composition = targets.validate_for(run, target)
    shape = composition.shape
    if proposed and (slow := next(layouts.slow_axes(target, shape), None)):
        raise ConfigError(f"{target.text}: {slow}")
    for parts in divisors(run.batch.global_size // shape.batch_shards):
        tried = compose.with_overrides(run, {"batch.accumulation": parts})
        components = memory.components(replace(composition, config=tried), target)
        peak = memory.accounted_peak(components)
        state = held_bytes(components)
        if best is None or peak < best.peak_bytes:
            best = Row(tried, target, zero, peak, state, most)
        # No accumulation makes the state smaller.
        if peak <= most or state > most or tried.mesh.pipeline > 1:
            break
    assert best is not None
    return best


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints the JSON of a `Fewest`."""
    table = new_table(
        "size",
        ">chips",
        ">ZeRO",
        ">accumulation",
        ">arithmetic GiB",
        ">compiled GiB",
        "",
    )
    for row in found["rows"]:
        asked = row["compiled_bytes"]
        verdict = {True: "fits", False: "does not fit", None: "cannot tell"}[
            row["fits"]
        ]
        if row["fits"] and not asked:
            verdict += " by arithmetic"
        table.add_row(
            row["target"],
            str(row["chips"]),
            str(row["zero"]),
            str(row["accumulation"]),
            f"{row['arithmetic_bytes'] / GIB:.1f}",
            f"{asked / GIB:.1f}" if asked else "",
            verdict,
        )
    console.print(table, highlight=False)
    illegal = found["illegal"].items()
    if best := found["best"]:
        words = " ".join(f"--config.{word}" for word in best["overrides"])
        line = f"the smallest: --on {best['target']} {words}"
    elif any(row["fits"] is not False for row in found["rows"]):
        line = "no size is known to fit: the compiler took none that was compiled; plan a larger one with --on"
    else:
        line = (
            "no size fits; more accumulation, remat.policy=full or another family may"
        )
    refused = (f"{size}: not legal: {reason}" for size, reason in illegal)
    print_lines(console, [*refused, line + "\n"])
