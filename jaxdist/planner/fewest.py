"""The search for the smallest machine of a family that a run fits.

Arithmetic ranks sizes and ZeRO stages, and the compiler checks the best. The global
batch, the numerics, and the axes other than data and fsdp stay the same. If a size
cannot hold the batch at once, the batch is split into accumulation steps. If it cannot
hold a sequence, the sequence is split as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from jaxdist.config import ConfigError
from jaxdist.hardware import chips
from jaxdist.parallel.axes import divisors
from jaxdist.planner import memory, on_target, targets
from jaxdist.planner.compiler import CompileOptions, Say
from jaxdist.planner.document import CANNOT_TELL, DOES_NOT_FIT, FITS, Plan
from jaxdist.planner.plan import make_plan
from jaxdist.planner.show import new_table, print_lines
from jaxdist.planner.state import held_bytes
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn, until_one_fits
from jaxdist.telemetry.units import GIB
from jaxdist.trainer import compose
from jaxdist.trainer.run_config import RunConfig

MOST_CHIPS = 16_384  # chips of the largest size
MOST_SIZES = 3  # most sizes to compile for
BEYOND = 1  # sizes in the table after the first that fits
_ZEROS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Row:
    """A size of the machine with a ZeRO stage."""

    run: RunConfig  # the config with the least accumulation that fits, or else the most
    target: Target
    zero: int
    peak_bytes: int  # peak by arithmetic
    state_bytes: int  # part of the peak that does not depend on the batch
    capacity_bytes: int
    plan: Plan | None = None  # the compiled plan

    @property
    def fits(self) -> bool | None:
        """True if it fits: by the compiler if it was compiled, else by arithmetic."""
        return self.plan.fits if self.plan else self.peak_bytes <= self.capacity_bytes

    @property
    def may_fit(self) -> bool:
        """Whether it fits by arithmetic, or exceeds the capacity a little."""
        return memory.may_fit(self.peak_bytes, self.capacity_bytes)

    def overrides(self) -> list[str]:
        """Lists the row's overrides, `a.b=value`."""
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
        """Converts the row to JSON."""
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
    """A table of sizes, and the first row that compiles."""

    rows: Sequence[Row]
    illegal: Mapping[str, str]  # illegal sizes, with the reason
    best: Row | None

    @property
    def exit_code(self) -> int:
        """The exit code of `plan --fewest`."""
        if self.best:
            return FITS
        if any(row.fits is not False for row in self.rows):
            return CANNOT_TELL
        return DOES_NOT_FIT

    def to_json(self) -> dict[str, Any]:
        """Converts the table to JSON."""
        return {
            "best": self.best and self.best.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "illegal": dict(self.illegal),
        }


def fewest(
    run: RunConfig,
    family: str,
    *,
    options: CompileOptions | None = None,
    say: Say = lambda line: None,
) -> Fewest:
    """Finds the smallest size of a family that a run fits.

    The table ends `BEYOND` sizes after the first that fits.

    Args:
      run: the config.
      family: such as h100 or h100@25GB/s.
      options: compiler flags and limits.
      say: called with each stage of the work.

    Raises:
      ConfigError: there is no such family, or the run is legal on none of its sizes.
      MissingExtra: the family's compiler is not installed.
    """
    rows = list[Row]()
    illegal = dict[str, str]()
    compiled_sizes = 0
    beyond = 0  # sizes after the last that was compiled
    best: Row | None = None

    def compile(row: Row) -> Row:
        plan = make_plan(row.run, row.target, options=options, say=say)
        return replace(row, plan=plan)

    for target in sizes(family):
        try:
            stages = list(_rows(run, target))
        except ConfigError as error:
            illegal[target.text] = error.faults[0]
            continue
        fits = any(row.fits for row in stages)
        verdict = "fits" if fits else "too small"
        say(f"{target.text}: {verdict} by arithmetic")
        if best is None and compiled_sizes < MOST_SIZES:
            compiled = compile_in_turn(until_one_fits(_to_compile(stages)), compile)
            by_zero = {row.zero: row for row in compiled}
            stages = [by_zero.get(row.zero, row) for row in stages]
            best = next((row for row in compiled if row.fits), None)
            if compiled and fits:
                compiled_sizes += 1
        rows += stages
        if best or compiled_sizes == MOST_SIZES:
            beyond += 1
        if beyond > BEYOND:
            break
    if not rows:
        raise ConfigError(
            f"--fewest={family}: {next(iter(illegal.values()), 'there are no sizes')}"
        )
    return Fewest(rows, illegal, best)


