"""`python -m jaxdist.evaluate --workdir W`: the exact loss of a checkpoint on the held-out text.

With `--tasks NAME,NAME`, the metrics of lm_eval's tasks instead (extra `eval`).
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError, extras
from jaxdist.evaluation import trained_run
from jaxdist.evaluation.trained_run import HeldOut
from jaxdist.trainer import cli

_LINE_EVERY_S = 10.0  # between two lines of progress, where there is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    _check(flags)
    harness = extras.load("jaxdist.evaluation.lm_eval", extra="eval") if flags.tasks else None
    run = trained_run.load_run(**cli.run_options(flags))
    lead = jax.process_index() == 0
    watch = _Progress() if lead else None
    if harness:
        metrics = harness.evaluate_tasks(
            run,
            flags.tasks.split(","),
            folder=flags.tasks_folder,
            limit=flags.limit,
            longest=flags.max_length,
            watch=watch,
            log=run.log,
        )
        results = {"step": int(run.state.step), "tasks": metrics}
        text = _as_json(results) if flags.json else _as_table(metrics)
    else:
        held = run.evaluate(validation_tokens=flags.validation_tokens, watch=watch)
        text = _as_json(held._asdict()) if flags.json else _as_text(held)
    if lead:
        print(text)
    return 0


def _check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not go together, before anything is loaded."""
    faults = [
        f"--{name.replace('_', '-')}={value}: must be >= 1"
        for name in ("limit", "max_length")
        if (value := getattr(flags, name)) is not None and value < 1
    ]
    task_flags = (flags.tasks_folder, flags.limit, flags.max_length)
    if not flags.tasks and any(flag is not None for flag in task_flags):
        faults.append("--tasks-folder, --limit and --max-length go with --tasks; name some")
    if flags.tasks and flags.validation_tokens is not None:
        faults.append("--validation-tokens does not go with --tasks; use --limit")
    if faults:
        raise ConfigError(faults)


def _parser() -> argparse.ArgumentParser:
    parser = cli.WorkdirParser("evaluate", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--validation-tokens",
        type=int,
        help="score so many targets, 0 = all (default: the run's data.validation_tokens)",
    )
    parser.add_argument("--tasks", help="NAME,NAME: tasks of lm_eval, e.g. python_lines, which is shipped")
    parser.add_argument("--tasks-folder", type=Path, help="of task files and their data (default: shipped)")
    parser.add_argument("--limit", type=int, help="documents of each task at most (default: all)")
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens read at once (default: the model's limit, else its training length)",
    )
    return parser


def _as_json(result: Any) -> str:
    """Returns the result as strict JSON: what is infinite or not a number is null."""
    return json.dumps(_finite(result))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        (task, metric.removesuffix(",none"), f"{value:.4f}")
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _as_text(result: HeldOut) -> str:
    bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    return (
        f"step {result.step}: loss {result.loss:.6f} nats per target over {result.tokens} targets, "
        f"perplexity {result.perplexity:.4f}, bits per byte {bits}"
    )


class _Progress:
    """Shows how many batches are under way: one changing line on a terminal, else some lines."""

    def __init__(self) -> None:
        self._shown_s = time.monotonic()

    def __call__(self, batch: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if batch == total else ""
            print(f"\revaluating: batch {batch} of {total}", end=end, file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = time.monotonic()
            print(f"evaluating: batch {batch} of {total}", file=sys.stderr)


if __name__ == "__main__":
    cli.exit_with_code(main)
