"""The shipped configs: parameter counts, documented commands, pinned keys and
shardings.
"""

import ast
import dataclasses
import shlex

import jax
import pytest

from jaxdist import train
from jaxdist.config import ConfigError, files, schema
from jaxdist.models.experts import EXPERT_FIELDS
from jaxdist.parallel import axes, placement
from jaxdist.parallel.mesh import MeshConfig, resolve_mesh
from jaxdist.planner import dry_run
from jaxdist.trainer import (
    cli,
    compose,
    fine_tuning,
    layout_rules,
    model_flops,
    run_config,
    validation,
    workdir,
)
from support import goldens

SMALL = ("quickstart", "vit_digits")  # CPU minutes as they are
SIZED = [name for name in goldens.CONFIGS if name not in SMALL]

# Meta's, Mistral's, Qwen's and HF's cards; 124 M + 47 x 768 rows of padding; MaxText's
# name for the 16B.
PARAMETERS = {
    "gpt2_124m": 124_439_808 + 47 * 768,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "dense_16b": 15_831_666_688,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    # without the 14,848 and 1,664 biases of the choice, which are model state
    "deepseek_v3": 671_026_419_200 - 58 * 256,
    "moonlight_16b": 15_960_110_208 - 26 * 64,
}
# parameters of a token, in billions; Moonlight's paper counts no embeddings
ACTIVE = {"deepseek_v3": 37, "moonlight_16b": 2.24 + 2 * 0.3355}


def parse(*arguments: str) -> run_config.RunConfig:
    return cli.parse(cli.ConfigParser("test", None), arguments)[1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    assert goldens.spec_of(name).parameter_count == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_the_published_part(name):
    run = parse("--config", name)
    active = model_flops.active_parameters(run, goldens.spec_of(name))
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)
    assert active < PARAMETERS[name] / 5


def test_every_config_is_counted():
    assert set(PARAMETERS) == set(SIZED)


@pytest.mark.parametrize("name", goldens.CONFIGS)
def test_the_head_says_the_command_that_runs_it(name, tmp_path):
    head = ast.get_docstring(
        ast.parse((goldens.ROOT / f"configs/{name}.py").read_text())
    )
    lines = [line.partition(" #")[0].strip() for line in head.splitlines()]
    commands = [
        shlex.split(line)
        for line in lines
        if line.startswith("python -m jaxdist.train")
    ]
    assert commands, f"configs/{name}.py: write the command on top"
    for command in commands:
        run = parse(*command[3:])
        assert not schema.faults(run.data)
        devices = dry_run.missing_devices(run.mesh, {"JAX_PLATFORMS": "cpu"}) or 1
        validation.validate_on(run, devices)
    assert name in SMALL or any(f"{name}:tiny" in command for command in commands)


@pytest.mark.parametrize("name", SIZED)
def test_a_full_size_needs_tokens_and_fits_a_pod(name):
    run = parse("--config", name)
    assert run.precision.compute == "bfloat16"
    with pytest.raises(
        ConfigError, match="needs data.path; it is empty. Set data.path"
    ):
        validation.validate(run, jax.devices())
    shape = validation.validate(run, jax.devices(), with_data=False).shape
    assert len(jax.devices()) == 8
    assert shape.batch_shards == 8


@pytest.mark.parametrize("name", SIZED)
def test_tiny_is_small_and_of_the_same_family(name):
    full, tiny = parse("--config", name), parse("--config", f"{name}:tiny")
    spec = validation.validate(tiny, jax.devices()).spec
    assert spec.parameter_count < 2e6
    assert tiny.data.source == "stdlib"
    family = [
        "positions",
        "norm",
        "activation",
        "gated",
        "bias",
        "tie_embeddings",
        "rope_theta",
    ]
    assert [tiny.model[key] for key in family] == [full.model[key] for key in family]
    grouped = [
        run.model["num_kv_heads"] < run.model["num_heads"] for run in (full, tiny)
    ]
    assert grouped[0] == grouped[1]


def test_adapters_for_70b_are_refused_without_weights_and_data():
    with pytest.raises(ConfigError) as raised:
        fine_tuning.check(parse("--config", "llama3_70b:qlora"), (), {})
    said = str(raised.value)
    assert "init.required=true: this config trains weights that exist" in said
    assert "no data are named" in said
    run = parse("--config", "llama3_70b:qlora", "--config.init.required=false")
    assert (run.lora.base, run.precision.params) == ("nf4", "float32")
    shape = validation.validate(run, jax.devices()[:1], with_data=False).shape
    assert shape.batch_shards == 1


def test_the_published_layout_of_70b_on_64_a100():
    run = parse("--config", "llama2_70b:a100x64", "--config.data.path=x.bin")
    composition = validation.validate_on(run, 64)
    sizes = {axis: n for axis, n in composition.shape.sizes.items() if n > 1}
    assert sizes == {"tensor": 8, "pipeline": 2, "fsdp": 4}
    assert (run.mesh.zero, composition.microbatches) == (1, 128)
    assert (run.batch.global_size, run.batch.sequence_length) == (512, 4096)
    per_microbatch = 512 / (128 * composition.shape.batch_shards)
    assert per_microbatch == 1
    optimizer = run.optimizer
    end = optimizer.learning_rate * optimizer.final_learning_rate
    assert (optimizer.learning_rate, end) == (3e-4, pytest.approx(3e-5))
    assert (optimizer.schedule, optimizer.name) == ("cosine", "adamw")
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
    assert run.precision.compute == "bfloat16"


