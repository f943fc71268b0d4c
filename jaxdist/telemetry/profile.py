"""A profile of a few training steps: jax's trace and a table of the ops that took the
time.

The trace (workdir/profile/plugins/profile/<time>/*.xplane.pb) opens in XProf,
TensorBoard or Perfetto; the table is written from jax's own reader, since XProf's op
tables are empty on CPU.
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
TABLE_ROWS = 40  # of top_ops.txt


@dataclass(frozen=True)
class OpTime:
    """Time of one op of the compiled program, summed over devices and profiled
    steps.
    """

    op: str  # name in the optimized HLO
    kind: str  # the name without its number: "dot", "all-gather", "fusion", ...
    seconds: float
    share: float  # of the time of all ops, 0 to 1
    count: int  # executions


class ProfileWindow:
    """Traces `num_steps` steps from `first_step` on, once; call `step` after every
    update.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        first_step: int,
        num_steps: int,
    ) -> None:
        """Does nothing yet.

        Args:
          workdir: folder of the run; writes workdir/profile.
          first_step: first profiled step, counted from 1; 0 = never.
          num_steps: profiled steps, >= 1.
        """
        self._folder = Path(workdir) / FOLDER
        self._begin = first_step - 1
        self._end = first_step - 1 + num_steps
        self._wanted = first_step > 0
        self._running = False

    def step(self, finished: int, outputs: object = None) -> list[OpTime] | None:
        """Starts or stops the trace when `finished` updates are done; returns the table
        at the end.

        Call it before the first step (with the restored step) and after every step.
        `outputs` (any pytree of arrays of the last step) is waited for at both borders,
        and only there, so that the trace holds exactly the wanted steps.
        """
        if self._running and finished >= self._end:
            jax.block_until_ready(outputs)
            return self.close()
        if self._wanted and self._begin <= finished < self._end:
            jax.block_until_ready(outputs)
            options = jax.profiler.ProfileOptions()
            # Python frames slow the steps and swell the trace
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._wanted = False
            self._running = True
        return None

    def close(self) -> list[OpTime] | None:
        """Stops a running trace and writes its table; returns it, or None if none was
        running.
        """
        if not self._running:
            return None
        self._running = False
        jax.profiler.stop_trace()
        ops = top_ops(self._folder)
        _write_table(self._folder, ops)
        return ops


def top_ops(folder: Path) -> list[OpTime]:
    """Lists the ops of the newest trace below `folder`, the longest first.

    Ops that only contain others (while, conditional, call) are left out, or time would
    count twice.
    """
    trace = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    seconds: dict[str, list[float]] = defaultdict(list)  # of each execution
    for op, nanoseconds in _op_events(trace):
        if _kind(op) not in ("while", "conditional", "call"):
            seconds[op].append(nanoseconds * 1e-9)
    total = sum(map(sum, seconds.values())) or 1.0
    ops = [
        OpTime(op, _kind(op), sum(s), sum(s) / total, len(s))
        for op, s in seconds.items()
    ]
    return sorted(ops, key=lambda op: -op.seconds)


def _write_table(folder: Path, ops: list[OpTime]) -> None:
    """Writes top_ops.json (all ops) and top_ops.txt (the first TABLE_ROWS) into
    `folder`.
    """
    (folder / "top_ops.json").write_text(
        json.dumps(run_format.marked({"ops": [asdict(op) for op in ops]}), indent=1)
        + "\n"
    )
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
    """Yields (op, nanoseconds) per executed op: CPU and GPU name it in `hlo_op`, TPU by
    line.
    """
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                op = dict(event.stats).get("hlo_op")
                if op is None and line.name == "XLA Ops":
                    op = event.name.split(" = ")[0].lstrip("%")
                if op:
                    yield str(op), event.duration_ns


def _kind(op: str) -> str:
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", op)
