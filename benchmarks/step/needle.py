"""Finds a needle in 4,096 tokens with a model that was trained at 512.

    JAX_PLATFORMS=cpu python benchmarks/step/needle.py --folder runs/needle --out benchmarks/results/needle.json

The model is then extended over mesh.context=8.

A haystack is words with codes such as `K47` among them. It ends with a question, `?K`.
Only the answers are learned.

1. A model of two layers learns this at 512 tokens on one device.
2. A run that starts from it (`init.from_run`), with scaled positions, learns it at
   4,096 tokens on eight emulated devices.
3. The first steps of that run are repeated on one device.
4. Both models answer new prompts, each with its code at one of eight depths.

Results in the folder are not computed again. All takes less than an hour of processor
time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring

import jaxdist
from jaxdist.telemetry.metrics import read_rows

SHORT, LONG, SHARDS, DEPTHS = 512, 4096, 8, 8
MOST_CODES = {SHORT: 20, LONG: 26}  # in a haystack; it has at least one
QUESTIONS = 20  # of an example: the more, the more is learned of it
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = [
    "apple",
    "bread",
    "chair",
    "cloud",
    "field",
    "glass",
    "green",
    "horse",
    "lemon",
    "light",
    "mouse",
    "music",
    "night",
    "ocean",
    "paper",
    "plant",
    "river",
    "sheep",
    "shirt",
    "smoke",
    "spoon",
    "stone",
    "storm",
    "sugar",
    "sword",
    "table",
    "tiger",
    "tower",
    "train",
    "uncle",
    "voice",
    "watch",
]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}
"""
MODEL = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.d_ff": 128,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_dim": 16,
    "model.layer_pattern": "local,global",
    "model.window": 8,
}
DATA = {
    "data.source": "jsonl",
    "data.format": "chat",
    "data.packing": "documents",
    "data.validation_tokens": 4000,
    "train.sample_tokens": 0,
    "train.eval_every": 0,
    "train.log_every": 1,
}


class Code(NamedTuple):
    """What can be asked for: a letter with two digits behind it."""

    name: str
    digits: str


def codes(rng: random.Random, count: int) -> list[Code]:
    """Returns so many codes with different names."""
    return [
        Code(name, f"{rng.randrange(100):02d}") for name in rng.sample(NAMES, count)
    ]


def haystack(
    rng: random.Random, length: int, needles: Sequence[Code], depths: Sequence[float]
) -> str:
    """Returns exactly `length` bytes of words, with each code at its depth: 0 is the
    begin, 1 the end.

    Args:
      depths: ascending, one of each code.
    """
    room, words = length - sum(len(name + digits) + 1 for name, digits in needles), []
    while room > len(WORDS[0]):
        words.append(rng.choice(WORDS))
        room -= len(words[-1]) + 1
    for code, depth in reversed(list(zip(needles, depths, strict=True))):
        words.insert(round(depth * len(words)), code.name + code.digits)
    return " ".join(words).ljust(length)


def example(rng: random.Random, length: int) -> dict[str, Any]:
    """Returns a chat of `length` bytes: a haystack, then questions and answers."""
    some = codes(rng, rng.randint(1, MOST_CODES[length]))
    asked = [rng.choice(some) for _ in range(QUESTIONS)]
    depths = sorted(rng.random() for _ in some)
    text = haystack(rng, length - QUESTIONS * len("?K47"), some, depths)
    messages = []
    for code in asked:
        messages.append({"role": "user", "content": f"{text}?{code.name}"})
        messages.append({"role": "assistant", "content": code.digits})
        text = ""
    return {"messages": messages}


def prompts(depth: float, count: int, seed: int) -> list[tuple[str, str]]:
    """Returns prompts of LONG bytes, less the answer, that ask for a code at `depth`,
    and its digits.
    """
    rng, found = random.Random(seed), []
    for _ in range(count):
        some = codes(rng, rng.randint(1, MOST_CODES[LONG]))
        depths = sorted([depth, *(rng.random() for _ in some[1:])])
        needle = some[depths.index(depth)]
        found.append(
            (
                haystack(rng, LONG - len("?K47"), some, depths) + f"?{needle.name}",
                needle.digits,
            )
        )
    return found


