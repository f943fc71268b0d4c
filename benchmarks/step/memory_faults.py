"""Puts a run that saves in memory through planned faults, and checks each recovery.

    python benchmarks/step/memory_faults.py plan
    python benchmarks/step/memory_faults.py quiet --folder F --steps 3000
    python benchmarks/step/memory_faults.py run --folder F
    python benchmarks/step/memory_faults.py summary --folder F \
        --out benchmarks/results/memory-faults.json
    python benchmarks/step/memory_faults.py flat --folder F \
        --out benchmarks/results/memory-flat.json

`plan` writes `memory_faults_plan.json`: the mix, drawn with a seed, with the source that
each fault must come back from. `quiet` trains the same run without any fault, and
records the SHA-256 of every step's state. `run` carries out the plan: four processes,
each with a folder of its own, which is a small tmpfs. It continues where it was stopped.

A recovery counts if the restored step and its source are those that were written down,
if the state of every step on every process has the bits of the quiet run, and if the
run has told of exactly the damage that was done.

The step that a restore should find is computed from the files that are left, by code
that shares only the reader of headers with jaxdist.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from memory_faults_driver import PACE_S, Driver
from memory_faults_plan import (
    EXTRA,
    HOSTS,
    MIX,
    PLAN,
    SEED,
    draw,
    read_plan,
    write_plan,
)
from memory_faults_run import SETTINGS, Campaign, read_states, rows_of

from jaxdist.telemetry.metrics import read_rows

COMMANDS = ("plan", "quiet", "run", "summary", "flat")


def quiet(folder: Path, steps: int) -> None:
    """Trains without faults up to a step, and continues if it has fewer."""
    run = Campaign(folder, "quiet")
    run.start(memory="", FAULTS_STOP_AT=str(steps))
    assert run.agent is not None
    code = run.agent.wait()
    states = read_states(run.folder)
    print(f"exit code {code}, {[max(each) for each in states]} steps")
    assert all(max(each) == steps for each in states)


def flat(folder: Path, saves: int, out: Path | None) -> None:
    """Records the memory of the workers over so many saves in memory, and without."""
    import measuring

    sides: dict[str, Any] = {}
    for side, memory in (("memory", folder / "flat-tier"), ("control", None)):
        run = Campaign(folder, f"flat-{side}")
        run.start(
            memory=f"{memory}/$JAXDIST_PROCESS_ID" if memory else "",
            # the first of each, at step 1000, takes 25 to 65 MB for good
            changes={"health.compare_every": 0, "health.probe_every": 0},
            FAULTS_PACE_S=str(PACE_S),
            FAULTS_RSS_EVERY="40",
            FAULTS_STOP_AT=str(2 * saves + 2),
        )
        assert run.agent is not None
        code = run.agent.wait()
        rows = [
            {
                row["step"] // 2: row["kib"]
                for row in rows_of(lines.path)
                if row["kind"] == "memory"
            }
            for lines in run.states
        ]
        good = [event["ok"] for event in run.event("memory_save", 0)]
        sides[side] = {
            "exit_code": code,
            "saves": sum(good),
            "saves_that_were_skipped": len(good) - sum(good),
            "copies_that_failed": len(run.event("memory_copy_failed", 0)),
            "resident_kib": rows,  # of each process: {steps / 2: KiB}
            "growth_from_100": [
                round(mine[max(mine)] / mine[100] - 1, 4) for mine in rows
            ],
            "kib_per_save_from_100": [
                round((mine[max(mine)] - mine[100]) / (max(mine) - 100), 2)
                for mine in rows
            ],
        }
        shown = {k: v for k, v in sides[side].items() if k != "resident_kib"}
        print(side, shown, flush=True)
    record = measuring.record_head(sys.argv[1:]) | {"processes": HOSTS, **sides}
    measuring.write(str(out) if out else None, record)


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    if flags.command == "plan":
        write_plan(PLAN)
    elif flags.command == "quiet":
        quiet(flags.folder, flags.steps)
    elif flags.command == "flat":
        flat(flags.folder, flags.saves, flags.out)
    elif flags.command == "run":
        plan = draw(SEED, EXTRA) if flags.extra else read_plan(PLAN)
        if flags.pilot:
            kinds: Counter[str] = Counter()
            first = []
            for fault in plan:
                kinds[fault.kind] += 1
                if kinds[fault.kind] <= flags.pilot:
                    first.append(fault)
            plan = first
        if flags.only:
            plan = [fault for fault in plan if flags.only in fault.kind]
        record = "extra.jsonl" if flags.extra else "record.jsonl"
        Driver(flags.folder, record).go(plan, flags.budget_s, again=flags.again)
    else:
        summary(flags.folder, flags.out)


def summary(folder: Path, out: Path | None) -> None:
    """Summarizes the record of a campaign."""
    import measuring

    tries = rows_of(folder / "record.jsonl")
    rows = list({row["number"]: row for row in tries}.values())  # the last tries
    kinds: dict[str, Any] = {}
    for kind, (count, source) in MIX.items():
        mine = [row for row in rows if row["kind"] == kind]
        good = [row for row in mine if row["ok"]]
        kinds[kind] = {
            "planned": count,
            "source": source,
            "done": len(mine),
            "recovered": len(good),
            "seconds": {
                name: round(value, 1)
                for name, value in measuring.quartiles(
                    [row["seconds"] for row in good]
                ).items()
            }
            if good
            else None,
        }
    losses = _compare_losses(folder)
    states = _compare_states(folder)
    extra = rows_of(folder / "extra.jsonl")
    record = measuring.record_head(sys.argv[1:]) | {
        "seed": SEED,
        "processes": HOSTS,
        "settings": SETTINGS,
        "faults": len(rows),
        "recovered": sum(row["ok"] for row in rows),
        "states_compared": states[0],
        "states_that_differ": states[1],
        "losses_compared": losses[0],
        "losses_that_differ": losses[1],
        "steps": max((row["step"] for row in rows), default=0),
        "kinds": kinds,
        "faults_beyond_the_plan": {
            kind: {
                "source": source,
                "done": sum(row["kind"] == kind for row in extra),
                "recovered": sum(row["kind"] == kind and row["ok"] for row in extra),
            }
            for kind, (_, source) in EXTRA.items()
        },
        "tries_that_failed": [row["number"] for row in tries if not row["ok"]],
    }
    print(json.dumps(record, indent=1))
    measuring.write(str(out) if out else None, record)
    if out:
        text = "".join(json.dumps(row) + "\n" for row in [*tries, *extra])
        out.with_suffix(".jsonl").write_text(text)


def _compare_states(folder: Path) -> tuple[int, int]:
    """Compares all states with those of the quiet run: their number, and that differ."""
    true = read_states(folder / "quiet")
    count = differ = 0
    for rank, states in enumerate(true):
        for row in rows_of(folder / "campaign/states" / f"{rank}.jsonl"):
            count += 1
            differ += row["sha"] != states.get(row["step"])
    return count, differ


def _compare_losses(folder: Path) -> tuple[int, int]:
    """Compares the losses of both runs: number of rows, and of those that differ."""
    true = {row["step"]: row["loss"] for row in read_rows(folder / "quiet/run").train}
    count = differ = 0
    path = folder / "campaign/run/metrics.jsonl"
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "loss" in row:
                count += 1
                differ += row["loss"] != true.get(row["step"])
    return count, differ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/memory-faults"))
    parser.add_argument("--steps", type=int, default=3000, help="steps of `quiet`")
    parser.add_argument("--saves", type=int, default=500, help="saves of `flat`")
    parser.add_argument("--pilot", type=int, default=0, help="faults of each kind")
    parser.add_argument("--only", default="", help="kinds that contain this text")
    parser.add_argument(
        "--again", action="store_true", help="repeat the faults that failed"
    )
    parser.add_argument(
        "--extra", action="store_true", help="faults that are not in the plan"
    )
    parser.add_argument("--budget-s", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, help="JSON file of `summary`")
    return parser


if __name__ == "__main__":
    main()
