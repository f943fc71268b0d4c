"""Records what the package does at one tree, and compares another tree with that.

    python benchmarks/house.py record all --tree TREE
    python benchmarks/house.py compare all --tree TREE
    python benchmarks/house.py compare programs --tree TREE --only pipeline
    python benchmarks/house.py pairs --before BEFORE --tree TREE --turns 12
    python benchmarks/house.py pairs --before BEFORE --tree TREE --command "jaxdist.plan --config quickstart"

A tree is a checkout; its package is run as commands (`python -m jaxdist.train`, `plan`,
...) with the tree as PYTHONPATH. `record` writes one JSON file a part below
`results/house/`, `compare` makes the same record of another tree and exits with 1 if
they differ. Where a difference is meant, `results/house/causes.json` names its cause as
{"part/case": "why"}: a program of other instructions needs one even if its FLOPs,
collectives and temporaries are the same, and so does a choice of the planner that is
another and no worse. Nothing else may be explained away.

The parts are described at their classes. `house_probe.py` is what runs inside a tree.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import os
import platform
import random
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEFORE_HOUSE = "349a9063606f7862a6ed6671025443a36691387d"
HERE = Path(__file__).resolve().parent
RECORDS = HERE / "results" / "house"
PROBE = HERE / "house_probe.py"
LIMIT_S = 1200.0  # of any one process
NEAR = 1e-3  # relative: what other instructions may do to a program's numbers
BYTES_NEAR = 0.05  # relative: what kept bytes may differ by
# Of a file of a run, and what follows after the package's own name in messages.
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"


# ------------------------------------------------------------------- running a tree


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    def check(self, what: str) -> Ended:
        """Gives itself; ends this program with the last lines if it has failed."""
        if self.code:
            tail = "\n".join((self.out + self.err).splitlines()[-25:])
            raise SystemExit(f"{what} ended with {self.code}:\n{tail}")
        return self


@dataclass
class Tree:
    """A checkout whose package is run, and the folder where it may write."""

    path: Path
    scratch: Path

    def environment(self, devices: int, **more: str) -> dict[str, str]:
        """Gives the variables under which a command of the tree runs.

        The home folder is in the scratch folder, so that no cache of this machine is
        read or written; compiled programs are not kept.
        """
        ours = ("JAX_", "JAXDIST_", "XLA_", "NPROC", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return kept | {
            "HOME": str(self.scratch / "home"),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(self.path),
            "PYTHONPYCACHEPREFIX": str(self.scratch / "bytecode"),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **more,
        }

    def run(
        self, words: Sequence[str], *, devices: int = 1, folder: Path | None = None
    ) -> Ended:
        """Runs Python with these words in a folder (scratch) and waits for its end."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder or self.scratch,
            env=self.environment(devices),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def command(
        self, text: str, *, devices: int = 1, folder: Path | None = None
    ) -> Ended:
        """Runs a command of the package, such as `plan --config quickstart`."""
        name, *words = shlex.split(text)
        module = ["-m", f"jaxdist.{name}"]
        return self.run([*module, *words], devices=devices, folder=folder)

    def probe(self, kind: str, text: str, *, devices: int = 1) -> dict[str, Any]:
        """Runs the probe in the tree and gives its record."""
        out = self.fresh("probe.json")
        words = [str(PROBE), kind, str(out), *shlex.split(text)]
        self.run(words, devices=devices).check(f"{kind} {text}")
        return json.loads(out.read_text())

    def fresh(self, name: str) -> Path:
        """Gives a path in the scratch folder where nothing is."""
        path = self.scratch / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

    def commit(self) -> str:
        """Gives the commit of the checkout, and -dirty if it was changed."""
        head = self.git("rev-parse", "HEAD")
        changed = self.git("status", "--porcelain", "--", "jaxdist", "configs")
        return f"{head}-dirty" if changed else head

    def git(self, *words: str) -> str:
        """Runs git in the checkout."""
        command = ["git", "-C", str(self.path), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def configs(self) -> list[str]:
        """Gives the shipped configs, those with a tiny size at that size.

        `finetune` is left out: it has no model without weights.
        """
        names = []
        for file in sorted((self.path / "configs").glob("[a-z]*.py")):
            if file.stem == "finetune":
                continue
            tiny = "get_config(size" in file.read_text()
            names.append(f"{file.stem}:tiny" if tiny else file.stem)
        return names

    def write_text(self) -> Path:
        """Writes the documents that runs of a record learn, the same on any machine."""
        path = self.scratch / "documents.jsonl"
        chance = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = []
        for _ in range(400):
            length = chance.randint(2, 9)
            words.append("".join(chance.choice(letters) for _ in range(length)))
        lines = []
        for _ in range(400):
            count = chance.randint(50, 500)
            chosen = (words[int(400 * chance.random() ** 2)] for _ in range(count))
            lines.append(json.dumps({"text": " ".join(chosen)}))
        path.write_text("\n".join(lines) + "\n")
        return path

    def usual(self, config: str) -> str:
        """Gives the overrides of every recorded run: short, quiet, and its own data."""
        keys = {
            "train.log_every": 1,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
            "checkpoint.every_steps": 0,
            "data.cache_dir": self.scratch / "cache",
        }
        if config.startswith("sft_lora"):
            keys |= {"init.from_run": ""}
        elif config.startswith("vit_"):
            pass
        else:
            keys |= {"data.source": "jsonl", "data.path": self.write_text()}
            keys |= {"data.validation_tokens": 1024}
        return as_flags(keys)


def as_flags(keys: Mapping[str, Any]) -> str:
    """Gives config keys as words of a command line."""
    return " ".join(shlex.quote(f"--config.{k}={v}") for k, v in keys.items())


@contextlib.contextmanager
def opened(path: str) -> Iterator[Tree]:
    """Gives a tree with a scratch folder that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        scratch = Path(folder)
        (scratch / "home").mkdir()
        yield Tree(Path(path).resolve(), scratch)


# ------------------------------------------------------------------- files of a run


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads the rows of training of a run."""
    lines = (workdir / METRICS_FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "loss" in row]


def run_facts(workdir: Path) -> dict[str, Any]:
    """Reads what a run says of its model: FLOPs per token, parameters, paths."""
    found = json.loads((workdir / RUN_FILE).read_text())
    paths = {}
    for row in found["sharding"]:
        dims = "x".join(map(str, row["dims"])) or "scalar"
        names = ",".join(name or "-" for name in row["names"])
        paths[row["parameter"]] = f"{dims} {names}".strip()
    return {
        "flops_per_token": found["flops_per_token"],
        "parameters": found["parameters"],
        "paths": paths,
    }


def plan_facts(ended: Ended) -> dict[str, Any]:
    """Reads the JSON that `plan --json` prints; {} where it printed none."""
    start = ended.out.find("{")
    return json.loads(ended.out[start:]) if start >= 0 else {}


def kept_bytes(components: Mapping[str, int]) -> int:
    """Sums what the planner says is kept for the backward pass."""
    return sum(size for name, size in components.items() if name.startswith("saved"))


# ------------------------------------------------------------------- differences


@dataclass
class Difference:
    """What differs in a case.

    `kind` is "fail", "explain" (it may be if causes.json says why) or "note".
    """

    kind: str
    text: str


Case = dict[str, Any]


def unequal(what: str, before: Any, after: Any, kind: str = "fail") -> list[Difference]:
    """Gives a difference if two values are not the same."""
    if before == after:
        return []
    return [Difference(kind, f"{what}: {shown(before)} before, {shown(after)} now")]


def far(
    what: str, before: float | None, after: float | None, tolerance: float
) -> list[Difference]:
    """Gives a difference if two numbers are not within a relative tolerance."""
    if before is None or after is None:
        return unequal(what, before, after)
    if abs(after - before) <= tolerance * abs(before):
        return []
    change = f" ({after / before - 1:+.2%})" if before else ""
    text = f"{what}: {before:,.10g} before, {after:,.10g} now{change}"
    return [Difference("fail", text)]


def shown(value: Any) -> str:
    """Gives a value as text, the middle left out if it is long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 200 else f"{text[:100]} ... {text[-90:]}"


class Part:
    """One file of the record: its cases, how one is recorded, how two are compared."""

    name = ""
    together = False  # whether all cases are recorded in one turn

    def cases(self, tree: Tree) -> list[str]:
        """Gives the names of the cases."""
        raise NotImplementedError

    def record(self, tree: Tree, case: str) -> Case:
        """Records one case of a tree."""
        raise NotImplementedError

    def record_all(self, tree: Tree, cases: Sequence[str]) -> dict[str, Case]:
        """Records cases one by one; says how long each took."""
        found: dict[str, Case] = {}
        for case in cases:
            began = time.monotonic()
            found[case] = self.record(tree, case)
            took = time.monotonic() - began
            print(f"{self.name}: {case}: {took:.1f} s", file=sys.stderr, flush=True)
        return found

    def compare(self, before: Case, after: Case) -> list[Difference]:
        """Compares a case of two trees."""
        raise NotImplementedError

    def compare_all(
        self, before: Mapping[str, Case], after: Mapping[str, Case]
    ) -> list[Difference]:
        """Compares what is told by all cases together."""
        return []


# ------------------------------------------------------------------- programs


def layout(config: str, **keys: Any) -> str:
    """Gives a config and its overrides; `mesh_fsdp=8` is the key mesh.fsdp."""
    named = {key.replace("_", ".", 1): value for key, value in keys.items()}
    return f"--config {config} {as_flags(named)}"


LAYOUTS = {
    "one device": layout("quickstart"),
    "fsdp 8": layout("quickstart", mesh_data=1, mesh_fsdp=8),
    "data 2 x fsdp 4": layout("gpt2_124m:tiny", mesh_data=2, mesh_fsdp=4),
    "tensor 2 x fsdp 4": layout(
        "llama3_8b:tiny", mesh_data=1, mesh_fsdp=4, mesh_tensor=2
    ),
    "pipeline 4 x fsdp 2": layout(
        "quickstart", mesh_data=1, mesh_pipeline=4, mesh_fsdp=2, batch_global_size=32
    ),
    "expert 4 x fsdp 2": layout(
        "mixtral_8x7b:tiny", mesh_data=1, mesh_expert=4, mesh_fsdp=2
    ),
    "context 2 x fsdp 4": layout(
        "llama3_8b:tiny", mesh_data=1, mesh_context=2, mesh_fsdp=4
    ),
    "data 2 x fsdp 2 x tensor 2, accumulation 2": layout(
        "quickstart",
        mesh_data=2,
        mesh_fsdp=2,
        mesh_tensor=2,
        batch_accumulation=2,
    ),
}


def devices_of(case: str) -> int:
    """Gives how many devices a layout is for."""
    return 1 if case == "one device" else 8


class Programs(Part):
    """The train step of eight layouts, compiled by `train` for emulated CPU devices.

    Of each: a digest of the optimized instructions without names and metadata, the
    number of each opcode, FLOPs (loops as often as they run), collectives by kind and
    size of their groups, and the compiler's memory. Equal if the digest is; else FLOPs,
    collectives and temporaries must be within 0.1 % and the cause be named.
    """

    name = "programs"

    def cases(self, tree: Tree) -> list[str]:
        return list(LAYOUTS)

    def record(self, tree: Tree, case: str) -> Case:
        words = LAYOUTS[case]
        config = words.split()[1]
        keys = {"train.steps": 1, "checkpoint.save_at_end": "false"}
        text = f"train --workdir {tree.fresh('run')} {tree.usual(config)} {words}"
        return tree.probe("step", f"{text} {as_flags(keys)}", devices=devices_of(case))

    def compare(self, before: Case, after: Case) -> list[Difference]:
        if before["digest"] == after["digest"]:
            return unequal("memory", before["memory"], after["memory"])
        found = []
        for key in ("hlo_flops", "jaxpr_flops"):
            found += far(key, before[key], after[key], NEAR)
        old_memory = before["memory"]["temp_bytes"]
        found += far("temp_bytes", old_memory, after["memory"]["temp_bytes"], NEAR)
        kinds = sorted({*before["collectives"], *after["collectives"]})
        none = {"bytes": 0, "count": 0}
        for kind in kinds:
            old = before["collectives"].get(kind, none)
            new = after["collectives"].get(kind, none)
            for key in ("count", "bytes"):
                found += far(f"{kind}, {key}", old[key], new[key], NEAR)
        opcodes = changed_counts(before["opcodes"], after["opcodes"])
        text = f"other instructions, numbers of opcodes {opcodes or 'the same'}"
        return [*found, Difference("explain", text)]


def changed_counts(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Gives the counts that changed, such as `add 678 to 680, dot 3 to 4`."""
    changed = []
    for name in sorted({*before, *after}):
        old = before.get(name, 0)
        new = after.get(name, 0)
        if old != new:
            changed.append(f"{name} {old} to {new}")
    return ", ".join(changed)


# ------------------------------------------------------------------- losses

LOSS_STEPS = 60
LOSSES = ("one device", "fsdp 8", "pipeline 4 x fsdp 2", "expert 4 x fsdp 2")


class Losses(Part):
    """Losses and gradient norms of 60 steps in float32, and a digest of the parameters.

    Compared by their bits; the parameters are those after the last step.
    """

    name = "losses"

    def cases(self, tree: Tree) -> list[str]:
        return list(LOSSES)

    def record(self, tree: Tree, case: str) -> Case:
        words = LAYOUTS[case]
        config = words.split()[1]
        devices = devices_of(case)
        keys = {"train.steps": LOSS_STEPS, "precision.compute": "float32"}
        workdir = tree.fresh("run")
        text = f"train --workdir {workdir} {tree.usual(config)} {words}"
        tree.command(f"{text} {as_flags(keys)}", devices=devices).check(case)
        rows = metrics(workdir)
        names = sorted({name for row in rows for name in row if name in CHECKED})
        names += sorted({n for row in rows for n in row if n.startswith("aux/")})
        record: Case = {name: [row[name] for row in rows] for name in names}
        record["steps"] = [row["step"] for row in rows]
        record["weights"] = tree.probe("weights", str(workdir), devices=devices)
        return record

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = unequal("steps", before["steps"], after["steps"])
        for name in sorted({*before, *after} - {"steps", "weights"}):
            old = before.get(name, [])
            new = after.get(name, [])
            for step, (x, y) in enumerate(zip(old, new, strict=False), start=1):
                if x != y:
                    found += unequal(f"{name}, first at step {step}", x, y)
                    break
            found += unequal(f"rows with {name}", len(old), len(new))
        return found + unequal("weights", before["weights"], after["weights"])


CHECKED = ("loss", "grad_norm", "learning_rate", "tokens_seen")


# ------------------------------------------------------------------- choices

FIT = "--config.remat.policy=fit --fix"
CHOICES = {
    "search 1": "--config llama3_8b:tiny --on v5e:2x4 --search",
    "search 2": "--config mixtral_8x7b:tiny --on v5p:2x2x1 --search",
    "search 3": "--config gpt2_124m:tiny --on v6e:2x2 --search",
    "search 4": "--config llama2_7b:tiny --on v5e:2x2 --search"
    " --config.batch.global_size=8192",
    "search 5": "--config quickstart --on v5e:2x2 --search"
    " --config.batch.global_size=64",
    "fewest 1": "--config llama3_8b:tiny --fewest v5e",
    "fewest 2": "--config gpt2_124m --fewest v5e --config.batch.global_size=64",
    "fewest 3": "--config mixtral_8x7b:tiny --fewest v5p",
    "fewest 4": "--config quickstart --fewest v6e --config.model.d_model=1024"
    " --config.model.d_ff=4096 --config.batch.sequence_length=2048"
    " --config.batch.global_size=128",
    "fewest 5": "--config llama2_7b:tiny --fewest v4 --config.batch.global_size=1024",
    "fix 1": "--config quickstart --on cpu:2 --config.batch.global_size=8192 --fix",
    "fix 2": "--config llama2_7b:tiny --on v5e:1x1 --config.batch.global_size=8192"
    " --fix",
    "fix 3": "--config llama3_8b:tiny --on cpu:8 --config.batch.global_size=8192"
    " --config.remat.policy=none --fix",
    "fix 4": "--config mixtral_8x7b:tiny --on cpu:4 --config.batch.global_size=16384"
    " --fix",
    "fix 5": "--config gpt2_124m:tiny --on v5e:2x2 --config.batch.global_size=32768"
    " --config.remat.policy=none --fix",
    "remat fit 1": f"--config llama3_8b:tiny --on v5e:2x4 {FIT}",
    "remat fit 2": f"--config gpt2_124m:tiny --on v5e:2x2 {FIT}"
    " --config.batch.global_size=16384",
    "remat fit 3": f"--config llama2_7b:tiny --on v5p:2x2x1 {FIT}"
    " --config.batch.global_size=32768",
    "remat fit 4": f"--config quickstart --on v6e:2x2 {FIT}"
    " --config.batch.global_size=8192",
    "remat fit 5": f"--config quickstart --on v5e:2x2 {FIT}"
    " --config.mesh.pipeline=2 --config.batch.global_size=64",
}


class Choices(Part):
    """What `plan` chooses in 20 cases: --search, --fewest, --fix, remat.policy=fit.

    The same choice has to take as long and as many bytes as before. Another choice must
    not be slower by the compiler's estimate, and its cause must be named.
    """

    name = "choices"

    def cases(self, tree: Tree) -> list[str]:
        return list(CHOICES)

    def record(self, tree: Tree, case: str) -> Case:
        ended = tree.command(f"plan {CHOICES[case]} --json")
        found = plan_facts(ended)
        if not found:
            return {"code": ended.code, "refused": refusals_in(ended.err, tree)}
        record = fewest_choice(found) if "rows" in found else plan_choice(found)
        return {"code": ended.code, **record}

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = unequal("exit code", before["code"], after["code"])
        if "refused" in before or "refused" in after:
            old = before.get("refused")
            return found + unequal("refusal", old, after.get("refused"), "note")
        found += unequal("fits", before["fits"], after["fits"])
        if set(before["overrides"]) == set(after["overrides"]):
            found += far("step_s", before["step_s"], after["step_s"], NEAR)
            found += far(
                "peak bytes", before["peak_bytes"], after["peak_bytes"], BYTES_NEAR
            )
            if before["others"] != after["others"]:
                text = shown(after["others"])
                found.append(Difference("note", f"behind the choice: {text}"))
            return found
        old = before["step_s"]
        new = after["step_s"]
        slower = old is not None and (new is None or new > old)
        times = f"step_s {old} before, {new} now"
        kind = "fail" if slower else "explain"
        text = f"chose {after['overrides']}, before {before['overrides']}; {times}"
        return [*found, Difference(kind, text)]


def fewest_choice(found: Mapping[str, Any]) -> Case:
    """Reads what `plan --fewest` chose and what stood behind it."""
    best = found.get("best") or {}
    rows = found["rows"]
    return {
        "fits": best.get("fits"),
        "others": [f"{r['target']} {' '.join(r['overrides'])}" for r in rows],
        "overrides": [best.get("target"), *best.get("overrides", [])],
        "peak_bytes": best.get("compiled_bytes"),
        "step_s": best.get("step_s"),
    }


def plan_choice(found: Mapping[str, Any]) -> Case:
    """Reads what `plan` chose with --search or --fix and what stood behind it."""
    record = {
        "fits": found["fits"],
        "others": [],
        "overrides": [],
        "peak_bytes": found["memory"].get("peak_bytes"),
        "step_s": found["time"].get("step_s"),
    }
    if search := found.get("search"):
        record["overrides"] = search["overrides"]
        rows = search["ranking"]
        record["others"] = [f"{r['layout']}: {r['step_s']}" for r in rows]
    elif fitted := found.get("remat_fit"):
        record["overrides"] = fitted["overrides"]
        record["step_s"] = fitted["step_s"]
        record["others"] = [f"{r['remat']}: {r['why']}" for r in fitted["tried"]]
    else:
        advice = found["advice"]
        record["overrides"] = [edit["override"] for edit in advice if edit["checked"]]
        record["others"] = [f"{a['override']}: {a['saves_bytes']}" for a in advice]
    return record


# ------------------------------------------------------------------- costs


class Costs(Part):
    """What each shipped config declares beside what its program does.

    Declared FLOPs per token stand beside those of the jaxpr of a step that computes
    nothing again (remat none, AdamW, the vocabulary in one piece); bytes that the
    planner says are kept, beside the compiler's memory of the config as it is, on one
    device. FLOPs have to stay equal, bytes within 5 %. Products of experts are loops of
    a length that the program computes, and count once in the jaxpr.
    """

    name = "costs"

    def cases(self, tree: Tree) -> list[str]:
        return tree.configs()

    def record(self, tree: Tree, case: str) -> Case:
        usual = tree.usual(case)
        workdir = tree.fresh("run")
        keys: dict[str, Any] = {"train.steps": 1, "checkpoint.save_at_end": "false"}
        keys |= {"remat.policy": "none", "optimizer.name": "adamw"}
        if not case.startswith("vit_"):
            keys |= {"model.loss_chunk": 0}
        text = f"train --workdir {workdir} --config {case} {usual} {as_flags(keys)}"
        program = tree.probe("step", text)
        facts = run_facts(workdir)
        tokens = tokens_of_step(workdir)
        record = {
            "flops_per_token": facts["flops_per_token"],
            "hlo_flops_per_token": program["hlo_flops"] / tokens,
            "jaxpr_flops_per_token": program["jaxpr_flops"] / tokens,
            "parameters": facts["parameters"],
            "tokens_of_step": tokens,
        }
        mesh = as_flags({"mesh.data": 1, "mesh.fsdp": 1})
        ended = tree.command(f"plan --config {case} --on cpu:1 {usual} {mesh} --json")
        record["cpu:1"] = planned_memory(plan_facts(ended.check(case)))
        return record

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = []
        for key in before:
            if key.startswith("cpu:"):
                found += compare_memory(key, before[key], after.get(key) or {})
            else:
                found += unequal(key, before[key], after.get(key))
        return found


def tokens_of_step(workdir: Path) -> int:
    """Gives the targets of one step: tokens, or samples where these have no tokens."""
    config = json.loads((workdir / "config.json").read_text())
    samples = config["batch"]["global_size"]
    if config["data"]["source"] == "digits":
        return samples
    return samples * config["batch"]["sequence_length"]


def planned_memory(found: Mapping[str, Any]) -> Case:
    """Reads the memory of a plan: by its own arithmetic and by the compiler."""
    memory = found["memory"]
    components = memory["components"]
    by_compiler = ("alias_bytes", "argument_bytes", "output_bytes", "temp_bytes")
    return {
        "accounted_bytes": memory["accounted_bytes"],
        "compiler": {name: memory[name] for name in by_compiler},
        "components": dict(sorted(components.items())),
        "kept_bytes": kept_bytes(components),
        "peak_bytes": memory["peak_bytes"],
    }


def compare_memory(where: str, before: Case, after: Case) -> list[Difference]:
    """Compares the memory of two plans."""
    found = []
    for key in ("accounted_bytes", "kept_bytes", "peak_bytes"):
        found += far(f"{where} {key}", before[key], after.get(key), BYTES_NEAR)
    for key, size in before["compiler"].items():
        now = after.get("compiler", {}).get(key)
        found += far(f"{where} {key}", size, now, NEAR)
    old = before["components"]
    new = after.get("components", {})
    for name in sorted({*old, *new}):
        found += unequal(f"{where} {name}", old.get(name), new.get(name), "note")
    return found


# ------------------------------------------------------------------- refusals

# A word of its own is a config key; each case is on eight emulated devices. FOLDER has
# the files of `write_bad_files`.
DRY = "train --dry-run --config quickstart"
REFUSALS = {
    # names and commands
    "no config": "train --dry-run",
    "unknown config": "train --dry-run --config quikstart",
    "absent file": "train --dry-run --config FOLDER/absent.py",
    "folder as config": "train --dry-run --config FOLDER",
    "text as config": "train --dry-run --config FOLDER/notes.txt",
    "config without get_config": "train --dry-run --config FOLDER/nothing.py",
    "config of another type": "train --dry-run --config FOLDER/number.py",
    "config that fails": "train --dry-run --config FOLDER/fails.py",
    "config with a wrong key": "train --dry-run --config FOLDER/wrong_key.py",
    "config with a syntax error": "train --dry-run --config FOLDER/syntax.py",
    "damaged json": "train --dry-run --config FOLDER/damaged.json",
    "argument not taken": "train --dry-run --config quickstart:tiny",
    "unknown size": "train --dry-run --config llama3_8b:huge",
    "unknown flag": f"{DRY} --wrkdir x",
    "key as a flag": f"{DRY} --train.steps=3",
    "key without a value": f"{DRY} --config.train.steps",
    "workdir in a store": f"{DRY} --workdir gs://bucket/run",
    "workdir without a run": "train --workdir FOLDER",
    # keys and types
    "unknown key": f"{DRY} --config.train.step=3",
    "unknown group": f"{DRY} --config.trane.steps=3",
    "unknown model key": f"{DRY} --config.model.layers=3",
    "no integer": f"{DRY} --config.train.steps=many",
    "no float": f"{DRY} --config.optimizer.learning_rate=fast",
    "no truth value": f"{DRY} --config.model.tie_embeddings=perhaps",
    "not one of": f"{DRY} --config.optimizer.name=adamx",
    "zero steps": f"{DRY} --config.train.steps=0",
    "negative seed": f"{DRY} --config.seed=-1",
    "huge seed": f"{DRY} --config.seed=99999999999999999999",
    "share above one": f"{DRY} --config.model.dropout=1.5",
    "two faults": f"{DRY} --config.model.dropout=2 --config.train.log_every=0",
    "overflow": f"{DRY} --config.batch.sequence_length=4294967296",
    "array too large": f"{DRY} --config.batch.global_size=2000000000"
    " --config.batch.sequence_length=2000000000",
    # mesh and batch
    "mesh of three": f"{DRY} --config.mesh.data=1 --config.mesh.fsdp=3",
    "mesh of sixteen": f"{DRY} --config.mesh.data=4 --config.mesh.fsdp=4",
    "two free axes": f"{DRY} --config.mesh.fsdp=-1",
    "zero devices": f"{DRY} --config.mesh.fsdp=0",
    "zero 4": f"{DRY} --config.mesh.zero=4",
    "zero without fsdp": f"{DRY} --config.mesh.zero=1",
    "dcn without slices": f"{DRY} --config.mesh.dcn.fsdp=2",
    "tensor over dcn": f"{DRY} --config.mesh.dcn.tensor=2",
    "batch not divisible": f"{DRY} --config.batch.global_size=12",
    "accumulation not divisible": f"{DRY} --config.batch.accumulation=3",
    "heads not divisible": f"{DRY} --config.mesh.data=1 --config.mesh.tensor=8",
    "no experts": f"{DRY} --config.mesh.data=1 --config.mesh.expert=8",
    "context not divisible": f"{DRY} --config.mesh.data=1 --config.mesh.context=8"
    " --config.batch.sequence_length=100",
    "context by heads": f"{DRY} --config.mesh.data=1 --config.mesh.context=8"
    " --config.context.attention=heads",
    "bad sharding rule": f"{DRY} --config.sharding.rules=\"(('(', 'vocab'),)\"",
    # pipeline and remat
    "more stages than layers": f"{DRY} --config.mesh.data=1 --config.mesh.pipeline=8"
    " --config.batch.global_size=32",
    "unknown schedule": f"{DRY} --config.mesh.data=2 --config.mesh.pipeline=4"
    " --config.pipeline.schedule=2f2b",
    "absent schedule file": f"{DRY} --config.mesh.data=2 --config.mesh.pipeline=4"
    " --config.pipeline.schedule=FOLDER/absent.json",
    "damaged schedule file": f"{DRY} --config.mesh.data=2 --config.mesh.pipeline=4"
    " --config.pipeline.schedule=FOLDER/damaged.json --config.batch.global_size=32",
    "chunks of 1f1b": f"{DRY} --config.mesh.data=4 --config.mesh.pipeline=2"
    " --config.pipeline.chunks=2 --config.batch.global_size=64",
    "interleaved microbatches": f"{DRY} --config.mesh.data=4 --config.mesh.pipeline=2"
    " --config.pipeline.chunks=2 --config.pipeline.schedule=interleaved"
    " --config.pipeline.microbatches=3 --config.batch.global_size=24",
    "unknown remat": f"{DRY} --config.remat.policy=some",
    "unknown residual": f"{DRY} --config.remat.policy=save:nothing_such",
    "remat layers": f"{DRY} --config.remat.layers=9",
    "remat every": f"{DRY} --config.remat.every=3",
    "remat layers and every": f"{DRY} --config.remat.layers=2 --config.remat.every=2",
    # model
    "kv heads": f"{DRY} --config.model.num_kv_heads=3",
    "odd rotary": f"{DRY} --config.model.head_dim=31",
    "learned without length": f"{DRY} --config.model.positions=learned",
    "longer than positions": "train --dry-run --config gpt2_124m:tiny"
    " --config.batch.sequence_length=4096",
    "local without window": f"{DRY} --config.model.layer_pattern=local",
    "window without local": f"{DRY} --config.model.window=64",
    "expert key of a dense model": f"{DRY} --config.model.expert_d_ff=64",
    "more experts than there are": "train --dry-run --config mixtral_8x7b:tiny"
    " --config.model.experts_per_token=9",
    "expert biases": "train --dry-run --config mixtral_8x7b:tiny"
    " --config.model.bias=all",
    "expert groups": "train --dry-run --config mixtral_8x7b:tiny"
    " --config.model.expert_groups=3 --config.model.expert_top_groups=1",
    "no layer with experts": "train --dry-run --config mixtral_8x7b:tiny"
    " --config.model.first_dense_layers=4",
    "yarn factor": f"{DRY} --config.model.rope_attention_factor=2",
    "target without a class": f"{DRY} --config.model.target=jaxdist",
    "target that is absent": f"{DRY} --config.model.target=no_such.module:Model",
    "target's class absent": f"{DRY} --config.model.target=FOLDER/notes.py:Model",
    # precision, optimizer, adapters
    "fp8 in float32": f"{DRY} --config.precision.matmul=fp8_rowwise",
    "loss scale": f"{DRY} --config.precision.compute=float16"
    " --config.precision.loss_scale=3",
    "offload on a CPU": f"{DRY} --config.offload.optimizer=true"
    " --config.optimizer.name=adafactor",
    "warm-up too long": f"{DRY} --config.optimizer.warmup_steps=5000",
    "frozen is no pattern": f"{DRY} --config.optimizer.frozen=(",
    "frozen finds nothing": f"{DRY} --config.optimizer.frozen=nothing_such",
    "all is frozen": f"{DRY} --config.optimizer.frozen=.*",
    "groups find nothing": f"{DRY}"
    " --config.optimizer.groups=\"(('nothing_such', 1.0, None),)\"",
    "adapters of nothing": f"{DRY} --config.lora.rank=4 --config.lora.targets=nothing",
    "base without adapters": f"{DRY} --config.lora.base=int8",
    "dropout without adapters": f"{DRY} --config.lora.dropout=0.1",
    "peft without a model": f"{DRY} --config.lora.rank=4"
    " --config.lora.from_peft=FOLDER",
    # data
    "source without path": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=text",
    "path not read": "train --workdir FOLDER/run --config quickstart"
    " --config.data.path=x.jsonl",
    "path is absent": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=text --config.data.path=FOLDER/absent",
    "no records": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=jsonl --config.data.path=FOLDER/damaged.jsonl",
    "no such field": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=jsonl --config.data.path=FOLDER/fields.jsonl",
    "absent tokenizer": "train --workdir FOLDER/run --config quickstart"
    " --config.data.tokenizer=FOLDER/absent.json",
    "vocabulary too small": "train --workdir FOLDER/run --config quickstart"
    " --config.model.vocab_size=100",
    "mixture without entries": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=mixture",
    "mixture entry": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=mixture --config.data.mixture=stdlib",
    "documents of bin": "train --workdir FOLDER/run --config quickstart"
    " --config.data.source=bin --config.data.path=FOLDER/notes.txt"
    " --config.data.packing=documents",
    "balanced windows": "train --workdir FOLDER/run --config quickstart"
    " --config.data.balance=attention",
    "chat of text": "train --workdir FOLDER/run --config quickstart"
    " --config.data.format=chat",
    "truncated windows": "train --workdir FOLDER/run --config quickstart"
    " --config.data.long_documents=truncate",
    # runs, checkpoints, loggers
    "two beginnings": f"{DRY} --config.init.from_run=a"
    " --config.init.from_huggingface=b",
    "optimizer of no run": f"{DRY} --config.init.optimizer=true",
    "absent run": f"{DRY} --config.init.from_run=FOLDER/absent",
    "absent Hugging Face folder": f"{DRY} --config.init.from_huggingface=FOLDER/absent",
    "copy to no URL": f"{DRY} --config.checkpoint.copy_to=/mnt/run",
    "copy of a store": f"{DRY} --config.checkpoint.copy_to=s3://a/b"
    " --config.checkpoint.folder=gs://a/b",
    "folder of an unknown store": f"{DRY} --config.checkpoint.folder=ftp://a/b",
    "best without evaluations": f"{DRY} --config.train.eval_every=0"
    " --config.checkpoint.keep_best=eval_loss",
    "best by what": f"{DRY} --config.checkpoint.keep_best=eval_loss:most",
    "patience without evaluations": f"{DRY} --config.train.eval_every=0"
    " --config.train.patience=2",
    "failures of a fixed interval": f"{DRY}"
    " --config.checkpoint.chip_hours_per_failure=100",
    "unknown logger": "train --workdir FOLDER/run --config quickstart"
    " --config.train.loggers=nothing_such",
    "empty prompt": f"{DRY} --config.train.sample_prompt=",
    # other commands
    "plan on nothing": "plan --config quickstart --on v9z:2x2",
    "plan on a wrong shape": "plan --config quickstart --on v5p:3x3",
    "search on a CPU": "plan --config quickstart --on cpu:8 --search",
    "search and fix": "plan --config quickstart --on v5e:2x2 --search --fix",
    "fewest and on": "plan --config quickstart --fewest v5e --on v5e:2x2",
    "fewest of no family": "plan --config quickstart --fewest v9z",
    "load without experts": "plan --config quickstart --on cpu:8 --expert-load 2",
    "verify no config": "verify",
    "generate without a run": "generate --workdir FOLDER --prompt x",
    "evaluate without a run": "evaluate --workdir FOLDER",
    "inspect without a run": "checkpoint inspect FOLDER",
    "convert nothing": "convert --from FOLDER --to FOLDER/out --format huggingface",
    "status without a run": "status FOLDER",
    "unknown command": "__main__ nothing_such",
}
BAD_FILES = {
    "damaged.json": '{"model": ',
    "damaged.jsonl": '{"text": "a"}\n{"text": \n',
    "fails.py": "def get_config():\n    return 1 / 0\n",
    "fields.jsonl": '{"body": "a"}\n',
    "notes.py": "",
    "notes.txt": "a few words\n",
    "nothing.py": "x = 1\n",
    "number.py": "def get_config():\n    return 3\n",
    "syntax.py": "def get_config(:\n",
    "wrong_key.py": "from jaxdist import default_config\n\n\n"
    "def get_config():\n    config = default_config()\n"
    "    config.train.step = 3\n    return config\n",
}


class Refusals(Part):
    """What bad configs and command lines are answered: exit code and messages.

    The exit code and the number of messages of each have to stay, and so does the
    number of distinct messages in all; other words are listed.
    """

    name = "refusals"
    together = True

    def cases(self, tree: Tree) -> list[str]:
        return list(REFUSALS)

    def record_all(self, tree: Tree, cases: Sequence[str]) -> dict[str, Case]:
        asked = {}
        for number, case in enumerate(cases):
            folder = tree.fresh(f"bad{number}") / "place"
            folder.mkdir(parents=True)
            for name, text in BAD_FILES.items():
                (folder / name).write_text(text)
            words = shlex.split(REFUSALS[case].replace("FOLDER", str(folder)))
            asked[case] = {"words": words, "folder": str(folder.parent)}
        file = tree.fresh("cases.json")
        file.write_text(json.dumps(asked))
        answers = tree.probe("answers", str(file), devices=8)
        found: dict[str, Case] = {}
        for case, answer in answers.items():
            text = answer["err"].replace(asked[case]["folder"], "PLACE")
            found[case] = {
                "code": answer["code"],
                "messages": refusals_in(text, tree),
            }
        return found

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = unequal("exit code", before["code"], after["code"])
        old = before["messages"]
        new = after["messages"]
        found += unequal("number of messages", len(old), len(new))
        gone = [text for text in old if text not in new]
        come = [text for text in new if text not in old]
        found += [Difference("note", f"before: {text}") for text in gone]
        return found + [Difference("note", f"now: {text}") for text in come]

    def compare_all(
        self, before: Mapping[str, Case], after: Mapping[str, Case]
    ) -> list[Difference]:
        old = distinct_messages(before)
        new = distinct_messages(after)
        return unequal("distinct messages", old, new)


def distinct_messages(cases: Mapping[str, Case]) -> int:
    """Counts the distinct messages of all cases."""
    return len({text for case in cases.values() for text in case["messages"]})


def refusals_in(text: str, tree: Tree) -> list[str]:
    """Gives the messages on standard error; of a traceback its last line.

    Paths of the tree and of its scratch folder are replaced.
    """
    lines = text.splitlines()
    found = [line for line in lines if line.startswith("error: ")]
    if any(line.startswith("Traceback") for line in lines):
        found.append(f"TRACEBACK {lines[-1]}")
    if not found and lines:
        found = [lines[-1]]
    places = {
        str(tree.scratch): "SCRATCH",
        str(tree.path): "TREE",
        sys.executable: "PYTHON",
        sys.prefix: "PREFIX",
    }
    for path, name in places.items():
        found = [line.replace(path, name) for line in found]
    return sorted(set(found))


# ------------------------------------------------------------------- paths

PATHS = ("gpt2_124m:tiny", "llama3_8b:tiny", "mixtral_8x7b:tiny", "sft_lora")


class Paths(Part):
    """Paths, shapes and logical names of the parameters of four configs.

    Users write them in sharding.rules, optimizer.frozen and lora.targets.
    """

    name = "paths"

    def cases(self, tree: Tree) -> list[str]:
        return list(PATHS)

    def record(self, tree: Tree, case: str) -> Case:
        workdir = tree.fresh("run")
        keys = {"train.steps": 1, "checkpoint.save_at_end": "false"}
        text = f"train --workdir {workdir} --config {case} {tree.usual(case)}"
        tree.command(f"{text} {as_flags(keys)}").check(case)
        return run_facts(workdir)["paths"]

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = []
        for path in sorted({*before, *after}):
            found += unequal(path, before.get(path, "none"), after.get(path, "none"))
        return found


# ------------------------------------------------------------------- folders

ARCHIVE = "before-house-folder.tar.gz"
SMALL = {
    "train.steps": 100_000,
    "train.log_every": 50,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "checkpoint.every_steps": 100,
    "checkpoint.keep_last": 2,
    "batch.global_size": 4,
    "batch.sequence_length": 32,
    "data.source": "jsonl",
    "data.validation_tokens": 256,
    "model.d_ff": 16,
    "model.d_model": 8,
    "model.head_dim": 4,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.num_layers": 1,
    "optimizer.schedule": "constant",
}
# What a later version is asked of the folder, in this order; RUN and STORE are copies.
TRAINS = ("resume", "begin from the copies", "init from it")
ASKED = {
    "resume": "train --workdir RUN",
    "begin from the copies": "train --workdir EMPTY --config RUN/config.json"
    " --config.checkpoint.copy_to=file://STORE",
    "init from it": "train --workdir EMPTY --config quickstart"
    " --config.init.from_run=RUN --config.data.source=jsonl"
    " --config.data.path=documents.jsonl --config.data.validation_tokens=256",
    "generate": "generate --workdir RUN --prompt x",
    "status": "status RUN",
    "runs": "runs RUN",
    "report": "report RUN --out EMPTY/report.html",
    "list": "checkpoint list RUN",
    "verify": "checkpoint verify RUN",
}


class Folders(Part):
    """A run that was ended half way, its caches and copies, as before-house left them.

    `record` makes them and keeps them in an archive; its part of the record says which
    files they are. `compare` gives copies to another tree's commands: one that fails
    must leave every file as it was, and say why.
    """

    name = "folders"

    def cases(self, tree: Tree) -> list[str]:
        return list(ASKED)

    def record(self, tree: Tree, case: str) -> Case:
        folder = tree.fresh("another")
        with tarfile.open(RECORDS / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        kept = tree.fresh("kept")
        shutil.copytree(folder, kept)
        (tree.fresh("empty")).mkdir()
        places = {"RUN": folder / "run", "STORE": folder / "store"}
        places |= {"EMPTY": tree.scratch / "empty"}
        words = ASKED[case]
        for name, path in places.items():
            words = words.replace(name, str(path))
        trains = case in TRAINS
        if trains:
            words += " --config.train.max_minutes=0.001"
        if case == "resume":
            words += f" --config.checkpoint.copy_to=file://{places['STORE']}"
        ended = tree.command(words, folder=folder)
        return {
            "changed": changed_files(kept, folder),
            "code": ended.code,
            "messages": refusals_in(ended.err, tree) if ended.code else [],
            "of_its_version": tree.commit() == BEFORE_HOUSE,
            "trains": trains,
        }

    def compare(self, before: Case, after: Case) -> list[Difference]:
        found = []
        if after["of_its_version"]:
            return unequal("exit code", before["code"], after["code"])
        if not after["code"]:
            if after["trains"]:
                text = "goes on with another version's run"
                found.append(Difference("fail", text))
            return found
        if after["changed"]:
            text = f"refused, and yet changed {', '.join(after['changed'])}"
            found.append(Difference("fail", text))
        messages = after["messages"]
        if len(messages) != 1 or "version" not in messages[0]:
            text = f"one line that names the version is due: {shown(messages)}"
            found.append(Difference("fail", text))
        return found


def changed_files(before: Path, after: Path) -> list[str]:
    """Gives the files that were added, removed or changed, but for locks."""
    files = set()
    for root in (before, after):
        files |= {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    changed = []
    for file in sorted(files):
        both = (before / file).exists() and (after / file).exists()
        same = both and filecmp.cmp(before / file, after / file, shallow=False)
        if not same and not file.name.endswith("lock"):
            changed.append(str(file))
    return changed


def make_archive(tree: Tree) -> list[str]:
    """Writes the archive of `Folders`; gives its files and their sizes.

    The run is ended by SIGTERM once its first copy is in the store.
    """
    folder = tree.fresh("folder")
    folder.mkdir()
    text = tree.write_text().read_text().splitlines(keepends=True)
    (folder / "documents.jsonl").write_text("".join(text[:20]))
    keys = SMALL | {
        "data.path": "documents.jsonl",
        "data.cache_dir": "cache",
        "checkpoint.copy_to": f"file://{folder / 'store'}",
    }
    run = folder / "run"
    words = ["-m", "jaxdist.train", "--config", "quickstart", "--workdir", str(run)]
    words += shlex.split(as_flags(keys))
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
    }
    with open(tree.scratch / "folder.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=tree.environment(1, **cache),
            stdout=log,
            stderr=log,
        )
        began = time.monotonic()
        while not list((folder / "store").rglob("200/*")):
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                process.kill()
                raise SystemExit((tree.scratch / "folder.log").read_text())
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
    # Programs are of the machine that compiled them, and large: their names are enough.
    files = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        files.append(f"{file.relative_to(folder)} {file.stat().st_size}")
    shutil.rmtree(folder / "programs", ignore_errors=True)
    with tarfile.open(RECORDS / ARCHIVE, "w:gz", compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            info = archive.gettarinfo(str(path), str(path.relative_to(folder)))
            info.uname = ""
            info.gname = ""
            if path.is_file():
                with open(path, "rb") as data:
                    archive.addfile(info, data)
            else:
                archive.addfile(info)
    return files


# ------------------------------------------------------------------- the record

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Programs(),
        Losses(),
        Choices(),
        Costs(),
        Refusals(),
        Paths(),
        Folders(),
    )
}


def chosen_cases(tree: Tree, part: Part, only: Sequence[str]) -> list[list[str]]:
    """Gives the cases whose names have one of these texts, in turns of the record."""
    cases = part.cases(tree)
    cases = [case for case in cases if any(text in case for text in only or [""])]
    return [cases] if part.together else [[case] for case in cases]


def head(tree: Tree) -> dict[str, Any]:
    """Gives what must stand beside a record: commit, versions, processor."""
    script = "import importlib.metadata as m; print({n: m.version(n) for n in %r})"
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    ended = tree.run(["-c", script % (packages,)])
    processor = re.findall(r"model name\s*: (.*)", read_or_empty("/proc/cpuinfo"))
    return {
        "commit": tree.commit(),
        "processor": processor[0] if processor else platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": ended.check("versions").out.strip(),
    }


def read_or_empty(path: str) -> str:
    """Reads a file; gives "" where there is none."""
    file = Path(path)
    return file.read_text() if file.exists() else ""


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record, a line for each value of a case, so that a diff can be read."""
    lines = ['{"cases": {']
    cases = sorted(record["cases"].items())
    for number, (name, case) in enumerate(cases):
        rows = [f"  {json.dumps(key)}: {compact(case[key])}" for key in sorted(case)]
        end = "}," if number + 1 < len(cases) else "}"
        lines += [f" {json.dumps(name)}: {{", ",\n".join(rows), f" {end}"]
    rest = {key: value for key, value in record.items() if key != "cases"}
    lines.append("},")
    rows = [f" {json.dumps(key)}: {compact(rest[key])}" for key in sorted(rest)]
    lines += [",\n".join(rows), "}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def compact(value: Any) -> str:
    """Gives a value as JSON on one line."""
    return json.dumps(value, sort_keys=True)


def record_command(flags: argparse.Namespace) -> int:
    """Runs `record`; what is recorded so far is kept at once."""
    with opened(flags.tree) as tree:
        for name in flags.parts:
            part = PARTS[name]
            path = Path(flags.records) / f"{name}.json"
            record: dict[str, Any] = {"cases": {}, "head": head(tree)}
            if flags.only and path.exists():
                record["cases"] = json.loads(path.read_text())["cases"]
            if part is PARTS["folders"]:
                record["files"] = make_archive(tree)
            for cases in chosen_cases(tree, part, flags.only):
                record["cases"] |= part.record_all(tree, cases)
                write_record(path, record)
            print(f"wrote {path}")
    return 0


# ------------------------------------------------------------------- comparing


def compare_command(flags: argparse.Namespace) -> int:
    """Runs `compare`; gives 1 if anything differs that must not."""
    causes_file = Path(flags.records) / "causes.json"
    causes = json.loads(causes_file.read_text()) if causes_file.exists() else {}
    failed = 0
    with opened(flags.tree) as tree:
        here = head(tree)
        for name in flags.parts:
            record = json.loads((Path(flags.records) / f"{name}.json").read_text())
            for key in ("processor", "processors", "python", "versions"):
                if record["head"].get(key) != here[key]:
                    was = record["head"].get(key)
                    print(f"{name}: recorded with {key} {was}; here {here[key]}")
            after = {}
            for cases in chosen_cases(tree, PARTS[name], flags.only):
                after |= PARTS[name].record_all(tree, cases)
            if flags.keep:
                path = Path(flags.keep) / f"{name}.json"
                write_record(path, {"cases": after, "head": here})
            failed += compare_part(name, record["cases"], after, causes, flags.only)
    print(f"{failed} differences that must not be" if failed else "all is as recorded")
    return 1 if failed else 0


def compare_part(
    name: str,
    before: Mapping[str, Case],
    after: Mapping[str, Case],
    causes: Mapping[str, str],
    only: Sequence[str],
) -> int:
    """Prints how two records of a part differ; gives how many differences are wrong."""
    part = PARTS[name]
    texts = only or [""]
    expected = {case for case in before if any(text in case for text in texts)}
    failed = 0
    equal = 0
    for case in sorted({*expected, *after}):
        if case not in after or case not in before:
            where = "not there any more" if case in before else "new"
            found = [Difference("fail" if case in before else "note", where)]
        else:
            found = part.compare(before[case], after[case])
        equal += not found
        failed += show(f"{name}/{case}", found, causes)
    if not only:
        failed += show(name, part.compare_all(before, after), causes)
    print(f"{name}: {equal} of {len(expected)} cases equal, {failed} failures")
    return failed


def show(where: str, found: Sequence[Difference], causes: Mapping[str, str]) -> int:
    """Prints the differences of a case; gives how many of them are failures."""
    failed = 0
    for difference in found:
        kind = difference.kind
        text = difference.text
        if kind == "explain" and where in causes:
            kind = "note"
            text += f"; cause: {causes[where]}"
        elif kind == "explain":
            kind = "fail"
            text += "; name the cause in causes.json"
        failed += kind == "fail"
        print(f"{'FAILED' if kind == 'fail' else 'note'}: {where}: {text}")
    return failed


# ------------------------------------------------------------------- pairs

WARM_ROWS = 10  # rows after which a step's time is taken
POLL_S = 0.004


@dataclass
class Clock:
    """Seconds on the wall and of a process's threads together."""

    wall_s: float
    processor_s: float

    def minus(self, other: Clock) -> Clock:
        """Gives the time between two readings."""
        wall = self.wall_s - other.wall_s
        return Clock(wall, self.processor_s - other.processor_s)


def timed_run(tree: Tree, workdir: Path, steps: int, rows_before: int) -> list[Clock]:
    """Trains up to `steps`; gives the start's time and that of one step.

    The start ends with the first new row of metrics. Rows are counted as they are
    written, each a step.
    """
    keys = {"train.steps": steps, "optimizer.schedule": "constant"}
    text = f"{tree.usual('quickstart')} {as_flags(keys)}"
    words = ["-m", "jaxdist.train", "--config", "quickstart", *shlex.split(text)]
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.with_suffix(".programs")),
    }
    began = time.perf_counter()
    seen: dict[int, Clock] = {}
    rows = 0
    with open(workdir.with_suffix(".log"), "a") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--workdir", str(workdir)],
            cwd=tree.scratch,
            env=tree.environment(1, **cache),
            stdout=log,
            stderr=log,
        )
        while process.poll() is None:
            count = count_rows(workdir) - rows_before
            if count > rows:
                rows = count
                wall = time.perf_counter() - began
                seen[rows] = Clock(wall, processor_s(process.pid))
            time.sleep(POLL_S)
    if process.returncode or not seen:
        raise SystemExit(workdir.with_suffix(".log").read_text()[-3000:])
    first, *_ = seen
    warm = min(row for row in seen if row >= min(WARM_ROWS, max(seen) - 1))
    last = max(seen)
    taken = seen[last].minus(seen[warm])
    steps_taken = max(last - warm, 1)
    step = Clock(taken.wall_s / steps_taken, taken.processor_s / steps_taken)
    return [seen[first], step]