def _to_compile(stages: Sequence[Row]) -> list[Row]:
    """Lists the rows of a size to compile: that with least work, then the smallest.

    Only rows that fit by arithmetic are compiled. If none does, that is the smallest
    one, if the arithmetic may be too high.
    """
    fit = [row for row in stages if row.fits]
    if not fit:
        nearest = min(stages, key=lambda row: row.peak_bytes)
        return [nearest] if nearest.may_fit else []
    # Each part gathers the weights again, so fewer parts count more than a lower ZeRO
    # stage.
    least_work = min(fit, key=lambda row: (row.run.batch.accumulation, row.zero))
    smallest = min(fit, key=lambda row: row.peak_bytes)
    if smallest == least_work:
        return [least_work]
    return [least_work, smallest]


def sizes(family: str) -> Iterator[Target]:
    """Yields the targets of a family that are sold, the smallest first.

    Args:
      family: the family, which may name a network as in h100@25GB/s.

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
    for shape in _slices(chip) if chip.torus_dims else _hosts(chip):
        text = f"{name}:{'x'.join(map(str, shape))}{at}{network}"
        try:
            yield targets.parse(text)
        except ConfigError as error:
            if at or chip.network_bytes_per_s:
                reason = error.faults[0].removeprefix(f"--on={text}:")
                raise ConfigError(f"--fewest={family}:{reason}") from error
            return  # larger sizes need a network


def _hosts(chip: chips.Chip) -> Iterator[tuple[int, ...]]:
    """Yields (hosts, GPUs per host) in powers of two."""
    most = chip.chips_per_host
    below = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most]
    yield from ((1, n) for n in [*below, most])
    yield from ((2**n, most) for n in range(1, 15) if 2**n * most <= MOST_CHIPS)


def _slices(chip: chips.Chip) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of slices, the smallest first.

    If slices are not built from cubes, several of the largest slice follow.
    """
    yield from chip.slices
    dims = [4, 4, 4]
    while chip.max_slice_chips and chip.legal_slice(tuple(dims)):
        yield tuple(dims)
        dims[dims.count(min(dims)) - 1] *= 2  # 4x4x4, 4x4x8, 4x8x8, 8x8x8 ...
    if not chip.max_slice_chips:
        yield from ((*chip.slices[-1], n) for n in (2, 4, 8, 16))


def _rows(run: RunConfig, target: Target) -> Iterator[Row]:
    """Yields a row for each ZeRO stage; a single device has only stage 0.

    Raises:
      ConfigError: no stage is legal.
    """
    error = ConfigError(f"{target.text}: no layout")
    found = False
    for zero in _ZEROS if target.num_devices > 1 else (0,):
        if zero:  # fsdp stays within a slice
            mesh = {
                "mesh.data": target.num_slices,
                "mesh.fsdp": -1,
                "mesh.zero": zero,
            }
        else:
            mesh = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.zero": 3}
        try:
            yield _best_context(compose.with_overrides(run, mesh), target, zero)
            found = True
        except ConfigError as refusal:
            error = refusal
    if not found:
        raise error


