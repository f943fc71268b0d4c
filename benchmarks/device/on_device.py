"""Measures this machine's accelerator, item by item, and keeps each result.

    python benchmarks/device/on_device.py --out results/h200 --budget-minutes 9     # again, until nothing is left
    python benchmarks/device/on_device.py --out /tmp/tiny --tiny                    # every item, on any CPU

Each item is a process with a time limit, so an item that fails or runs out of memory
stops no other. `OUT/records.jsonl` gets a line per item: {"item", "status": done |
failed | cut, "seconds", "command", "record" | "reason"}. The next call skips items with
a line, except those that the budget cut short; `--retry` repeats failed ones. On a CPU
all items have tiny sizes, elsewhere real ones. `--list` shows them.

In a group of processes (`jaxdist launch`, Slurm, the workers of a TPU slice), start the
same command in each. Items for a whole group run then. The first process writes the
results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = "records.jsonl"
SPARE_S = 5.0  # of a budget, for this process itself
_TAIL = 25  # lines of a failed item's log that its record keeps
EXIT_CONFIG = 78


@dataclass(frozen=True)
class Item:
    """One measurement: a script and its arguments, at full size and tiny."""

    name: str
    script: str  # below benchmarks/
    full: str
    tiny: str
    # of the full item, compilation included: what of a budget it should have left
    usual_s: float
    # runs on all processes of a group; the others run on one process alone
    group: bool = False
    variables: tuple[tuple[str, str], ...] = ()  # of the environment

    @property
    def limit_s(self) -> float:
        """Returns after how long it is ended."""
        return 2.5 * self.usual_s + 60

    @property
    def measured(self) -> str:
        """Returns the item whose record it is compared with, or ""."""
        words = shlex.split(self.full)
        return words[words.index("--measured") + 1] if "--measured" in words else ""


_BF16 = "--dtype bfloat16 --loss-chunk 8192"
_SMALL = "--shape nano --sequence 64 --batch 4"
_TINY_STEP = f"{_SMALL} --rounds 2"
_FUSIONS = "--xla_gpu_enable_triton_gemm=false"
_1B, _3B = f"--shape 1b {_BF16}", f"--shape 3b {_BF16}"
_4K, _8K = "--sequence 4096", "--sequence 8192"
_ALONE = "--sides jaxdist --rounds 4"
# The shape 1b over more and more devices, 8 sequences on each; where there is one, it
# says so.
_SCALED = (
    "--config llama3_8b --config.model.num_layers=22 --config.model.d_model=2048 --config.model.d_ff=5632 "
    "--config.model.num_heads=16 --config.model.num_kv_heads=4 --config.model.vocab_size=32768 "
    "--config.batch.sequence_length=4096 --config.batch.global_size=8 --config.remat.policy=dots "
    "--mode weak --apart --rounds 4 --skip-one-device"
)
_SCALED_TINY = (
    "--config quickstart --config.model.num_layers=1 --config.batch.sequence_length=64 "
    "--config.batch.global_size=4 --config.optimizer.name=adamw --devices 2 --rounds 2 --skip-one-device"
)


def _step(
    name: str, full: str, tiny: str = "", usual_s: float = 90, **more: Any
) -> Item:
    return Item(
        name,
        "step/step.py",
        full,
        f"{_TINY_STEP} {tiny}".strip(),
        usual_s,
        group=True,
        **more,
    )


def _other(
    name: str, kind: str, full: str, tiny: str = "", usual_s: float = 60, **more: Any
) -> Item:
    return Item(
        name,
        "device/device_items.py",
        f"{kind} {full}",
        f"{kind} {_SMALL} {tiny}".strip(),
        usual_s,
        **more,
    )


ITEMS: tuple[Item, ...] = (
    _other("machine", "machine", "", usual_s=20),
    _step("step-1b-4096", f"{_1B} {_4K} --batch 8 --rounds 8", usual_s=130),
    _step(
        "step-3b-4096",
        f"{_3B} {_4K} --batch 4 --rounds 6 --apart",
        "--apart",
        usual_s=150,
    ),
    _step(
        "step-1b-8192",
        f"{_1B} {_8K} --batch 4 --rounds 8",
        "--dtype bfloat16",
        usual_s=130,
    ),
    _step(
        "step-3b-8192",
        f"{_3B} {_8K} --batch 2 --rounds 6 --apart",
        "--dtype bfloat16",
        usual_s=150,
    ),
    _step(
        "remat-1b-none",
        f"{_1B} {_4K} --batch 8 --remat none {_ALONE}",
        "--remat none --sides jaxdist",
    ),
    _step(
        "remat-1b-full",
        f"{_1B} {_4K} --batch 8 --remat full {_ALONE}",
        "--remat full --sides jaxdist",
    ),
    _step(
        "remat-1b-save",
        f"{_1B} {_4K} --batch 16 --remat save:query,key,value,attention_residuals,mlp_gate {_ALONE}",
        "--remat save:query,key,value,attention_residuals,mlp_gate --sides jaxdist",
    ),
    _step("batch-1b-16", f"{_1B} {_4K} --batch 16 {_ALONE}", "--sides jaxdist"),
    _step(
        "remat-3b-none",
        f"{_3B} {_4K} --batch 4 --remat none {_ALONE}",
        "--remat none --sides jaxdist",
    ),
    _other(
        "attention-1b-4096", "attention", f"{_1B} {_4K} --batch 8", "--dtype bfloat16"
    ),
    _other("attention-3b-8192", "attention", f"{_3B} {_8K} --batch 2"),
    Item(
        "loop-1b",
        "step/loop.py",
        f"{_1B} {_4K} --batch 8 --rounds 1 --steps 60 --log-every 5 --dispatches 0",
        "--shape nano --rounds 1 --steps 20 --log-every 2 --dispatches 5",
        usual_s=150,
        group=False,
    ),
    _other(
        "profile-1b-4096",
        "profile",
        f"{_1B} {_4K} --batch 8",
        usual_s=70,
        # else a trace names the groups that CUDA graphs make of the ops
        variables=(("XLA_FLAGS", "--xla_gpu_enable_command_buffer="),),
    ),
    _other(
        "plan-1b-4096",
        "plan",
        f"{_1B} {_4K} --batch 8 --measured step-1b-4096",
        "--measured step-1b-4096",
        usual_s=90,
    ),
    _other(
        "plan-3b-8192",
        "plan",
        f"{_3B} {_8K} --batch 2 --measured step-3b-8192",
        "--dtype bfloat16 --measured step-3b-8192",
        usual_s=90,
    ),
    _other("generate-1b", "generate", f"{_1B} --batch 8", "--prompt 8 --tokens 16"),
    _other(
        "huggingface-1b", "huggingface", f"{_1B} --sequence 2048 --batch 4", usual_s=90
    ),
    Item(
        "scaling-1b", "step/scaling.py", _SCALED, _SCALED_TINY, usual_s=400, group=True
    ),
    _other("tests", "tests", "", "--tests-on cpu", usual_s=240),
    _step(
        "flags-1b-no-triton",
        f"{_1B} {_4K} --batch 8 {_ALONE}",
        "--sides jaxdist",
        variables=(("XLA_FLAGS", _FUSIONS),),
    ),
    Item(
        "startup",
        "step/startup.py",
        "--shape quick --rounds 2",
        "--shape nano --rounds 1",
        usual_s=120,
    ),
)


def main() -> int:
    """Runs the command; returns its exit code: 0 where every item is done, 1 where one
    failed or is left.
    """
    flags = _parser().parse_args()
    faults = [
        *_name_faults(flags.items),
        *_budget_faults(flags.budget_minutes),
        *_missing(),
    ]
    if faults:
        return _refused(faults)
    sys.path.insert(0, str(ROOT))
    # what these need is installed: the check above says so
    from jaxdist.distributed.initialize import detect_launcher
    from jaxdist.hardware.flags import detect_platform
    from jaxdist.storage import lock

    tiny = flags.tiny or detect_platform(os.environ) == "cpu"
    chosen = [
        item for item in ITEMS if not flags.items or item.name in flags.items.split(",")
    ]
    if flags.list:
        for item in chosen:
            print(
                f"{item.name:20} {item.usual_s:4.0f} s  {shlex.join(command_of(item, tiny, flags.out)[1:])}"
            )
        return 0
    out, lead = Path(flags.out), True
    left = left_of(chosen, last_rows(out), tiny, flags.retry)
    if detect_launcher(os.environ):
        if flags.budget_minutes:
            text = "processes of a group would stop at different items; give --items instead"
            return _refused([f"--budget-minutes: {text}"])
        left, lead = _agreed(left)
        chosen = left
    # else the item would go on alone, on the accelerator
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if lead:
                stack.enter_context(lock.exclusive(out / "lock"))
        except (OSError, lock.Locked) as error:
            return _refused(
                [f"--out {out}: {error}; wait for it to end, or give another folder"]
            )
        measure(left, tiny, out, flags.budget_minutes, lead)
        rows = last_rows(out)
        if lead:
            print(_summary(out, chosen), flush=True)
    return int(lead and any(_status(item, rows, tiny) != "done" for item in chosen))


def measure(
    left: Sequence[Item],
    tiny: bool,
    out: Path,
    budget_minutes: float | None,
    lead: bool,
) -> None:
    """Runs items as long as the budget lasts, and keeps their rows."""
    ends = time.monotonic() + 60 * budget_minutes - SPARE_S if budget_minutes else None
    for item in left:
        seconds = (
            item.limit_s if ends is None else min(item.limit_s, ends - time.monotonic())
        )
        if seconds < min(item.limit_s, 10 if tiny else item.usual_s):
            print(
                f"{item.name}: not begun, {max(seconds, 0):.0f} s of the budget are left",
                flush=True,
            )
            continue  # a shorter one may still fit
        rows = last_rows(out)
        first = [
            other
            for other in left
            if other.name == item.measured and _is_left(other, rows, tiny)
        ]
        if first:
            print(
                f"{item.name}: not begun, it is compared with {item.measured}",
                flush=True,
            )
            continue
        row = run_item(item, tiny, out, seconds, lead)
        if lead:
            _keep(out, row)
        print(_line(row), flush=True)


def _refused(faults: Sequence[str]) -> int:
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="on_device", help="folder of the results")
    parser.add_argument(
        "--budget-minutes", type=float, help="begin nothing that would take longer"
    )
    parser.add_argument("--items", help="NAME,NAME: only these")
    parser.add_argument(
        "--retry", action="store_true", help="also items that failed before"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes; always so on CPU"
    )
    parser.add_argument(
        "--list", action="store_true", help="show the items and their commands"
    )
    return parser


# ---------------------------------------------------------------------- before anything


def _missing() -> Iterator[str]:
    """Yields a line for each package of the core, and pytest, that is not here or too
    old.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for need in [*project["dependencies"], "pytest>=8.4", "hypothesis>=6.130"]:
        name, _, least = need.partition(">=")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            module = name.replace("-", "_").replace(
                "orbax_checkpoint", "orbax.checkpoint"
            )
            if _importable(module):
                continue
            yield f"{name} is not installed: pip install '{need}'"
            continue
        if _numbers(version) < _numbers(least):
            yield f"{name} {version} is older than {least}: pip install '{need}'"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)[:3]]


