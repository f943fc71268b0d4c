"""Times how a start grows with the number of separate layers of a user's model.

    python benchmarks/step/layers.py --rounds 12 --out benchmarks/results/layers.json

The model is a list of N `nnx.Linear`. Two sides take turns, each in a process:

- `jaxdist`: `describe`, the shapes of the first state, and the trace and lowering of
  the program that makes it;
- `flax`: `nnx.eval_shape` of the model, and the trace and lowering of a jitted function
  that makes it. This is the least that a script with sharded parameters does.

`fit` is a whole `jaxdist.fit` of one step, with all compilations and no cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

SIDES = ("jaxdist", "flax", "fit")
COUNTS = (64, 128, 256)
WIDTH = 8


def main() -> None:
    """Runs the command."""
    if sys.argv[1:2] == ["--child"]:
        print(child(sys.argv[2], int(sys.argv[3])))
        return
    flags = _parser().parse_args()
    import measuring

    rounds = []
    for number in range(flags.rounds):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        found = {
            str(count): {side: start(side, count) for side in order} for count in COUNTS
        }
        rounds.append(found)
        print(f"round {number + 1}/{flags.rounds}: {found}", flush=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "rounds": rounds,
        "processor_s": {
            str(count): {
                side: measuring.quartiles([r[str(count)][side] for r in rounds])
                for side in SIDES
            }
            for count in COUNTS
        },
    }
    for count, sides in record["processor_s"].items():
        text = ", ".join(f"{k} {v['median']:.2f} s" for k, v in sides.items())
        print(f"{count} layers: {text}")
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="JSON file")
    return parser


def start(side: str, count: int) -> float:
    """Measures a side in a new process, in seconds of processor time."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    own = {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", side, str(count)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def child(side: str, count: int) -> float:
    """Makes the model and measures the processor time, without imports."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from jaxdist import library
    from jaxdist.protocols.model_spec import describe

    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(count)]
            self.layers = nnx.List(layers)

        def loss(self, batch: dict, key: jax.Array | None) -> jax.Array:
            x = batch["x"]
            for layer in self.layers:
                x = layer(x)
            return (x**2).mean()

    def build(rngs: nnx.Rngs) -> Layers:
        return Layers(rngs)

    key = jax.random.key(0)
    began = time.process_time()
    if side == "fit":
        data = {"x": np.ones((64, WIDTH), np.float32)}
        library.fit(build, optax.sgd(0.1), data, steps=1, batch_size=8)
    elif side == "jaxdist":
        spec = describe(build)
        jax.eval_shape(spec.init_params, key)
        jax.jit(lambda key: spec.init_params(key)).lower(key)
    else:
        nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        jax.jit(lambda key: nnx.state(build(nnx.Rngs(key)))).lower(key)
    return time.process_time() - began


if __name__ == "__main__":
    main()