def _best_context(run: RunConfig, target: Target, zero: int) -> Row:
    """Finds the row with the fewest devices per sequence that fits by arithmetic.

    If none fits, it is the smallest row.

    Raises:
      ConfigError: no size of the axis `context` is legal.
    """
    rows = list[Row]()
    error = ConfigError(f"{target.text}: no layout")
    configured = max(run.mesh.context, 1)
    for size in on_target.context_sizes(run, target.num_devices):
        if size < configured:
            continue
        try:
            split = compose.with_overrides(run, {"mesh.context": size})
            row = _row(split, target, zero, proposed=size > configured)
        except ConfigError as refusal:
            # There may be too few sequences for the devices; a larger size may be
            # legal.
            if size == configured:
                error = refusal
            continue
        rows.append(row)
        # Splitting further means fewer activations but more state, because fewer
        # devices remain for fsdp.
        if row.fits or row.state_bytes > row.capacity_bytes:
            break
    if not rows:
        raise error
    return min(rows, key=lambda row: (not row.fits, row.peak_bytes))


def _row(run: RunConfig, target: Target, zero: int, *, proposed: bool = False) -> Row:
    """Finds the row with the least accumulation that fits by arithmetic.

    If none fits, it is the smallest row.

    Args:
      run: the config with its mesh.
      target: the hardware.
      zero: the ZeRO stage.
      proposed: whether this search chose the mesh, which then must keep exchanges in
        each layer within fast links.

    Raises:
      ConfigError: the mesh is illegal, or it crosses slow links.
    """
    most = target.usable_bytes or 0
    best: Row | None = None
    run = compose.with_overrides(run, {"batch.accumulation": 1})
    composition = on_target.validate_for(run, target)
    shape = composition.shape
    slow = next(on_target.slow_axes(target, shape), None)
    if proposed and slow:
        raise ConfigError(f"{target.text}: {slow}")
    for parts in divisors(run.batch.global_size // shape.batch_shards):
        tried = compose.with_overrides(run, {"batch.accumulation": parts})
        components = memory.components(replace(composition, config=tried), target)
        peak = memory.accounted_peak(components)
        state = held_bytes(components)
        if best is None or peak < best.peak_bytes:
            best = Row(
                run=tried,
                target=target,
                zero=zero,
                peak_bytes=peak,
                state_bytes=state,
                capacity_bytes=most,
            )
        # Accumulation does not make the state smaller.
        if peak <= most or state > most or tried.mesh.pipeline > 1:
            break
    assert best is not None
    return best


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints the JSON of a `Fewest` as a table."""
    table = new_table(
        "size",
        ">chips",
        ">ZeRO",
        ">accumulation",
        ">arithmetic\nGiB",
        ">compiled\nGiB",
        "",
    )
    table.columns[0].no_wrap = True  # a size is a value of --on
    verdicts = {True: "fits", False: "does not fit", None: "cannot tell"}
    for row in found["rows"]:
        compiled = row["compiled_bytes"]
        verdict = verdicts[row["fits"]]
        if row["fits"] and not compiled:
            verdict += " by arithmetic"
        table.add_row(
            row["target"],
            str(row["chips"]),
            str(row["zero"]),
            str(row["accumulation"]),
            f"{row['arithmetic_bytes'] / GIB:.1f}",
            f"{compiled / GIB:.1f}" if compiled else "",
            verdict,
        )
    console.print(table, highlight=False)
    illegal = found["illegal"].items()
    best = found["best"]
    if best:
        words = " ".join(f"--config.{word}" for word in best["overrides"])
        line = f"the smallest: --on {best['target']} {words}"
    elif any(row["fits"] is not False for row in found["rows"]):
        line = "no size is known to fit: the compiler accepted none of those compiled; plan a larger one with --on"
    else:
        line = (
            "no size fits; more accumulation, remat.policy=full or another family may"
        )
    refused = (f"{size}: not legal: {reason}" for size, reason in illegal)
    print_lines(console, [*refused, line + "\n"])