def count_rows(workdir: Path) -> int:
    """Counts the rows of metrics that are there so far."""
    file = workdir / METRICS_FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def processor_s(pid: int) -> float:
    """Gives the processor time of a running process so far, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_turn(tree: Tree, number: int, steps: int) -> dict[str, Clock]:
    """Times a start with no compiled program, the steps after it, and a restart."""
    workdir = tree.fresh(f"pair{number}")
    start, step = timed_run(tree, workdir, steps, 0)
    restart, _ = timed_run(tree, workdir, steps + 2, count_rows(workdir))
    shutil.rmtree(workdir)
    shutil.rmtree(workdir.with_suffix(".programs"), ignore_errors=True)
    return {"start": start, "step": step, "restart": restart}


def one_command(tree: Tree, number: int, words: Sequence[str]) -> dict[str, Clock]:
    """Times a command with empty caches, from its start to its end."""
    home = tree.fresh(f"home{number}")
    home.mkdir()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tree.scratch,
        env=tree.environment(1, HOME=str(home), XDG_CACHE_HOME=str(home / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    shutil.rmtree(home)
    return {"command": Clock(wall, processor)}


def pairs_command(flags: argparse.Namespace) -> int:
    """Runs `pairs`; gives 1 if a median of the processor's time is above the limit."""
    words = shlex.split(flags.command)

    def take_turn(tree: Tree, number: int, steps: int) -> dict[str, Clock]:
        if words:
            return one_command(tree, number, words)
        return one_turn(tree, number, steps)

    turns: dict[str, list[dict[str, Clock]]] = {"before": [], "after": []}
    with opened(flags.before) as before, opened(flags.tree) as after:
        trees = {"before": before, "after": after}
        for tree in trees.values():
            take_turn(tree, -1, 2)  # compiles Python, reads the files once
        heads = {name: head(tree) for name, tree in trees.items()}
        for number in range(flags.turns):
            order = ("before", "after") if number % 2 == 0 else ("after", "before")
            for name in order:
                turns[name].append(take_turn(trees[name], number, flags.steps))
            print(f"turn {number + 1} of {flags.turns}", file=sys.stderr, flush=True)
    record: dict[str, Any] = {"heads": heads, "turns": flags.turns}
    if words:
        record["command"] = flags.command
    failed = 0
    for what in turns["after"][0]:
        for clock in ("wall_s", "processor_s"):
            old = [getattr(turn[what], clock) for turn in turns["before"]]
            new = [getattr(turn[what], clock) for turn in turns["after"]]
            ratios = [y / x for x, y in zip(old, new, strict=True)]
            middle = statistics.median(ratios)
            record[f"{what} {clock}"] = {"after": new, "before": old, "ratio": middle}
            slow = clock == "processor_s" and middle > flags.limit
            failed += slow
            verdict = "FAILED" if slow else "ok"
            print(
                f"{verdict}: {what}, {clock}: {middle:.3f} of before "
                f"({min(ratios):.3f} to {max(ratios):.3f}), median seconds "
                f"{statistics.median(old):.4g} before, {statistics.median(new):.4g} now"
            )
    if flags.out:
        Path(flags.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


# ------------------------------------------------------------------- command


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = found.add_subparsers(required=True)
    for name, run in (("record", record_command), ("compare", compare_command)):
        each = commands.add_parser(name)
        each.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
        each.add_argument("--tree", required=True, help="checkout to look at")
        each.add_argument("--only", action="append", help="cases with this in the name")
        each.add_argument("--records", default=str(RECORDS), help="folder of records")
        each.set_defaults(run=run, only=[])
        if name == "compare":
            each.add_argument("--keep", help="folder for the record that is made")
    pairs = commands.add_parser("pairs")
    pairs.add_argument("--before", required=True, help="checkout to compare with")
    pairs.add_argument("--tree", required=True, help="checkout to look at")
    pairs.add_argument("--turns", type=int, default=12)
    pairs.add_argument("--steps", type=int, default=60, help="of a turn's run")
    pairs.add_argument(
        "--command",
        default="",
        help='time this in place of a run: "jaxdist.plan --config quickstart"',
    )
    pairs.add_argument("--limit", type=float, default=1.02, help="of a median ratio")
    pairs.add_argument("--out", help="JSON file")
    pairs.set_defaults(run=pairs_command)
    return found


def main() -> int:
    """Runs the command."""
    flags = parser().parse_args()
    if "all" in getattr(flags, "parts", ()):
        flags.parts = list(PARTS)
    run: Callable[[argparse.Namespace], int] = flags.run
    return run(flags)


if __name__ == "__main__":
    raise SystemExit(main())
