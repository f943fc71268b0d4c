"""The exact loss of a checkpoint on the run's held-out data.

With `--stride N` each document is scored by itself, in windows that move by N tokens.
With `--tasks NAME,NAME` the command prints the metrics of lm_eval tasks instead (extra
`eval`). Example: `jaxdist evaluate --workdir runs/quickstart`.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError, extras
from jaxdist.data.sources import npz
from jaxdist.evaluation import held_out_set, loading
from jaxdist.evaluation.trained_run import Watch
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.trainer import exit_code, workdir, workdir_parser
from jaxdist.trainer.held_out import HeldOut

# settings of a run that is trained for cross-entropy
_NEXT_TOKEN = ObjectiveConfig()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    flags = _parser().parse_args(arguments)
    _check(flags)
    if flags.tasks:
        results, text = _score_tasks(flags)
    else:
        results, text = _score_held_out(flags)
    if jax.process_index() == 0:
        print(_as_json(results) if flags.json else text)
    return 0


def _score_tasks(flags: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Scores the tasks of --tasks.

    Returns:
      The results as a JSON value, and as text.
    """
    harness = extras.load("jaxdist.evaluation.lm_eval")
    run = loading.load_run(**workdir_parser.run_options(flags), modules=False)
    metrics = harness.evaluate_tasks(
        run,
        flags.tasks.split(","),
        folder=flags.tasks_folder,
        limit=flags.limit,
        longest=flags.max_length,
        stride=flags.stride,
        watch=_show_progress(),
    )
    return {"step": int(run.state.step), "tasks": metrics}, _as_table(metrics)


def _score_held_out(flags: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Scores the run's held-out set, or the files of --data.

    Returns:
      The results as a JSON value, and as text.
    """
    options = workdir_parser.run_options(flags)
    if flags.stride is not None:  # check it before weights are read
        stored = workdir.read_config(
            flags.workdir, named=flags.target, trust_code=flags.trust_code
        )
        if flags.data:
            stored = held_out_set.on_files(stored, flags.data)
        held_out_set.check_stride(stored, flags.stride)
    run = loading.load_run(**options)
    watch = _show_progress()
    data: dict[str, Any] | str | None = flags.data
    if _has_arrays(flags):
        data, *_ = npz.read(flags.data, "--data")
    elif not data and run.config.data.source == "stdlib" and int(run.state.step) == 0:
        print(
            f"warning: {flags.workdir} was not trained and names no data, so this is the "
            "loss on Python's standard library. Score tasks with --tasks, or files with "
            "--data.",
            file=sys.stderr,
        )
    held_out = run.evaluate(
        data,
        validation_tokens=flags.validation_tokens,
        stride=flags.stride,
        watch=watch,
    )
    text = _as_text(held_out, run.config.objective)
    return held_out._asdict() | {"stride": flags.stride}, text


def _check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for flags that exclude each other, or are below 1."""
    counts = {
        "--limit": flags.limit,
        "--max-length": flags.max_length,
        "--stride": flags.stride,
    }
    faults = [
        f"{flag}={value}: must be >= 1"
        for flag, value in counts.items()
        if value is not None and value < 1
    ]
    task_flags = [flags.tasks_folder, flags.limit, flags.max_length]
    if not flags.tasks and task_flags != [None, None, None]:
        faults.append(
            "--tasks-folder, --limit and --max-length go with --tasks; name some"
        )
    if flags.data and flags.tasks:
        faults.append("--data does not go with --tasks; leave out one")
    if _has_arrays(flags) and flags.validation_tokens is not None:
        faults.append(
            "--data has arrays, which are scored as a whole; leave out "
            "--validation-tokens"
        )
    if flags.tasks and flags.validation_tokens is not None:
        faults.append("--validation-tokens does not go with --tasks; use --limit")
    if flags.stride is not None and _has_arrays(flags):
        faults.append(
            "--stride is for documents of tokens, and --data are arrays; leave out one"
        )
    if faults:
        raise ConfigError(faults)


def _has_arrays(flags: argparse.Namespace) -> bool:
    """Tests whether --data names a file of arrays, not files of documents."""
    return bool(flags.data) and flags.data.endswith(".npz")


def _parser() -> argparse.ArgumentParser:
    parser = workdir_parser.WorkdirParser("evaluate", __doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object on standard output")
    add(
        "--validation-tokens",
        type=int,
        metavar="N",
        help="number of targets to score; 0 = all (default: data.validation_tokens)",
    )
    add(
        "--stride",
        type=int,
        metavar="N",
        help="score each document by itself, in windows that move by N tokens "
        "(default: documents are packed as in training)",
    )
    add(
        "--data",
        metavar="FILES",
        help="files to score: documents as in data.path, in the run's data.format; or "
        "arrays, a FILE.npz written by numpy.savez "
        "(default: the run's held-out data; runs of jaxdist.fit have none)",
    )
    add(
        "--tasks",
        metavar="NAME,NAME",
        help="lm_eval tasks to score instead, e.g. python_lines, which is shipped",
    )
    add(
        "--tasks-folder",
        type=Path,
        metavar="FOLDER",
        help="folder with task files and their data (default: the shipped tasks)",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="largest number of documents of each task (default: all)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="longest window in tokens, with --tasks (default: the model's longest "
        "sequence, or the training length if it has no limit)",
    )
    return parser


def _as_json(result: Any) -> str:
    """Formats the result as strict JSON, with null for infinite values and NaN."""
    return json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None))


def _as_table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        (task, metric.removesuffix(",none"), f"{value:.4f}")
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _as_text(result: HeldOut, objective: ObjectiveConfig = _NEXT_TOKEN) -> str:
    """Describes the scores on a line.

    Args:
      result: the scores.
      objective: settings of the run's objective, which say what its loss is.
    """
    if objective.has_pairs:
        text = (
            f"step {result.step}: loss {result.loss:.6f} per pair "
            f"over {result.tokens} pairs"
        )
    elif objective.name == "distill":  # no cross-entropy, so no perplexity
        text = (
            f"step {result.step}: loss {result.loss:.6f} per target "
            f"over {result.tokens} targets"
        )
    else:
        text = f"step {result.step}: {_score_of_targets(result)}"
    for name, value in result.metrics.items():
        text += f", {name} {value:.6g}"
    if result.windows:
        text += f" ({result.windows} windows of {result.documents} documents)"
    return text


def _score_of_targets(result: HeldOut) -> str:
    assert result.perplexity is not None  # pairs are told apart before
    bits = "unknown"
    if result.bits_per_byte is not None:
        bits = f"{result.bits_per_byte:.4f}"
    return (
        f"loss {result.loss:.6f} nats per target over {result.tokens} targets, "
        f"perplexity {result.perplexity:.4f}, bits per byte {bits}"
    )


def _show_progress() -> Watch | None:
    """Makes a function that shows the number of finished batches on standard error.

    A terminal shows one line that changes. Elsewhere a line is printed every 10 s.

    Returns:
      The function, or None on processes other than 0.
    """
    if jax.process_index() > 0:
        return None
    shown_s = time.monotonic()

    def show(batch: int, total: int) -> None:
        nonlocal shown_s
        if sys.stderr.isatty():
            end = "\n" if batch == total else ""
            print(
                f"\revaluating: batch {batch} of {total}",
                end=end,
                file=sys.stderr,
                flush=True,
            )
        elif time.monotonic() - shown_s >= 10:
            shown_s = time.monotonic()
            print(f"evaluating: batch {batch} of {total}", file=sys.stderr)

    return show


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
