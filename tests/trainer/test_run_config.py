"""RunConfig: parsing, what may change on resume, batch arithmetic, what a step gets."""

import shlex
from pathlib import Path

import jax
import pytest

from jaxdist.config import ConfigError, schema
from jaxdist.data import open_dataset
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.trainer import (
    cli,
    compose,
    run_config,
    step_lines,
    validation,
    workdir,
    workdir_parser,
)


def parse(*arguments: str) -> run_config.RunConfig:
    return cli.parse(cli.ConfigParser("test", None), list(arguments))[1]


def faults_of(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    return caught.value.faults


# --- parse ----------------------------------------------------------------------------


def test_values_after_an_equals_sign_or_a_space():
    run = parse(
        "--config=quickstart",
        "--config.seed",
        "7",
        "--config.mesh.data",
        "-1",
        "--config.model.tie_embeddings=no",
        "--config.model.gated",
        "true",
        "--config.optimizer.decay_steps=none",
        "--config.data.path=a=b,c",
    )
    assert (run.seed, run.mesh.data, run.optimizer.decay_steps) == (7, -1, None)
    assert run.model["tie_embeddings"] is False
    assert run.model["gated"] is True
    assert run.data.path == "a=b,c"


def test_a_value_may_not_be_missing():
    assert faults_of(
        "--config", "quickstart", "--config.model.qk_norm", "--config.seed"
    ) == (
        "model.qk_norm: has no value; write --config.model.qk_norm=VALUE",
        "seed: has no value; write --config.seed=VALUE",
    )


@pytest.mark.parametrize("value", ["-h", "-hello", "-1", "two words", ""])
def test_a_value_may_begin_as_flags_do(value):
    run = parse("--config", "quickstart", "--config.train.sample_prompt", value)
    assert run.train.sample_prompt == value


def test_a_value_is_the_word_behind_its_path():
    assert faults_of("--config.seed", "--config", "quickstart", "7") == (
        "7: no such flag; --help lists them",
        "seed: has no value; write --config.seed=VALUE",
    )


def test_the_last_of_two_overrides_counts():
    assert (
        parse("--config", "quickstart", "--config.seed=1", "--config.seed=2").seed == 2
    )


def test_a_length_of_the_command_line_replaces_that_of_the_config(tmp_path):
    quickstart = ["--config", "quickstart"]
    epochs = parse(*quickstart, "--config.train.epochs=2").train
    assert (epochs.epochs, list(epochs.faults())) == (2.0, [])
    path = tmp_path / "epochs.py"
    path.write_text(
        "from jaxdist import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.train.epochs = 2\n"
        "    return config\n"
    )
    steps = parse("--config", str(path), "--config.train.steps=7").train
    assert (steps.steps, steps.epochs) == (7, 0.0)
    both = faults_of(*quickstart, "--config.train.steps=7", "--config.train.epochs=2")
    (fault,) = both
    assert "both say how long the run is; leave out one" in fault
    none = parse(*quickstart, "--config.train.epochs=0", "--config.train.steps=7").train
    assert (none.steps, none.epochs) == (7, 0.0)


def test_a_key_of_two_types_takes_both_in_a_config_file():
    config = run_config.default_config()
    assert config.train.eval_every == "auto"
    config.train.eval_every = 100
    assert run_config.from_config(config).train.eval_every == 100
    config.train.eval_every = "often"
    with pytest.raises(
        ConfigError, match="train.eval_every: got 'often', required int"
    ):
        run_config.from_config(config)


def test_a_command_s_own_flags_come_back():
    parser = cli.ConfigParser("test", None)
    parser.add_argument("--workdir")
    flags, _ = cli.parse(parser, ["--workdir", "x", "--config", "quickstart"])
    assert (flags.workdir, flags.config) == ("x", "quickstart")


def test_the_target_is_read_before_the_other_overrides(tmp_path):
    (tmp_path / "models_for_recipe.py").write_text(
        "from flax import nnx\n"
        "class Wide(nnx.Module):\n"
        "    def __init__(self, width: int = 3, *, rngs):\n"
        "        pass\n"
    )
    target = "--config.model.target=models_for_recipe:Wide"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        run = parse("--config", "quickstart", target, "--config.model.width=5")
        assert run.model == {"target": "models_for_recipe:Wide", "width": 5}
        (fault,) = faults_of(
            "--config", "quickstart", target, "--config.model.d_model=5"
        )
        assert fault.startswith("model.d_model: no such field.")


def test_a_config_file_may_leave_out_everything(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(
        "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict()"
    )
    assert parse("--config", str(path)) == run_config.from_config(
        run_config.default_config()
    )
    assert parse("--config", str(path), "--config.model.d_ff=8").model["d_ff"] == 8


def test_an_unknown_axis_of_a_trained_run_s_mesh_lists_the_axes():
    parser = workdir_parser.WorkdirParser("test", None)
    flags = parser.parse_args(["--workdir", "x", "--mesh", "tp=2,fspd=2"])
    with pytest.raises(ConfigError) as error:
        workdir_parser.run_options(flags)
    axes = "pipeline, data, fsdp, expert, context, tensor"
    assert error.value.faults == (
        f"--mesh: there is no axis 'tp'. Axes: {axes}",
        f"--mesh: there is no axis 'fspd'. Did you mean fsdp? Axes: {axes}",
    )


# --- what may change on resume --------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "harmless"),
    [
        ("mesh.fsdp=2", True),
        ("mesh.dcn.data=1", True),
        ("remat.policy=full", True),
        ("batch.accumulation=2", True),
        ("train.log_every=7", True),
        ("train.eval_every=7", True),
        ("checkpoint.keep_last=7", True),
        ("train.max_minutes=7", True),
        ("optimizer.decay_steps=2001", False),
        # what is done stays as it was; the schedule is extended
        ("train.steps=2001", True),
        ("batch.global_size=8", False),
        ("seed=1", False),
        ("model.d_ff=8", False),
        ("optimizer.learning_rate=1", False),
        ("data.path=x", False),
        ("precision.compute=bfloat16", False),
    ],
)
def test_the_fingerprint_sees_what_changes_losses(change, harmless):
    before = run_config.run_fingerprint(parse("--config", "quickstart"))
    after = run_config.run_fingerprint(
        parse("--config", "quickstart", f"--config.{change}")
    )
    assert (before == after) == harmless


def test_a_warm_up_that_is_not_set_is_the_runs():
    def check(stored, now, **more):
        config = schema.to_config_dict(
            parse("--config", "quickstart", *stored)
        ).to_dict()
        workdir.check_stored_config(
            {"config": config, **more}, parse("--config", "quickstart", *now), Path("x")
        )

    settled = {"schedule": {"warmup_steps": 20, "decay_steps": 200, "extensions": []}}
    none, some = [], ["--config.optimizer.warmup_steps=20", "--config.train.steps=200"]
    check(some, none)
    check(none, some, **settled)
    for stored, more in ((some, {}), (none, settled)):
        with pytest.raises(
            ConfigError, match="optimizer.warmup_steps: the run in x has .*, now 30"
        ):
            check(stored, ["--config.optimizer.warmup_steps=30"], **more)
    with pytest.raises(ConfigError, match="the checkpoint's schedule is damaged"):
        check(none, none, schedule={"warmup_steps": None})


def branch_of(changed: list[str]) -> list[str]:
    """Returns the words of the command that a refusal shows; [] if there is none."""
    stored = schema.to_config_dict(parse("--config", "quickstart")).to_dict()
    progress = {"step": 8, "tokens_seen": 0}
    now = parse("--config", "quickstart", *changed)
    with pytest.raises(ConfigError) as caught:
        workdir.check_stored_config(
            {"config": stored, "progress": progress}, now, Path("gs://a/b"), Path("w")
        )
    last = caught.value.faults[-1]
    if not last.startswith("the command that branches"):
        return []
    return shlex.split(last.partition(": ")[2])


def test_the_command_that_branches_fits_what_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rate = "--config.optimizer.learning_rate=0.5"
    assert branch_of([rate]) == []  # there is no config to branch from
    Path("w").mkdir()
    Path("w/config.json").write_text("{}")
    start = ["jaxdist", "train", "--config", "w/config.json", "--workdir", "w-branch"]
    source = "--config.init.from_run=gs:/a/b@8"
    assert branch_of([rate]) == [
        *start,
        rate,
        source,
        "--config.init.optimizer=true",
    ]
    # another optimizer has another state
    name = "--config.optimizer.name=lion"
    assert branch_of([name]) == [*start, name, source]
    folder = "--config.checkpoint.folder=gs://a/b"
    assert "--config.checkpoint.folder=gs://a/b-branch" in branch_of([rate, folder])
    # weights of another model do not fit
    assert branch_of([rate, "--config.model.d_ff=8"]) == []


def test_an_option_that_a_model_has_gained_is_a_change_if_it_is_set(
    tmp_path, monkeypatch
):
    source = """
from dataclasses import dataclass, field
from flax import nnx

@dataclass(frozen=True)
class Extra:
    rates: tuple[float, ...] = (0.5, 1.0)

@dataclass(frozen=True)
class Config:
    width: int = 8
    extra: Extra = Extra()

class Net(nnx.Module):
    Config = Config

    def __init__(self, config, *, rngs):
        pass
"""
    (tmp_path / "net_that_grew.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def check(without, **options):
        config = run_config.default_config("net_that_grew:Net")
        stored = schema.flatten(config)
        stored.pop(without)
        config.update_from_flattened_dict(options)
        workdir.check_stored_config(
            {"config": schema.unflatten(stored)},
            run_config.from_config(config),
            Path("x"),
        )

    check("model.extra.rates")
    check("model.width")
    rates = {"model.extra.rates": (0.5, 2.0)}
    with pytest.raises(ConfigError, match=r"extra.rates: .* has \(0.5, 1.0\), now"):
        check("model.extra.rates", **rates)
    # jaxdist's own keys are all in a config of this format
    for key in ("optimizer.name", "model.target"):
        with pytest.raises(ConfigError, match=rf"{key}: .* has \(absent\), now"):
            check(key)


def test_edges_that_are_replicated_are_refused():
    with pytest.raises(
        ConfigError, match=r"required one of sharded, last\. .*last = whole on each"
    ):
        parse("--config", "quickstart", "--config.pipeline.edges=replicated")


def test_a_model_of_ones_own_says_which_options_may_change(tmp_path, monkeypatch):
    source = """
from typing import Annotated
from flax import nnx
from jaxdist.config.annotations import Resume

class Net(nnx.Module):
    def __init__(
        self, width: int = 8, block: Annotated[int, Resume("harmless")] = 4, *, rngs
    ):
        pass
"""
    (tmp_path / "net_with_marks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    target = "net_with_marks:Net"
    fields = run_config.full_schema(target)
    assert fields["model.block"].type is int

    def fingerprint(**options):
        run = run_config.RunConfig(model={"target": target, **options})
        return run_config.run_fingerprint(run)

    stored = fingerprint(width=8, block=4)
    assert fingerprint(width=8, block=16) == stored
    assert fingerprint(width=16, block=4) != stored


# --- batch, mesh ----------------------------------------------------------------------


def test_batch_arithmetic_says_the_numbers():
    run = parse("--config", "quickstart", "--config.batch.accumulation=2")
    run = compose.with_overrides(run, {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)})
    composition = validation.validate_on(run, 8)
    assert step_lines.batch_arithmetic(composition) == (
        "batch: 16 sequences a step = 2 accumulation x 4 batch shards x 2 per device; "
        "x 128 tokens = 2,048 tokens a step"
    )


@pytest.mark.parametrize(
    ("size", "legal"), [(16, True), (48, True), (8, False), (24, False)]
)
def test_the_batch_divides_by_accumulation_and_shards(size, legal):
    assert len(jax.devices()) == 8
    settings = (f"--config.batch.global_size={size}", "--config.batch.accumulation=2")
    run = parse("--config", "quickstart", *settings)
    if legal:
        validation.validate(run, jax.devices())
    else:
        with pytest.raises(ConfigError, match=r"accumulation 2 x batch shards 8"):
            validation.validate(run, jax.devices())


def test_a_batch_that_a_pipeline_does_not_divide_names_the_key_of_microbatches():
    run = parse("--config", "quickstart", "--config.mesh.pipeline=2")
    with pytest.raises(ConfigError) as raised:
        validation.validate_on(run, 8)
    (fault,) = raised.value.faults
    assert fault == (
        "batch.global_size=16 is not divisible by batch.accumulation 1 x "
        "pipeline.microbatches 8 x batch shards 4 (data x fsdp x expert) = 32; nearest "
        "legal sizes: 32; or lower pipeline.microbatches"
    )


@pytest.mark.parametrize(("length", "legal"), [(64, True), (65, False)])
def test_a_sequence_is_no_longer_than_the_learned_positions(length, legal):
    learned = ("--config.model.positions=learned", "--config.model.max_positions=64")
    sizes = (
        f"--config.batch.sequence_length={length}",
        "--config.train.sample_tokens=0",
    )
    run = parse("--config", "quickstart", *learned, *sizes)
    if legal:
        validation.validate_on(run, 8)
    else:
        with pytest.raises(ConfigError, match="65 exceeds the model's longest"):
            validation.validate_on(run, 8)


@pytest.mark.parametrize("name", ["quickstart", "vit_digits", "gpt2_124m:tiny"])
def test_a_shipped_config_may_be_tried_for_a_few_steps(name):
    run = parse("--config", name, "--config.train.steps=20")
    validation.validate_on(run, 8, with_data=False)
    assert run.optimizer.warmup_steps is None  # a tenth of them


def test_emulated_devices_have_the_slices_that_the_mesh_asks_for():
    run = parse("--config", "quickstart", "--config.mesh.dcn.data=2")
    shape = validation.validate(run, jax.devices()).shape
    assert shape.dcn["data"] == 2
    assert shape.sizes["data"] == 8


def test_text_batches_are_what_the_dataset_makes(tmp_path):
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 1000)
    for packing in ("window", "documents"):
        run = parse(
            "--config",
            "quickstart",
            "--config.data.source=text",
            f"--config.data.path={tmp_path / 'text.txt'}",
            f"--config.data.cache_dir={tmp_path / 'cache'}",
            f"--config.data.packing={packing}",
        )
        length = run.batch.sequence_length
        dataset = open_dataset(run.data, sequence_length=length, log=lambda line: None)
        real = {n: (x.shape, x.dtype) for n, x in dataset.train_batch(0, 4).items()}
        assert {
            n: (x.shape, x.dtype) for n, x in compose.batch_shapes(run, 4).items()
        } == real


def test_the_default_config_is_a_run():
    run = run_config.from_config(run_config.default_config())
    assert (
        schema.flatten(schema.to_config_dict(run)).keys()
        == run_config.full_schema(run_config.registry.DEFAULT_TARGET).keys()
    )


@pytest.mark.parametrize("target", ["[]", "3", "null", '"/dev/null"'])
def test_a_stored_target_that_is_no_name_is_refused(tmp_path, target):
    (tmp_path / "config.json").write_text(
        f'{{"format": "jaxdist-1", "model": {{"target": {target}}}}}'
    )
    with pytest.raises(ConfigError, match="target"):
        workdir.read_config(tmp_path)


def test_epochs_of_zero_leave_the_steps_and_a_file_may_set_one_of_both(tmp_path):
    assert (
        parse("--config", "quickstart", "--config.train.epochs=0").train.steps == 1700
    )
    file = tmp_path / "both.py"
    file.write_text(
        "from jaxdist import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.train.steps, config.train.epochs = 1000, 2.0\n"
        "    return config\n"
    )
    with pytest.raises(ConfigError, match="both say how long the run is"):
        parse("--config", str(file))
    steps = parse("--config", str(file), "--config.train.steps=50").train
    assert (steps.steps, steps.epochs) == (50, 0)