def _name_faults(names: str | None) -> Iterator[str]:
    known = [item.name for item in ITEMS]
    for name in (names or "").split(","):
        if name and name not in known:
            yield f"--items {name}: no such item; there are {', '.join(known)}"


def _budget_faults(minutes: float | None) -> Iterator[str]:
    if minutes is not None and not 0 < minutes < math.inf:
        yield f"--budget-minutes {minutes:g}: must be above 0; without it there is no limit"


_AGREE = """
import json, sys, jax
from jaxdist.distributed import coordination, initialize
initialize.join_processes()
print("AGREED", jax.process_index(), json.dumps(coordination.broadcast(json.loads(sys.argv[1]))))
coordination.barrier(300)
"""


def _agreed(left: Sequence[Item]) -> tuple[list[Item], bool]:
    """Returns, in all processes of a group, the first one's items, and whether this is
    the first.
    """
    names = json.dumps([item.name for item in left if item.group])
    command = [sys.executable, "-c", _AGREE, names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"^AGREED (\d+) (.*)$", done.stdout, re.M)
    if found is None:
        raise SystemExit(
            f"the processes of the group did not meet:\n{done.stderr[-2000:]}"
        )
    return [item for item in ITEMS if item.name in json.loads(found[2])], found[
        1
    ] == "0"