def write_data(folder: Path, rows: int, length: int) -> None:
    """Writes `{length}.jsonl`, so many examples, and the template of chats."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(length)
    lines = (json.dumps(example(rng, length)) + "\n" for _ in range(rows))
    (folder / f"{length}.jsonl").write_text("".join(lines))
    (folder / "needle.jinja").write_text(TEMPLATE)


def settings(folder: Path, flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what each run changes of configs/quickstart.py, by the run's name."""
    both = (
        MODEL
        | DATA
        | {
            "data.chat_template": folder / "needle.jinja",
            "data.cache_dir": folder / "cache",
        }
    )
    short = {
        "data.path": folder / f"{SHORT}.jsonl",
        "batch.sequence_length": SHORT,
        "train.steps": flags.short_steps,
    }
    steps = flags.long_steps
    long = {
        "data.path": folder / f"{LONG}.jsonl",
        "batch.sequence_length": LONG,
        "batch.global_size": 4,
        "init.from_run": folder / "short",
        "model.rope_scaling": "yarn",
        "model.rope_factor": LONG // SHORT,
        "model.rope_original_positions": SHORT,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 3e-4,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": steps // 6,
        "optimizer.decay_steps": steps,
    }
    split = {"train.steps": steps, "mesh.context": SHARDS, "mesh.data": 1}
    whole = {"train.steps": min(flags.compared_steps, steps)}
    return {
        "short": both | short,
        "long": both | long | split,
        "one_device": both | long | whole,
    }


def train(folder: Path, name: str, changes: dict[str, Any]) -> list[str]:
    """Trains a run in its own process, on as many emulated devices as it asks for;
    returns the command.
    """
    devices = changes.get("mesh.context", 1)
    pairs = [f"--config.{key}={value}" for key, value in changes.items()]
    command = [
        "-m",
        "jaxdist.train",
        "--config",
        "quickstart",
        "--workdir",
        str(folder / name),
        *pairs,
    ]
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
    }
    subprocess.run([sys.executable, *command], env=env, check=True)
    return ["python", *command]


def losses(folder: Path) -> list[float]:
    """Returns a run's training loss of each step, from the first."""
    return [row["loss"] for row in read_rows(folder).train]


def accuracy(folder: Path, per_depth: int) -> list[float]:
    """Returns the share of prompts that a run's model answers right, digit by digit, at
    each depth.
    """
    run = jaxdist.load_run(folder, devices=jax.devices()[:1])
    shares = []
    for number in range(DEPTHS):
        scores = run.score(
            prompts((number + 0.5) / DEPTHS, per_depth, number), longest=LONG
        )
        shares.append(sum(score.greedy for score in scores) / per_depth)
        print(
            f"{folder.name}: depth {(number + 0.5) / DEPTHS:.3f}: {shares[-1]:.3f} of {per_depth}",
            flush=True,
        )
    return shares


def processor_minutes() -> float:
    """Returns what this process and those that it has waited for have used."""
    used = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(x.ru_utime + x.ru_stime for x in used) / 60


class Phases:
    """Phases whose results and costs are kept in a folder, so that a second call goes
    on.
    """

    def __init__(self, folder: Path):
        self._file = folder / "phases.json"
        self.done: dict[str, Any] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Returns what the call returns, or has returned before; says what it cost."""
        if name not in self.done:
            before = processor_minutes()
            result = call()
            self.done[name] = {
                "result": result,
                "cpu_minutes": round(processor_minutes() - before, 2),
            }
            self._file.write_text(json.dumps(self.done))
        print(f"{name}: {self.done[name]['cpu_minutes']} CPU minutes", flush=True)
        return self.done[name]["result"]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of data and runs")
    parser.add_argument("--out", help="file of the record")
    parser.add_argument("--short-steps", type=int, default=900)
    parser.add_argument("--long-steps", type=int, default=60)
    parser.add_argument(
        "--compared-steps", type=int, default=60, help="also done on one device"
    )
    parser.add_argument(
        "--per-depth", type=int, default=16, help="prompts at each of the eight depths"
    )
    flags = parser.parse_args()
    folder = flags.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    phases, runs = Phases(folder), settings(folder, flags)
    phases.run(
        "data",
        lambda: [write_data(folder, 20000, SHORT), write_data(folder, 1500, LONG)],
    )
    commands = {n: phases.run(n, lambda n=n: train(folder, n, runs[n])) for n in runs}
    answered = {
        n: phases.run(f"{n} answers", lambda n=n: accuracy(folder / n, flags.per_depth))
        for n in ("short", "long")
    }
    ours, one = losses(folder / "long"), losses(folder / "one_device")
    apart = [abs(a - b) for a, b in zip(ours, one, strict=False)]
    minutes = {name: phase["cpu_minutes"] for name, phase in phases.done.items()}
    record = measuring.record_head(sys.argv[1:]) | {
        "commands": {
            n: " ".join(c).replace(f"{folder}/", "") for n, c in commands.items()
        },
        "depths": [(i + 0.5) / DEPTHS for i in range(DEPTHS)],
        "prompts_per_depth": flags.per_depth,
        "accuracy_before": answered["short"],
        "accuracy_after": answered["long"],
        "steps_compared": len(apart),
        "largest_loss_difference": max(apart),
        "losses": {"context 8": ours, "one device": one},
        "cpu_minutes": minutes | {"together": round(sum(minutes.values()), 1)},
    }
    print(
        {
            k: record[k]
            for k in (
                "accuracy_before",
                "accuracy_after",
                "largest_loss_difference",
                "cpu_minutes",
            )
        }
    )
    measuring.write(flags.out, record)


if __name__ == "__main__":
    main()
