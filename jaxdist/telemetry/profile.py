"""Profile of a few training steps: jax's trace, and a table of the slowest ops.

The trace (workdir/profile/plugins/profile/<time>/*.xplane.pb) opens in XProf,
TensorBoard or Perfetto. The table is made by jax's own reader, since XProf's tables of
ops are empty on CPU.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxdist.storage import run_format

FOLDER = "profile"
TABLE_ROWS = 40  # rows of top_ops.txt


@dataclass(frozen=True)
class OpTime:
    """Time of an op of the compiled program, on all devices in all profiled steps."""

    op: str  # name in the optimized HLO
    kind: str  # the name without its number: "dot", "all-gather", "fusion", ...
    seconds: float
    share: float  # share of the time of all ops, 0 to 1
    count: int  # number of executions


class ProfileWindow:
    """Trace of `num_steps` steps from `first_step` on, taken once."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        first_step: int,
        num_steps: int,
    ) -> None:
        """Begins no trace yet.

        Args:
          workdir: folder of the run; the trace goes to workdir/profile.
          first_step: first profiled step, counted from 1; 0 = never.
          num_steps: number of profiled steps, >= 1.
        """
        self._folder = Path(workdir) / FOLDER
        self._begin = first_step - 1
        self._end = first_step - 1 + num_steps
        self._is_due = first_step > 0
        self._is_running = False

    def step(self, finished: int, outputs: object = None) -> list[OpTime] | None:
        """Starts or stops the trace if it is time to do so.

        Call it before the first step (with the restored step) and after every step.

        Args:
          finished: number of finished updates.
          outputs: any pytree of arrays of the last step. At the start and the end of
            the trace the call waits for them, so that it has exactly the wanted steps.

        Returns:
          The table at the end of the trace, else None.
        """
        if self._is_running and finished >= self._end:
            jax.block_until_ready(outputs)
            return self.close()
        if self._is_due and self._begin <= finished < self._end:
            jax.block_until_ready(outputs)
            options = jax.profiler.ProfileOptions()
            # Python frames slow the steps down and enlarge the trace
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._is_due = False
            self._is_running = True
        return None

    def close(self) -> list[OpTime] | None:
        """Stops a running trace and writes its table.

        Returns:
          The table; None if no trace was running.
        """
        if not self._is_running:
            return None
        self._is_running = False
        jax.profiler.stop_trace()
        ops = top_ops(self._folder)
        _write_table(self._folder, ops)
        return ops


def top_ops(folder: Path) -> list[OpTime]:
    """Lists the ops of the newest trace below `folder`, the longest first.

    Ops that only contain others (while, conditional, call) are skipped: their time
    would count twice.
    """
    trace = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    seconds: dict[str, list[float]] = defaultdict(list)  # of each execution, by op
    for op, nanoseconds in _op_events(trace):
        if _kind(op) not in ("while", "conditional", "call"):
            seconds[op].append(nanoseconds * 1e-9)
    total = sum(map(sum, seconds.values())) or 1.0
    ops = [
        OpTime(
            op=op,
            kind=_kind(op),
            seconds=sum(times),
            share=sum(times) / total,
            count=len(times),
        )
        for op, times in seconds.items()
    ]
    return sorted(ops, key=lambda op: -op.seconds)


def _write_table(folder: Path, ops: list[OpTime]) -> None:
    """Writes top_ops.json (all ops) and top_ops.txt (the first TABLE_ROWS)."""
    document = run_format.marked({"ops": [asdict(op) for op in ops]})
    (folder / "top_ops.json").write_text(json.dumps(document, indent=1) + "\n")
    shown = ops[:TABLE_ROWS]
    width = max((len(op.op) for op in shown), default=2)
    lines = [f"{'op':<{width}}  {'share':>7}  {'ms':>10}  {'count':>7}  {'us each':>9}"]
    lines += [
        f"{op.op:<{width}}  {100 * op.share:6.2f}%  {1e3 * op.seconds:10.3f}  {op.count:7d}"
        f"  {1e6 * op.seconds / op.count:9.1f}"
        for op in shown
    ]
    (folder / "top_ops.txt").write_text("\n".join(lines) + "\n")


def _op_events(trace: Path) -> Iterator[tuple[str, float]]:
    """Yields (op, nanoseconds) for each executed op."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                op = dict(event.stats).get("hlo_op")  # set on CPU and GPU
                if op is None and line.name == "XLA Ops":  # a line on TPU
                    op = event.name.split(" = ")[0].lstrip("%")
                if op:
                    yield str(op), event.duration_ns


def _kind(op: str) -> str:
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", op)
