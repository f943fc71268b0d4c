"""What is pinned in tests/golden: config keys, names, outputs, shardings, sizes.

`python tests/support/goldens.py` writes them anew; then read the diff. With `--release`
it also writes what a minor release promises, and a run of it for later releases to read
(docs/project/versions.md): once, before its tag.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
ROOT = Path(__file__).resolve().parents[2]  # without support.paths: also a script
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from jaxdist.config import ConfigError, annotations, files  # noqa: E402
from jaxdist.models import registry  # noqa: E402
from jaxdist.parallel import axes, placement, sharding  # noqa: E402
from jaxdist.parallel.mesh import (  # noqa: E402
    MeshConfig,
    resolve_mesh,
)
from jaxdist.protocols.model_spec import (  # noqa: E402
    ModelSpec,
    describe,
)
from jaxdist.trainer import run_config  # noqa: E402
from jaxdist.trainer.compose import Composition  # noqa: E402
from support import promise, released_run  # noqa: E402
from support.nodes import nodes_by_room  # noqa: E402

FOLDER = ROOT / "tests" / "golden"
COMMAND = "python tests/support/goldens.py"
# their model is that of the weights that they begin with: tests/commands/test_sft.py,
# tests/trainer/test_fine_tuning.py
BASED = {"finetune", "sft_lora", "dpo_lora"}
CONFIGS = sorted({path.stem for path in (ROOT / "configs").glob("[a-z]*.py")} - BASED)
SMALL = ("quickstart", "gpt2_124m", "vit_digits")

# Nothing here needs devices: a resolved mesh is only six numbers.
SMALL_LAYOUTS = (
    MeshConfig(data=8),
    MeshConfig(data=1, fsdp=8),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=1, fsdp=4, tensor=4, zero=1),
    MeshConfig(data=1, tensor=8),
)
LARGE_LAYOUTS = (
    MeshConfig(data=1, fsdp=256),  # a v5e pod
    MeshConfig(data=1, fsdp=16, tensor=4),  # v5p-128
    MeshConfig(data=2, fsdp=8, tensor=8),
    MeshConfig(data=1, fsdp=16, tensor=16),  # more than the kv heads of grouped models
    MeshConfig(data=4, fsdp=8, zero=1),
    MeshConfig(data=1, fsdp=8, zero=2),
    MeshConfig(data=1, fsdp=8, tensor=48),  # refused
)
EXPERT_LAYOUTS = (
    MeshConfig(data=1, fsdp=8, expert=8),  # v5p-128
    MeshConfig(data=1, fsdp=2, tensor=2, expert=4),
)
OF_EXPERTS = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "moonlight_16b")
# Variants with stages, as `name:argument`.
STAGED = {
    "llama3_70b:pipeline": (
        MeshConfig(pipeline=4, data=1, fsdp=32),
        MeshConfig(pipeline=4, data=1, fsdp=32, tensor=8),
        MeshConfig(pipeline=3, data=1, fsdp=16),  # 80 layers in 15 places: padded
    )
}

SHARDING = {
    name: SMALL_LAYOUTS if name in SMALL else LARGE_LAYOUTS for name in CONFIGS
} | STAGED
SHARDING |= dict.fromkeys(OF_EXPERTS, (*LARGE_LAYOUTS, *EXPERT_LAYOUTS))
TABLES = {f"sharding/{name.replace(':', '_')}.txt": name for name in SHARDING}
JOBSETS = {"jobset.json": "jobset.yaml", "jobset_tpu.json": "jobset_tpu.yaml"}
# files below tests/golden
NAMES = (promise.KEYS, promise.INTERFACE, *JOBSETS, *TABLES)
SIZES = "nodes.json"  # a bound: tests/test_architecture.py
# these need a run, or a release: tests/test_versions.py
OTHERS = (SIZES, promise.WRITTEN, promise.RELEASED)


@cache
def text(file: str) -> str:
    """Returns what one of NAMES should hold."""
    if file == promise.KEYS:
        return config_keys_text()
    if file == promise.INTERFACE:
        return "\n".join(promise.interface_lines()) + "\n"
    if file in JOBSETS:
        return jobset_text(JOBSETS[file])
    return sharding_text(TABLES[file], SHARDING[TABLES[file]])


def jobset_text(name: str) -> str:
    """Returns a file of deploy/ as Kubernetes takes it: no comments, no aliases, no YAML
    types.
    """
    document = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return json.dumps(document, indent=1) + "\n"


def nodes_text() -> str:
    """Lists the size of each room of the package, in nodes of its syntax trees."""
    return json.dumps(nodes_by_room(ROOT / "jaxdist"), indent=1, sort_keys=True) + "\n"


def config_keys_text() -> str:
    """Lists the keys of a run of the default model: path, type, default, and whether
    the key may change on resume.
    """
    schema = run_config.full_schema(registry.DEFAULT_TARGET)
    rows = [f"# {len(schema)} keys: key, type = default"]
    for path, field in schema.items():
        row = f"{path:<32} {annotations.describe(field.type)} = {field.default!r}"
        if field.may_change_on_resume:
            row += "  (may change on resume)"
        rows.append(row)
    return "\n".join(rows) + "\n"


@cache
def run_of(name: str) -> run_config.RunConfig:
    """Returns a shipped config."""
    return run_config.from_config(files.load(name, folders=[ROOT / "configs"]))


@cache
def spec_of(name: str) -> ModelSpec:
    """Returns the model of a shipped config, without its arrays."""
    run = run_of(name)
    return describe(registry.build_function(run.model_class, run.model_options))


def sharding_text(name: str, layouts: Sequence[MeshConfig]) -> str:
    """Returns the sharding tables of a shipped config, a layout each."""
    spec, parts = spec_of(name), []
    for mesh in layouts:
        shape = resolve_mesh(mesh, math.prod(getattr(mesh, axis) for axis in axes.AXES))
        run = dataclasses.replace(run_of(name), mesh=mesh)
        try:
            table = placement.explain(
                Composition(run, sharding.build_rules(mesh, shape), spec).placements()
            )
        except ConfigError as error:
            table = "refused\n" + str(error)
        parts.append(f"== {shape}, zero {mesh.zero}\n{table}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """Writes the files, and removes those of configs that are gone."""
    wanted = {name: text(name) for name in NAMES}
    wanted[SIZES] = nodes_text()
    with tempfile.TemporaryDirectory() as folder:
        lines = promise.written_lines(Path(folder))
    wanted[promise.WRITTEN] = "\n".join(lines) + "\n"
    for file in FOLDER.rglob("*.*"):
        if file.relative_to(FOLDER).as_posix() not in {*wanted, *OTHERS}:
            file.unlink()
    for name, words in wanted.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    if "--release" in arguments:
        write_release()


def write_release() -> None:
    """Pins what this version promises, if it keeps what the last minor one promised."""
    version = promise.version()
    if not version.endswith(".0"):
        raise SystemExit(
            f"{version} is a patch, which keeps the promise of its minor release"
        )
    old, lines = promise.released()
    if promise.minor(old) < promise.minor(version):
        changelog = (ROOT / "CHANGELOG.md").read_text()
        now = (version, promise.promised())
        broken = promise.breaks((old, lines), now, changelog)
        if broken:
            raise SystemExit("\n".join(broken))
    (FOLDER / promise.RELEASED).write_text(promise.released_text())
    released_run.make(".".join(map(str, promise.minor(version))))


if __name__ == "__main__":
    main(sys.argv[1:])
