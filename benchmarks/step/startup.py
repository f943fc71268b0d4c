"""Times a start, from the process to the first step, of jaxdist and by hand.

    python benchmarks/step/startup.py --shape quick --rounds 5 --out benchmarks/results/startup.json

Each start is a process. The two sides take turns, with the same model and token file.
`cold` has an empty compile cache, `warm` the cache that the cold start of the same side
wrote. All modules have bytecode, as after pip install. A start ends when the first row
of metrics is on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import measuring
import numpy as np

SHARED = Path(measuring.__file__).parent
POLL_S = 0.004
LIMIT_S = 600.0
SIDES = ("jaxdist", "handwritten")


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    if flags.child:
        handwritten_start(flags.shape, Path(flags.child))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, flags.shape)
        write_bytecode(folder)
        rounds = [one_round(folder, flags, number) for number in range(flags.rounds)]
    record = measuring.record_head(sys.argv[1:]) | {
        "shape": flags.shape,
        "rounds": rounds,
    }
    for kind in ("cold", "warm"):
        pairs = [
            [measuring.Timing(*r[kind][s]) for r in rounds]
            for s in ("jaxdist", "handwritten")
        ]
        record[kind] = {
            side: measuring.quartiles([t.wall_s for t in times])
            for side, times in zip(("jaxdist", "handwritten"), pairs, strict=True)
        } | {"ratio": measuring.ratios(*pairs)}
        for clock, found in record[kind]["ratio"].items():
            print(f"{kind}, {clock} time: {found['median']:.2f} x hand-written")
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def write_inputs(folder: Path, shape_name: str) -> None:
    """Writes the token file and jaxdist's config file."""
    script = f"""
import sys; sys.path.insert(0, {str(SHARED)!r})
import sides
from handwritten import SHAPES, Options
import jaxdist
from jaxdist.config import schema
run = sides.run_config(SHAPES[{shape_name!r}], Options())
flat = schema.flatten(schema.to_config_dict(run))
usual = schema.flatten(jaxdist.default_config())
print("\\n".join(f"    config.{{k}} = {{v!r}}" for k, v in flat.items() if usual.get(k) != v))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    lines = [
        "from jaxdist import default_config\n\n",
        "def get_config():\n    config = default_config()",
        done.stdout.rstrip(),
        f"    config.data.source, config.data.path = 'bin', {str(folder / 'tokens.bin')!r}",
        f"    config.data.cache_dir = {str(folder / 'data')!r}",
        "    config.train.steps = 1\n    config.train.eval_every = 0\n"
        "    config.checkpoint.every_steps = 0",
        "    config.checkpoint.save_at_end = False\n    return config\n",
    ]
    (folder / "start.py").write_text("\n".join(lines))
    np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint16).tofile(
        folder / "tokens.bin"
    )


def write_bytecode(folder: Path) -> None:
    """Imports what both sides import, so that no measured start compiles Python."""
    modules = "import jaxdist.train, handwritten"
    paths = {"PYTHONPATH": os.pathsep.join([str(SHARED), _environment()["PYTHONPATH"]])}
    environment = _environment() | _bytecode(folder) | paths
    subprocess.run([sys.executable, "-c", modules], check=True, env=environment)


def _bytecode(folder: Path) -> dict[str, str]:
    """Returns the variables that keep bytecode in the benchmark's folder."""
    return {
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def one_round(folder: Path, flags: argparse.Namespace, number: int) -> dict:
    """Returns {"cold": {side: (wall, processor)}, "warm": ...}; sides change places
    every round.
    """
    out: dict[str, dict] = {"cold": {}, "warm": {}}
    sides = SIDES if number % 2 == 0 else SIDES[::-1]
    for kind in ("cold", "warm"):
        for side in sides:
            place = folder / f"{side}{number}"
            out[kind][side] = start(
                side, place, place.with_name(place.name + kind), flags.shape
            )
    text = ", ".join(
        f"{kind} {side} {t.wall_s:.2f} s ({t.processor_s:.2f} cpu)"
        for kind, found in out.items()
        for side, t in found.items()
    )
    print(f"round {number + 1}/{flags.rounds}: {text}", flush=True)
    return out


def start(side: str, cache: Path, workdir: Path, shape: str) -> measuring.Timing:
    """Returns what it took until the first step was finished; the process is then
    ended.
    """
    folder = cache.parent
    if side == "jaxdist":
        config = ["--config", str(folder / "start.py"), "--workdir", str(workdir)]
        command = [sys.executable, "-m", "jaxdist.train", *config]
    else:
        command = [sys.executable, __file__, "--shape", shape, "--child", str(workdir)]
    environment = (
        _environment()
        | _bytecode(folder)
        | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }
    )
    began = time.perf_counter()
    with open(workdir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    metrics = workdir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
            process.kill()
            raise SystemExit(
                f"{side} ended early:\n{workdir.with_suffix('.log').read_text()}"
            )
        time.sleep(POLL_S)
    found = measuring.Timing(time.perf_counter() - began, processor_s(process.pid))
    process.wait()
    return found


def processor_s(pid: int) -> float:
    """Returns the processor time of a running process so far, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    root = str(measuring.ROOT)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def handwritten_start(shape_name: str, workdir: Path) -> None:
    """Trains one step as a plain script would, and writes its loss."""
    # this side must not pay for the imports of the other
    import handwritten
    import jax

    shape, options = handwritten.SHAPES[shape_name], handwritten.Options()
    tokens = np.memmap(workdir.parent / "tokens.bin", np.uint16, "r")
    rows = (
        tokens[: shape.batch * (shape.sequence + 1)]
        .reshape(shape.batch, -1)
        .astype(np.int32)
    )
    weights = np.ones((shape.batch, shape.sequence), np.float32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}
    state = jax.jit(handwritten.init, static_argnums=(0, 1))(shape, 0)
    train_step = handwritten.build_step(shape, options)
    state, metrics = train_step(state, jax.device_put(batch), np.float32(1e-3))
    row = json.dumps({"step": 1, "loss": metrics["loss"].item()})
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text(row + "\n")


if __name__ == "__main__":
    main()
