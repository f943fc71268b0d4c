"""Memory, step time and cost of a run on hardware that you name.

The run is compiled for that hardware, which need not be here. Nothing runs. Example:
`jaxdist plan --config NAME --on v5p:4x4x4`.

Exit codes: 0 if the run fits, 3 if it does not, 4 if the compiler did not answer, 78 if
the config or a flag is invalid.
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
from jaxdist.planner.answer import Question, compile_options
from jaxdist.storage import run_format
from jaxdist.trainer import cli, exit_code, provenance, reproduce, workdir
from jaxdist.trainer.run_config import RunConfig, keys_outside_step


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    flags, run = cli.parse(_parser(), arguments, weight_sources=interop.WEIGHT_SOURCES)
    if flags.fewest is not None:
        return _find_fewest(run, flags)
    if run.train.epochs and not flags.tokens:
        raise ConfigError(
            f"train.epochs={run.train.epochs:g}: a plan reads no data, so the number of "
            f"steps is unknown; give --tokens, or --config.train.steps"
        )
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
        limit_minutes=flags.limit,
    )
    console = Console(quiet=flags.json)
    if folder:
        # Before the compilers run, so that a folder that cannot be written costs
        # little.
        _make_workdir(folder)
    with _progress() as say:
        answer = question.answer(base=_config_words(arguments or sys.argv), say=say)
    assumptions = restarts.Assumptions(
        chip_hours_per_failure=flags.chip_hours_per_failure,
        host_storage_bytes_per_s=flags.host_storage * 1e9,
    )
    plan = replace(
        answer.plan,
        tokens=int(flags.tokens or answer.plan.tokens),
        price_per_chip_hour=flags.price_per_chip_hour,
        assumed=assumptions,
    )
    report = {
        **plan.to_json(),
        planned.OUTSIDE_STEP: keys_outside_step(),
        planned.DATE: datetime.now(UTC).isoformat(timespec="seconds"),
        reproduce.SOURCE: {"hash": provenance.source_hash(plan.run.model_class)},
        **answer.found_by,
    }
    answer.show(console)
    show.show(report, console)
    if folder:
        workdir.write_json(folder / planned.PLAN_FILE, report)
        workdir.write_text(folder / "plan.txt", show.as_text(report))
    if flags.json:
        print(json.dumps(run_format.marked(report), indent=1))
    return answer.exit_code


def _find_fewest(run: RunConfig, flags: argparse.Namespace) -> int:
    """Finds the smallest machine of a family that fits the run; returns the exit code.

    Raises:
      ConfigError: a flag is set that has no effect with --fewest.
    """
    excluded = {
        "--on": flags.on,
        "--search": flags.search,
        "--fix": flags.fix,
        "--workdir": flags.workdir,
        "--tokens": flags.tokens,
        "--expert-load": flags.expert_load > 1,
        "--calibration": flags.calibration,
        "--price-per-chip-hour": flags.price_per_chip_hour,
    }
    unused = [flag for flag, value in excluded.items() if value]
    if unused:
        raise ConfigError(
            f"--fewest chooses the machine itself and prints no plan. "
            f"Leave out {', '.join(unused)}."
        )
    run_in_workdir.leave_accelerators_alone()
    with _progress() as say:
        options = compile_options(flags.limit)
        found = fewest.fewest(run, flags.fewest, options=options, say=say)
    report = found.to_json()
    if flags.json:
        print(json.dumps(report, indent=1))
    else:
        fewest.show(report, Console())
    return found.exit_code


def _make_workdir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--workdir {folder}: {error.strerror}; give a folder that can be written"
        ) from error


def _config_words(words: Sequence[str]) -> str:
    """Selects the words of a command line that name the run's config and its overrides.

    The result reads `--config NAME --config.a.b=value`.
    """
    selected = []
    for previous, word in itertools.pairwise(["", *words]):
        is_value = previous.startswith("--config") and "=" not in previous
        if word.startswith("--config") or is_value:
            selected.append(word)
    return shlex.join(selected)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current stage on standard error.

    A terminal shows one line that changes. Elsewhere each stage is a line with the
    seconds since the start.
    """
    console = Console(stderr=True)
    start_s = time.monotonic()

    def print_stage(line: str) -> None:
        elapsed_s = time.monotonic() - start_s
        print(f"[{elapsed_s:5.1f} s] {line}", file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield print_stage
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
        value = float(text)
        if 0 < value < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} must be a positive number")


def _at_least_one(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 1 <= value < math.inf:
            return value
    raise argparse.ArgumentTypeError(
        f"{text} must be a number of at least 1: the largest load over the mean load"
    )


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("plan", __doc__)
    parser.add_argument(
        "--on",
        metavar="HARDWARE",
        help="hardware to plan for: v5p:4x4x4, v6e:16x16x2, h100:4x8@25GB/s, cpu:8 or "
        "here (default: the hardware of the run in --workdir if --config is absent; "
        "otherwise here)",
    )
    parser.add_argument(
        "--fewest",
        metavar="FAMILY",
        help="find the smallest machine of a family that fits the run; "
        "a family is h100, v5e or h100@25GB/s",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank other layouts of the run; takes minutes",
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="compile config changes until one makes the run fit; "
        "with remat.policy=fit, choose the remat policy",
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="MINUTES",
        help="most minutes of a compilation, and of a whole --search (default: "
        "30 and 18)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON on standard output"
    )
    parser.add_argument(
        "--expert-load",
        type=_at_least_one,
        default=1.0,
        metavar="SKEW",
        help="rows between the busiest pair of devices that share experts, over the "
        "mean of all pairs (default %(default)g = even)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="collective times measured by benchmarks/plan/collectives.py "
        "(default: datasheet rates)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        help="tokens to train on, such as 1e12; samples if the data are no tokens "
        "(default: those of the run's steps)",
    )
    parser.add_argument(
        "--price-per-chip-hour",
        type=_positive,
        help="price in any currency (default: no cost is printed)",
    )
    default = restarts.Assumptions()
    parser.add_argument(
        "--chip-hours-per-failure",
        type=_positive,
        default=default.chip_hours_per_failure,
        help="mean chip hours between failures, for the best interval between saves "
        "(default %(default)g: 16,384 H100 in 2024)",
    )
    parser.add_argument(
        "--host-storage",
        type=_positive,
        default=default.host_storage_bytes_per_s / 1e9,
        help="GB/s that one host reads from and writes to storage (default %(default)g)",
    )
    parser.add_argument(
        "--workdir",
        help="folder for plan.json and plan.txt; "
        "without --config, the run in this folder is planned",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