def test_sizes_are_a_closed_set():
    with pytest.raises(ConfigError, match="no such size; use NAME or NAME:tiny"):
        parse("--config", "llama3_8b:huge")


def test_a_tiny_config_trains(tmp_path):
    corpus = tmp_path / "text.txt"
    corpus.write_text("the cat sat on the mat. " * 2000)
    arguments = ["--config", "gpt2_124m:tiny", "--workdir", str(tmp_path / "run")]
    small = {
        "train.steps": 3,
        "optimizer.warmup_steps": 1,
        "train.log_every": 1,
        "model.num_layers": 2,
        "data.source": "text",
        "data.path": corpus,
        "data.cache_dir": tmp_path / "cache",
        "data.validation_share": 0,
    }
    assert (
        train.main(
            arguments + [f"--config.{key}={value}" for key, value in small.items()]
        )
        == 0
    )
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    assert workdir.read_config(tmp_path / "run").model["d_model"] == 128


# --- axes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", goldens.CONFIGS)
def test_every_axis_that_a_shipped_model_accepts_has_work(name):
    run = goldens.run_of(name)
    spec = goldens.spec_of(name)
    tried = []
    for axis in axes.AXES:
        mesh = MeshConfig(**{"data": 1, axis: 2})
        run_on_axis = dataclasses.replace(run, mesh=mesh)
        composition = compose.compose(run_on_axis, resolve_mesh(mesh, 2), spec)
        if layout_rules.layout_faults(composition):
            continue
        tried.append(axis)
        lines = placement.warnings(composition.placements(), composition.rules)
        assert lines == [], axis
    assert {"data", "fsdp", "tensor"} <= {*tried}
    assert ("expert" in tried) == (name in goldens.OF_EXPERTS)


# --- goldens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", goldens.NAMES)
def test_goldens(name):
    path = goldens.FOLDER / name
    meaning = (
        f"tests/golden/{name} is not what the code says. If that is meant, run\n"
        f"    {goldens.COMMAND}\nand let the reviewer read the difference."
    )
    assert path.is_file(), meaning
    assert path.read_text().splitlines() == goldens.text(name).splitlines(), meaning


def test_no_golden_is_left_over():
    found = {
        file.relative_to(goldens.FOLDER).as_posix()
        for file in goldens.FOLDER.rglob("*.*")
    }
    assert found == {*goldens.NAMES, *goldens.OTHERS}


# Groups of features that most runs leave alone, each with a budget of its own.
FEATURES = {
    "lora",
    "model.multi_token",
    "objective",
    "watchdog",
    "resilience",
    "health",
    "profile",
    "telemetry",
    "model.latent",  # a mixer's own options
}


def test_keys_keep_to_their_budgets_and_each_has_a_meaning():
    fields = run_config.full_schema(run_config.registry.DEFAULT_TARGET)
    of_experts = {"model.num_experts", *(f"model.{name}" for name in EXPERT_FIELDS)}
    assert of_experts <= fields.keys()
    # 17 with shared_expert_gate: Qwen's shared experts have a gate, DeepSeek's have none.
    assert len(of_experts) <= 17
    others = fields.keys() - of_experts
    for feature in FEATURES:
        group = {path for path in others if path.startswith(f"{feature}.")}
        assert group, feature
        assert len(group) <= 15, f"{feature} has {len(group)} keys: a feature has 15"
        others -= group
    assert len(others) > 50
    # 152 with offload.parameters: 70B on one node needs its own switch, since gradients
    # are then rounded to precision.compute. 153 with checkpoint.compress: a slow disk or
    # a store wants fewer bytes, a fast one less processor time beside training. 154 with
    # data.truncation: a pair of preferences with a long prompt has its completions at
    # the end, and keeping the start would drop it. 155 with model.head: a reward model
    # has another output, which commands and exports must know. 158 with three keys of
    # checkpoint.memory_*: where steps in memory are, how often, and on how many hosts.
    # 159 with model.rope_query_growth: Ministral 3 has it, and no other key can express
    # it.
    too_many = (
        f"{len(others)} keys without features: drop one, or raise 159 and say why"
    )
    assert len(others) <= 159, too_many
    assert not [path for path, field in fields.items() if not field.doc]


def test_goldens_hold_splits_copies_and_refusals():
    text = goldens.text("sharding/llama3_8b.txt")
    for word in (
        "(-,fsdp,tensor,-)",
        "8 kv heads < tensor 16: copied",
        "refused",
        "zero 1 keeps",
    ):
        assert word in text


def test_the_packaged_folder_is_the_checkout_s():
    assert files.packaged_folders() == (goldens.ROOT / "configs",)