# ----------------------------------------------------------------------------- one item


def command_of(item: Item, tiny: bool, out: Path | str) -> list[str]:
    """Returns an item's command, without where its record goes."""
    words = shlex.split(item.tiny if tiny else item.full)
    if "--measured" in words:
        words += ["--records", str(Path(out).resolve() / RECORDS)]
    return [sys.executable, f"benchmarks/{item.script}", *words]


def run_item(
    item: Item, tiny: bool, out: Path, seconds: float, lead: bool = True
) -> dict[str, Any]:
    """Returns the row of an item, which is ended after so many seconds."""
    began, log = time.monotonic(), out / "logs" / f"{item.name}.log"
    log.parent.mkdir(exist_ok=True)
    command = command_of(item, tiny, out)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        signals = _HeldSignals()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, "--out", str(file)],
                cwd=ROOT,
                env=_environment(item),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            signals.release()
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        took = time.monotonic() - began
        row = {
            "item": item.name,
            "tiny": tiny,
            "seconds": round(took, 1),
            "command": shlex.join(command[1:]),
        }
        if code == 0 and (file.is_file() or not lead):  # of a group, the first writes
            record = json.loads(file.read_text()) if file.is_file() else {}
            return row | {"status": "done", "record": record}
    if code is None:
        whole = seconds >= item.limit_s
        reason = f"took more than {seconds:.0f} s{'' if whole else ', all that the budget had left'}"
        return row | {
            "status": "failed" if whole else "cut",
            "reason": reason,
            "log": _tail(log),
        }
    return row | {"status": "failed", "reason": _reason(code, log), "log": _tail(log)}


