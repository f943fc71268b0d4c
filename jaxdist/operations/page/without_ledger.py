"""Where the wall time of a run without a ledger went, from its rows and events: older
versions wrote none.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from jaxdist.operations.ledger import run_lives
from jaxdist.telemetry.metrics import Row

# events; the last of them says how a life went
ENDS = ("start", "stop", "preempted", "peer_lost", "hang")


def is_failure(stop: Row) -> bool:
    """Returns whether an event `stop` is of a run that could not go on."""
    return "error" in stop or stop.get("reason") == "nonfinite"


def account_of_records(
    rows: Sequence[Row], events: Sequence[Row], *, log_every: int
) -> run_lives.Account:
    """Returns the account of a run without a ledger, from its rows and events in the
    order of their files.

    Steps by the rows' `step_time_s`; what has no name is `other`. What passed between a
    run's end and its extension is no part of it.
    """
    signs = sorted(
        record["time"]
        for record in (*events, *rows)
        if run_lives.is_time(record.get("time"))
    )
    wall_s = signs[-1] - signs[0] if signs else 0.0
    starts = [
        bisect.bisect_left(signs, event["time"])
        for event in events
        if event["event"] == "start"
    ]
    gaps = {at: signs[at] - signs[at - 1] for at in set(starts) if at}
    extended = {bisect.bisect_left(signs, time) for time in _extensions(events)}
    idle_s = sum(seconds for at, seconds in gaps.items() if at in extended)
    wall_s -= idle_s
    down_s = sum(gaps.values()) - idle_s
    spent: dict[int, float] = {}  # by step: of the last row that tells of it
    all_s, before = 0.0, 0
    for row in rows:
        seconds, step = row.get("step_time_s"), row["step"]
        first = before if before < step else max(0, step - log_every)
        if run_lives.is_time(seconds):
            all_s += seconds * (step - first)
            if step <= before:  # the run has gone back
                spent = {end: s for end, s in spent.items() if end <= first}
            spent[step] = seconds * (step - first)
        before = step
    step_s, room = sum(spent.values()), max(0.0, wall_s - down_s)
    scale = min(1.0, room / all_s) if all_s else 0.0
    known = {
        run_lives.DOWN: wall_s - room,
        run_lives.LOST: scale * (all_s - step_s),
        run_lives.STEP: scale * step_s,
    }
    return run_lives.Account(known | {run_lives.OTHER: wall_s - sum(known.values())})


def _extensions(events: Sequence[Row]) -> Iterator[float]:
    """Yields when a run began anew that had been done: nobody waited for it."""
    ends = [event for event in events if event["event"] in ENDS]
    for before, event in itertools.pairwise(ends):
        if (
            event["event"] == "start"
            and before["event"] == "stop"
            and not is_failure(before)
        ):
            yield event["time"]
