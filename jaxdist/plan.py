"""`python -m jaxdist.plan --config NAME --on v5p:4x4x4`: prove that a run fits hardware
that is not here.

Exit code 0: it fits; 3: it does not; 4: the compiler did not answer; 78: there is
nothing to compile.
"""

import argparse
import contextlib
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxdist import interop
from jaxdist.config import ConfigError
from jaxdist.operations.page import planned
from jaxdist.planner import fewest, restarts, run_in_workdir, show
from jaxdist.planner.answer import Question
from jaxdist.storage import run_format
from jaxdist.trainer import cli, exit_code, provenance, reproduce, workdir
from jaxdist.trainer.run_config import RunConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, run = cli.parse(_parser(), arguments, weight_sources=interop.WEIGHT_SOURCES)
    if flags.fewest is not None:
        return _fewest(run, flags)
    folder = Path(flags.workdir) if flags.workdir else None
    run, target = run_in_workdir.as_it_runs(run, flags.config, folder, flags.on)
    if flags.expert_load > 1 and not run.model.get("num_experts"):
        raise ConfigError(
            f"--expert-load={flags.expert_load:g}: the model has no experts; leave it out"
        )
    question = Question(
        run,
        target,
        search=flags.search,
        fix=flags.fix,
        expert_load=flags.expert_load,
        calibration_file=flags.calibration,
    )
    console = Console(quiet=flags.json, width=None if sys.stdout.isatty() else 120)
    if folder:
        _make(folder)
    with _progress() as say:
        answer = question.answer(base=_run_words(arguments or sys.argv), say=say)
    plan = replace(
        answer.plan,
        tokens=int(flags.tokens or answer.plan.tokens),
        price_per_chip_hour=flags.price_per_chip_hour,
        assumed=restarts.Assumptions(
            flags.chip_hours_per_failure, flags.host_storage * 1e9
        ),
    )
    report = {
        **plan.to_json(),
        planned.DATE: datetime.now(UTC).isoformat(timespec="seconds"),
        reproduce.SOURCE: {"hash": provenance.source_hash(plan.run.model_class)},
        **answer.found_by,
    }
    answer.show(console)
    show.show(report, console)
    if folder:
        workdir.write_json(folder / planned.PLAN_FILE, report)
        # what `report` shows
        workdir.write_text(folder / "plan.txt", show.as_text(report))
    if flags.json:
        print(json.dumps(run_format.marked(report), indent=1))
    return answer.exit_code


def _fewest(run: RunConfig, flags: argparse.Namespace) -> int:
    """Looks for the smallest machine of a family; returns the exit code."""
    others_given = (
        flags.search,
        flags.fix,
        flags.on,
        flags.workdir,
        flags.tokens,
        flags.expert_load > 1,
        flags.price_per_chip_hour,
        flags.calibration,
    )
    if any(others_given):
        others = (
            "--on, --search, --fix, --workdir, --tokens, --expert-load, --calibration"
        )
        others += " and --price-per-chip-hour"
        raise ConfigError(
            f"--fewest chooses the machine and says no more: leave out {others}"
        )
    run_in_workdir.leave_accelerators_alone()
    with _progress() as say:
        found = fewest.fewest(run, flags.fewest, say=say)
    report = found.to_json()
    if flags.json:
        print(json.dumps(report, indent=1))
    else:
        fewest.show(report, Console(width=None if sys.stdout.isatty() else 120))
    return found.exit_code


def _make(folder: Path) -> None:
    """Makes the workdir before the work, so that it fails early."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--workdir {folder}: {error.strerror}; give a folder that can be written"
        ) from error


def _run_words(words: Sequence[str]) -> str:
    """Returns what says which run it is: `--config NAME --config.a.b=value`."""
    flag = "--config"  # without "=", its value is the next word
    pairs = itertools.pairwise(["", *words])
    return shlex.join(
        w
        for v, w in pairs
        if w.startswith(flag) or (v.startswith(flag) and "=" not in v)
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives what shows each stage of the work on stderr: as it runs on a terminal, else
    a line each.
    """
    console = Console(stderr=True)
    began = time.monotonic()
    if not console.is_terminal:
        yield lambda line: print(
            f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True
        )
        return
    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda line: bar.update(task, description=line)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} must be a positive number")


def _at_least_one(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(
        f"{text} must be a number of at least 1: the most over the mean"
    )


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("plan", __doc__)
    on_help = "v5p:4x4x4, v6e:16x16x2, h100:4x8@25GB/s, cpu:8 or here (default: what the run of --workdir, given "
    parser.add_argument("--on", help=f"{on_help}without --config, is on; else here)")
    parser.add_argument(
        "--fewest",
        metavar="FAMILY",
        help="the smallest h100, v5e, h100@25GB/s that fits",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank other layouts of the run; some minutes",
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="compile the first edits that should make it fit; or resolve remat.policy=fit",
    )
    parser.add_argument(
        "--json", action="store_true", help="the plan as JSON on stdout"
    )
    parser.add_argument(
        "--expert-load",
        type=_at_least_one,
        default=1.0,
        metavar="SKEW",
        help="rows of the fullest pair of devices that share experts, over the mean (%(default)g: even)",
    )
    help_text = "times of collectives that benchmarks/collectives.py measured, instead of datasheet rates"
    parser.add_argument("--calibration", metavar="FILE", help=help_text)
    parser.add_argument(
        "--tokens", type=_positive, help="of the training, such as 1e12; or samples"
    )
    parser.add_argument("--price-per-chip-hour", type=_positive, help="in any money")
    default = restarts.Assumptions()
    parser.add_argument(
        "--chip-hours-per-failure",
        type=_positive,
        default=default.chip_hours_per_failure,
        help="of the machine; for the best interval between saves (%(default)g: 16,384 H100 in 2024)",
    )
    parser.add_argument(
        "--host-storage",
        type=_positive,
        default=default.host_storage_bytes_per_s / 1e9,
        help="GB/s that one host writes to storage and reads from it (%(default)g)",
    )
    workdir_help = "keep the plan there as plan.json and plan.txt; without --config plans the run in it"
    parser.add_argument("--workdir", help=workdir_help)
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
