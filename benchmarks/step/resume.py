"""Times the parts of a start: cold, warm, and resumed after a kill.

    python benchmarks/step/resume.py --rounds 12 --out benchmarks/results/resume.json

Each start is a process of `jaxdist.train`. It ends when the first row of metrics is
written. `cold` has an empty compile cache, `warm` the cache of a cold start. `resumed`
continues a run that was killed after a save. All modules have bytecode, as after pip
install.

A part is a function of jaxdist that is called once in a start. Parts inside of others
are indented. The step compiles in a thread, so its parts run beside the others.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()  # the interpreter has started

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

LIMIT_S = 600.0
KINDS = ("cold", "warm", "resumed")
# part -> the module and the name of its function
PARTS = {
    "config": ("jaxdist.trainer.cli", "parse"),
    "check": ("jaxdist.trainer.validation", "validate"),
    "check: trace of the model": ("jaxdist.protocols.model_spec", "_trace"),
    "open workdir": ("jaxdist.trainer.opening", "open_workdir"),
    "open data": ("jaxdist.trainer.opening", "open_run_data"),
    "build the step": ("jaxdist.trainer.compose", "Composition.build_step"),
    "compile the step": ("jaxdist.trainer.step_work", "compile_step"),
    "compile the step: XLA, or reading its cache": (
        "jax._src.compiler",
        "compile_or_get_cached",
    ),
    "first state": ("jaxdist.trainer.initial_weights", "init_from_sources"),
    "restore": ("jaxdist.trainer.restore", "restore_checkpoint"),
    "compile and first state together": ("jaxdist.trainer.training", "init_or_restore"),
}


def main() -> None:
    """Runs the command."""
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(Path(sys.argv[2]), sys.argv[3:]))
    flags = _parser().parse_args()
    import measuring

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = folder / "saved"
        train_and_kill(folder, saved, flags.config)
        rounds = [one_round(folder, saved, flags.config) for _ in range(flags.rounds)]
    record = measuring.record_head(sys.argv[1:]) | {
        "config": flags.config,
        "rounds": rounds,
    }
    for kind in KINDS:
        starts = [found[kind] for found in rounds]
        record[kind] = {
            "wall_s": measuring.quartiles([start["wall_s"] for start in starts]),
            "processor_s": measuring.quartiles(
                [start["processor_s"] for start in starts]
            ),
            "parts": {
                part: measuring.quartiles(
                    [start["parts"].get(part, 0.0) for start in starts]
                )["median"]
                for part in starts[0]["parts"]
            },
        }
        print("\n".join(lines(kind, record[kind])))
    pairs = [(found["warm"], found["cold"]) for found in rounds]
    for clock in ("wall_s", "processor_s"):
        ratio = measuring.quartiles([warm[clock] / cold[clock] for warm, cold in pairs])
        record[f"warm_over_cold_{clock}"] = ratio
        print(f"warm / cold, {clock}: {ratio['median']:.2f}")
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file")
    return parser


def lines(kind: str, found: dict) -> list[str]:
    """Makes the table of a kind of start."""
    out = [
        f"{kind}: {found['wall_s']['median']:.2f} s, "
        f"{found['processor_s']['median']:.2f} s of processor time"
    ]
    for part, seconds in found["parts"].items():
        indent = "      " if ": " in part else "  "
        out.append(f"{indent}{seconds:7.3f} s  {part}")
    return out


def train_and_kill(folder: Path, saved: Path, config: str) -> None:
    """Trains until a checkpoint is complete, and kills the process."""
    process = subprocess.Popen(
        [*_train(config, saved), "--config.checkpoint.every_steps=5"],
        env=_environment(folder / "cache"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    began = time.monotonic()
    while not list(saved.glob("checkpoints/*/manifest.json")):
        if process.poll() is not None or time.monotonic() - began > LIMIT_S:
            process.kill()
            raise SystemExit("the run saved no checkpoint")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()


def one_round(folder: Path, saved: Path, config: str) -> dict[str, dict]:
    """Times a start of each kind."""
    found = {}
    cache = folder / "new cache"
    for kind in KINDS:
        workdir = folder / kind
        if kind == "resumed":
            shutil.copytree(saved, workdir)
        found[kind] = start(
            workdir, config, folder / "cache" if kind == "resumed" else cache
        )
        shutil.rmtree(workdir)
    shutil.rmtree(cache)
    text = ", ".join(
        f"{kind} {each['wall_s']:.2f} s ({each['processor_s']:.2f} cpu)"
        for kind, each in found.items()
    )
    print(text, flush=True)
    return found


def start(workdir: Path, config: str, cache: Path) -> dict[str, Any]:
    """Times a start in a process of its own."""
    report = workdir.with_name(f"{workdir.name}.json")
    command = [*_train(config, workdir), "--config.checkpoint.every_steps=5"]
    script = [sys.executable, __file__, "--child", str(report), *command[3:]]
    environment = _environment(cache)
    began = time.perf_counter()
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    wall_s = time.perf_counter() - began
    if not report.exists():
        raise SystemExit(f"a start failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(report.read_text())
    report.unlink()
    return {"wall_s": wall_s} | found


def _train(config: str, workdir: Path) -> list[str]:
    flags = ["--config", config, "--workdir", str(workdir)]
    return [sys.executable, "-m", "jaxdist.train", *flags, "--config.train.log_every=1"]


def _environment(cache: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    own = {
        "PYTHONPATH": path,
        "PYTHONPYCACHEPREFIX": str(cache.parent / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return os.environ | own


# --- in the process of a start ---------------------------------------------------------


def child(report: Path, arguments: list[str]) -> int:
    """Runs `train` until the first row, and writes how long each part took."""
    import jax  # noqa: F401

    after_jax = time.perf_counter()
    from jaxdist import train

    parts = {
        "interpreter": _age_s() - (time.perf_counter() - BEGAN),
        "import jax": after_jax - BEGAN,
        "import jaxdist": time.perf_counter() - after_jax,
    }
    for part, (module, name) in PARTS.items():
        watch(parts, part, module, name)
    from jaxdist.telemetry.metrics import MetricsWriter

    opened = time.perf_counter()

    def first_row(self: MetricsWriter, number: int, values: Any) -> None:
        parts["from the config to the first row"] = time.perf_counter() - opened
        found = {"processor_s": time.process_time(), "parts": parts}
        report.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # nothing of the run is needed any more

    MetricsWriter.write = first_row
    return int(train.main(arguments))


def watch(parts: dict[str, float], part: str, module: str, name: str) -> None:
    """Replaces a function by one that adds its seconds to a part."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    called: Callable[..., Any] = getattr(owner, last)

    @functools.wraps(called)
    def timed(*arguments: Any, **options: Any) -> Any:
        if "XLA" in part and threading.current_thread() is threading.main_thread():
            return called(*arguments, **options)  # the first state's program
        began = time.perf_counter()
        try:
            return called(*arguments, **options)
        finally:
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - began

    setattr(owner, last, timed)


def _age_s() -> float:
    """Reads the age of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


if __name__ == "__main__":
    main()