class _HeldSignals:
    """Signals that end this program, held back until `release`.

    A signal between the start of an item and the `try` that ends it would leave the
    item alone on the accelerator.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._handlers = {
            number: signal.signal(number, self._hold)
            for number in (signal.SIGTERM, signal.SIGHUP)
        }

    def _hold(self, number: int, _: object) -> None:
        self._received.append(number)

    def release(self) -> None:
        """Restores the handlers, and calls them for what was held."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._received:
            signal.raise_signal(number)


def _environment(item: Item) -> dict[str, str]:
    """Returns the item's environment: programs compiled once serve the later items."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    cache = str(Path(tempfile.gettempdir()) / f"jaxdist-on-device-{os.getuid()}")
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    usual = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93",
    }
    added = {
        name: f"{os.environ.get(name, '')} {value}".strip()
        for name, value in item.variables
    }
    return usual | os.environ | own | added


def _end(child: subprocess.Popen) -> None:
    """Ends an item with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-_TAIL:]


def _reason(code: int, log: Path) -> str:
    """Returns why an item failed: the line of its log that says so best."""
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    memory = [
        line
        for line in lines
        if "RESOURCE_EXHAUSTED" in line or "Out of memory" in line
    ]
    faults = [
        line
        for line in lines
        if line.startswith("error: ") or re.match(r"[\w.]+(Error|Exit)\b", line)
    ]
    said = (memory[:1] or faults[-1:] or lines[-1:] or ["nothing"])[0]
    end = f"signal {-code}" if code < 0 else f"code {code}"
    return f"ended with {end}: {said[:400]}"


# -------------------------------------------------------------------------- the records


def last_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Returns the last row of each item; a torn line is none."""
    rows: dict[str, dict[str, Any]] = {}
    file = out / RECORDS
    for line in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows[row["item"]] = row
    return rows


def left_of(
    chosen: Sequence[Item], rows: Mapping[str, dict[str, Any]], tiny: bool, retry: bool
) -> list[Item]:
    """Returns what is left, what was begun before at the end: it may need more than any
    budget.
    """
    left = [item for item in chosen if _is_left(item, rows, tiny, retry)]
    return sorted(left, key=lambda item: _status(item, rows, tiny) != "left")


def _is_left(
    item: Item, rows: Mapping[str, dict[str, Any]], tiny: bool, retry: bool = False
) -> bool:
    return _status(item, rows, tiny) in ("left", "cut", *["failed"] * retry)


def _status(item: Item, rows: Mapping[str, dict[str, Any]], tiny: bool) -> str:
    """Returns how an item ended at full size or tiny; "left" where it was not begun."""
    row = rows.get(item.name, {})
    return row["status"] if row.get("tiny") == tiny else "left"


def _keep(out: Path, row: dict[str, Any]) -> None:
    """Appends a row by one write, on a line of its own after one that was torn."""
    file = out / RECORDS
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, ("\n" * torn + json.dumps(row) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(row: dict[str, Any]) -> str:
    head = f"{row['item']:20} {row['status']:6} {row['seconds']:6.0f} s  "
    if row["status"] != "done":
        return head + row["reason"]
    record = row["record"]
    return head + (record.get("summary") or "; ".join(_words(record)))


def _words(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a record of step.py, loop.py or startup.py says first."""
    for name, side in record.get("sides", {}).items():
        mfu = side["mfu_full"]
        share = (
            "MFU unknown"
            if mfu is None
            else f"MFU {mfu:.1%} full, {side['mfu_causal']:.1%} causal"
        )
        yield f"{name} {1e3 * side['step_s']['median']:.1f} ms, {side['tokens_per_s']:,.0f} tokens/s, {share}"
    if record.get("ratio"):
        yield f"ratio {record['ratio']['wall']['median']:.3f}"
    if "loop_over_bare" in record:
        mfu = ", ".join(
            f"{side} MFU {found['full']:.1%} full"
            for side, found in record["mfu"].items()
        )
        yield f"loop / bare {record['loop_over_bare']['median']:.4f}{f', {mfu}' if mfu else ''}"
    for kind in ("cold", "warm"):
        if kind in record:
            ours = record[kind]
            yield f"{kind} {ours['jaxdist']['median']:.1f} s, {ours['ratio']['wall']['median']:.2f} x by hand"


def _summary(out: Path, chosen: Sequence[Item]) -> str:
    """Returns a line for each of the chosen items; writes those of all that
    have a row.
    """
    rows = last_rows(out)
    lines = {
        i.name: _line(rows[i.name]) if i.name in rows else f"{i.name:20} left"
        for i in ITEMS
    }
    names = [i.name for i in chosen]
    text = "\n".join(
        line for name, line in lines.items() if name in rows or name in names
    )
    (out / "summary.txt").write_text(text + "\n")
    return "\n".join(lines[name] for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
