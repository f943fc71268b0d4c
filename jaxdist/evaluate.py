"""`python -m jaxdist.evaluate --workdir W`: the exact loss of a checkpoint on the held-out text."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import jax

from jaxdist import command_line, inference
from jaxdist.checkpoint.folder import EXIT_NO_CHECKPOINT
from jaxdist.inference import HeldOut

_LINE_EVERY_S = 10.0  # between two lines of progress, where there is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    run = inference.opened(flags)
    if run is None:
        return EXIT_NO_CHECKPOINT
    lead = jax.process_index() == 0
    found = run.evaluate(validation_tokens=flags.validation_tokens, watch=_Progress() if lead else None)
    if lead:
        print(_as_json(found) if flags.json else _as_text(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = inference.CommandFlags("evaluate", __doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--validation-tokens", type=int,
        help="score so many targets, 0 = all (default: the run's data.validation_tokens)",
    )  # fmt: skip
    return parser


def _as_json(found: HeldOut) -> str:
    """Returns the result as strict JSON: what is infinite or not a number is null."""
    values = found._asdict().items()
    finite = {n: None if v is None or not math.isfinite(v) else v for n, v in values}
    return json.dumps(finite)


def _as_text(found: HeldOut) -> str:
    bits = "unknown" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
    return (
        f"step {found.step}: loss {found.loss:.6f} nats per token over {found.tokens} tokens, "
        f"perplexity {found.perplexity:.4f}, bits per byte {bits}"
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
    command_line.main_with_config_errors(main)
