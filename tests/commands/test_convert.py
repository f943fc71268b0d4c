"""The command `convert`, and runs that start from a Hugging Face folder."""

import json
import os
import re
import shlex
import shutil

import jax
import numpy as np
import pytest

from jaxdist import convert, generate, interop, train
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError, trees
from jaxdist.evaluation import loading
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import exit_code, loop, workdir
from support.huggingface import (
    FOLDERS,
    SMOLLM,
    flags,
    load_all,
    run_convert,
    text_fixture,  # noqa: F401  pytest finds them here
)
from support.paths import DOCS
from support.weight_sources import parsed

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Returns the workdir of the smollm folder."""
    target = tmp_path_factory.mktemp("converted") / "work"
    assert run_convert(SMOLLM, target, "jaxdist") == 0
    return target


def test_a_converted_workdir_writes_and_scores_text(converted, tmp_path):
    assert {"config.json", "checkpoints", "tokenizer.json"} <= {
        path.name for path in converted.iterdir()
    }
    run = loading.load_run(converted)
    assert run.config.model["tie_embeddings"]
    assert int(run.state.step) == 0
    greedy = SamplingConfig(temperature=0.0)
    (sample,), _ = run.generate(["the in", "x"], max_tokens=5, sampling=greedy)
    assert sample.text.startswith("the in")
    assert 1 <= len(sample.tokens) <= 5
    tokens = np.load(SMOLLM / "tokens.npy")
    expected = np.load(SMOLLM / "logits.npy")
    assert run.tokenizer.end_of_document == 259 == run.tokenizer.vocab_size - 1
    words = run.tokenizer.encode("the thin")
    assert len(words) < len("the thin"), "its merges are used"
    likeliest = int(expected[0, -1].argmax())
    found = run._continue_rows(
        [tokens[0]], range(1), sampling=greedy, max_tokens=1, seed=0
    )[0]
    assert int(found.tokens[0]) == likeliest if not found.ended else likeliest == 259


def test_a_converted_workdir_stops_at_each_end_that_its_folder_names(
    converted, tmp_path
):
    source = shutil.copytree(SMOLLM, tmp_path / "source")
    run, greedy = (
        loading.load_run(converted, log=print),
        SamplingConfig(temperature=0.0, end_tokens=(10**6,)),
    )
    (whole,) = run.generate(["the inn"], max_tokens=8, sampling=greedy)[0]
    end = int(whole.tokens[3])
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, end]})
    )
    assert run_convert(source, tmp_path / "work", "jaxdist") == 0
    shutil.rmtree(source)
    # what the run keeps of its own is enough
    shutil.rmtree(tmp_path / "work" / interop.KEPT)
    run = loading.load_run(tmp_path / "work")
    assert {0, end, 259} <= set(run.tokenizer.end_ids)
    (sample,) = run.generate(
        ["the inn"], max_tokens=8, sampling=SamplingConfig(temperature=0.0)
    )[0]
    first = whole.tokens.tolist().index(end)
    assert sample.ended
    assert sample.tokens.tolist() == whole.tokens[:first].tolist()


def test_there_and_back_is_the_same(converted, tmp_path):
    back = tmp_path / "back"
    assert (
        run_convert(
            converted,
            back,
            "huggingface",
            "--dtype",
            "bfloat16",
            "--max-shard-gb",
            "0.00001",
        )
        == 0
    )
    before, after = load_all(SMOLLM), load_all(back)
    assert before.keys() == after.keys()
    assert len(list(back.glob("*.safetensors"))) > 1
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (SMOLLM / name).read_bytes()
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (SMOLLM, back)
    )
    assert interop.derive(old) == interop.derive(new)
    for name in (
        "architectures",
        "model_type",
        "eos_token_id",
        "max_position_embeddings",
    ):
        assert old[name] == new[name]
    assert new["torch_dtype"] == "bfloat16"


def test_nothing_is_overwritten_and_nothing_half_is_left(converted, tmp_path):
    (tmp_path / "there").mkdir()
    assert run_convert(converted, tmp_path / "there", "huggingface") == 0  # empty
    for target in (tmp_path / "there", tmp_path / "there" / "config.json"):
        with pytest.raises(ConfigError, match="something is there"):
            run_convert(converted, target, "huggingface")
    damaged = shutil.copytree(SMOLLM, tmp_path / "damaged")
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="model.safetensors"):
        run_convert(damaged, tmp_path / "new", "jaxdist")
    with pytest.raises(ConfigError, match="no run there"):
        run_convert(tmp_path, tmp_path / "new", "huggingface")
    with pytest.raises(ConfigError, match="--format"):
        run_convert(SMOLLM, tmp_path / "new", "onnx")
    assert sorted(os.listdir(tmp_path)) == ["damaged", "there"]


def test_a_model_without_an_origin_is_written_as_the_family_that_has_its_values(
    tmp_path,
):
    """GPT-2 reads max_position_embeddings as another name of n_positions."""
    work = tmp_path / "work"
    assert run_convert(FOLDERS / "gpt2", work, "jaxdist") == 0
    shutil.rmtree(work / interop.KEPT)
    tokenizer = (SMOLLM / "tokenizer.json").read_text()
    (work / "tokenizer.json").write_text(tokenizer)  # one that a run has trained
    assert run_convert(work, tmp_path / "out", "huggingface") == 0
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["model_type"] == "gpt2"
    assert fields["n_positions"] == 32
    assert "max_position_embeddings" not in fields
    assert fields["pad_token_id"] is None
    assert fields["eos_token_id"] == 259
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert about["eos_token"] == "<|endoftext|>"
    config = json.loads((work / "config.json").read_text())
    config["model"]["embedding_scale"] = 3.0
    (work / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model.embedding_scale=3.0, there 1.0"):
        run_convert(work, tmp_path / "new", "huggingface")


@pytest.mark.parametrize(
    ("kind", "flags", "named"),
    [
        (
            "huggingface",
            "--adapters --dtype bfloat16 --max-shard-gb 1",
            ["--dtype bfloat16 with --adapters", "--max-shard-gb 1 with --adapters"],
        ),
        (
            "jaxdist",
            "--adapters --drop-choice-bias --step 0 --max-shard-gb 5",
            ["--adapters", "--drop-choice-bias", "--step", "--max-shard-gb"],
        ),
    ],
)
def test_a_flag_that_the_conversion_does_not_read_is_refused(
    tmp_path, kind, flags, named
):
    with pytest.raises(ConfigError) as refused:
        run_convert(tmp_path, tmp_path / "new", kind, *flags.split())
    assert [fault.partition(":")[0] for fault in refused.value.faults] == named
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_not_exported(converted, tmp_path, capsys):
    copy = shutil.copytree(converted, tmp_path / "copy")
    data = max(
        (copy / "checkpoints" / "0" / "state").rglob("*"),
        key=lambda path: path.stat().st_size,
    )
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert (
        exit_code.exit_code(lambda: run_convert(copy, tmp_path / "out", "huggingface"))
        == 77
    )
    assert "has changed since it was sealed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        interop.CheckpointWeights(tmp_path / "none")


def test_an_export_begins_again_if_its_step_is_deleted_meanwhile(
    converted, tmp_path, monkeypatch, capsys
):
    """A run that goes on saving deletes the step amid its export."""
    step = shutil.copytree(converted, tmp_path / "copy") / "checkpoints" / "0"
    read, calls = interop.CheckpointWeights.read, []

    def raced(weights, path):
        calls.append(path)
        if calls.count(path) > 1 or len(calls) != 3:
            return read(weights, path)
        step.rename(tmp_path / "deleted")
        try:
            return read(weights, path)
        finally:
            (tmp_path / "deleted").rename(step)

    monkeypatch.setattr(interop.CheckpointWeights, "read", raced)
    assert run_convert(tmp_path / "copy", tmp_path / "out", "huggingface") == 0
    assert len(calls) > 6
    monkeypatch.undo()
    assert run_convert(tmp_path / "copy", tmp_path / "calm", "huggingface") == 0
    for file in (tmp_path / "calm").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    # A step that the command line names has no other in its place.
    calls.clear()
    monkeypatch.setattr(interop.CheckpointWeights, "read", raced)
    words = [tmp_path / "copy", tmp_path / "named", "huggingface", "--step", "0"]
    assert exit_code.exit_code(lambda: run_convert(*words)) == 77
    assert "step 0 was deleted while it was read" in capsys.readouterr().err
    assert not (tmp_path / "named").exists()


# --- training -------------------------------------------------------------------------


def resolved(text, **changes):
    return parsed(flags(text, **changes))


def test_a_user_gives_the_path_alone(text):
    config = resolved(text)
    _, values = interop.derive(interop.read_config(SMOLLM))
    assert {name: config.model[name] for name in values} == values
    assert config.data.tokenizer == str(SMOLLM / "tokenizer.json")
    assert resolved(text, model__dropout=0.1).model["dropout"] == 0.1
    assert (
        resolved(text, model__d_model=16, data__tokenizer="bytes").data.tokenizer
        == "bytes"
    )
    with pytest.raises(ConfigError) as raised:
        resolved(text, model__d_model=32, model__qk_norm="head")
    assert len(raised.value.faults) == 2
    assert any(
        "model.d_model=32, there 16 (init" in fault for fault in raised.value.faults
    )
    with pytest.raises(ConfigError, match="model.target='flax.nnx:Linear', there"):
        resolved(text, model__target="flax.nnx:Linear")
    with pytest.raises(ConfigError, match="no tokenizer.json there"):
        resolved(text, folder=FOLDERS / "llama")
    assert (
        resolved(text, folder=FOLDERS / "llama", data__source="bin").data.tokenizer
        == "bytes"
    )


PIPELINED = {
    "mesh__pipeline": 2,
    "mesh__tensor": 2,
    "mesh__fsdp": 2,
    "pipeline__microbatches": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"mesh__fsdp": 2}, pytest.param(PIPELINED, marks=pytest.mark.slow)]
)
def test_fine_tuning_begins_with_the_weights_and_never_reads_them_again(
    text, tmp_path, monkeypatch, layout
):
    """The moving average starts from the weights, too. A pipeline has layers by stage."""
    source, folder = shutil.copytree(SMOLLM, tmp_path / "source"), tmp_path / "run"
    begun, real = [], loop.Trainer.train

    def noted(session, state):
        begun.append(jax.tree.map(np.array, session.built.views.flat(state)))
        return real(session, state)

    monkeypatch.setattr(loop.Trainer, "train", noted)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    assert train.main([*flags(text, source, **layout), "--workdir", str(folder)]) == 0
    state = begun[0]
    stored = load_all(SMOLLM)
    found = trees.flatten_names(state.trainable)
    np.testing.assert_array_equal(
        found["embedding"], stored["model.embed_tokens.weight"].astype(np.float32)
    )
    down = stored["model.layers.2.mlp.down_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(found["blocks/mlp/down"][2], down.T)
    for a, b in zip(
        jax.tree.leaves(state.ema), jax.tree.leaves(state.trainable), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert not any(x.any() for x in jax.tree.leaves(state.opt_state.optimizer))
    rows = read_rows(folder).train
    assert [row["step"] for row in rows] == [1, 2]

    shutil.rmtree(source)  # and on it goes, on another mesh
    again = flags(text, source, train__steps=4, optimizer__schedule="constant")
    with pytest.raises(ConfigError, match="optimizer.schedule"):
        train.main([*again, "--workdir", str(folder)])
    config = workdir.read_config(folder)
    assert config.init.from_huggingface == str(source)
    again = flags(text, source, **layout, train__steps=2)
    assert train.main([*again, "--workdir", str(folder)]) == 0, "finished, and says so"

    out = tmp_path / "out"
    assert run_convert(folder, out, "huggingface") == 0
    assert (out / "tokenizer.json").read_bytes() == (
        SMOLLM / "tokenizer.json"
    ).read_bytes()
    after = load_all(out)
    assert after.keys() == stored.keys()
    moved = np.abs(
        after["model.norm.weight"] - stored["model.norm.weight"].astype(np.float32)
    ).max()
    assert 0 < moved < 0.1


@pytest.mark.parametrize("stretch", [{}, {"model__rope_factor": 4.0}])
def test_sequences_longer_than_the_folder_allows_are_warned_of(
    text, tmp_path, monkeypatch, capsys, stretch
):
    """Rotary positions have no table that ends, so any length would pass in silence."""
    source = shutil.copytree(SMOLLM, tmp_path / "source")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(fields | {"max_position_embeddings": 8})
    )
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    words = flags(text, source, batch__sequence_length=16, train__steps=1, **stretch)
    assert train.main([*words, "--workdir", str(tmp_path / "run")]) == 0
    warning = (
        "warning: batch.sequence_length=16: the model was made for sequences of at most 8 "
        "tokens (max_position_embeddings). Shorten the sequence"
    )
    assert (warning in capsys.readouterr().out) is not bool(stretch)


def test_weights_of_another_model_are_refused_before_anything_is_written(
    text, tmp_path
):
    config = resolved(text)
    wrong = dict(config.model) | {"d_ff": 48}
    with pytest.raises(
        ConfigError, match="holds another model than the config: model.d_ff=48"
    ):
        interop.open_weights(
            SMOLLM, {k: v for k, v in wrong.items() if k != "target"}, {}
        )


PAGE = (DOCS / "how-to/hugging-face.md").read_text()
FAMILIES_PAGE = (DOCS / "reference/families.md").read_text()


def test_what_the_page_shows_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    shutil.copytree(SMOLLM, tmp_path / "models" / "smollm")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text(
        "the cat in thin hats then thinks of the inn. " * 100
    )
    mains = {"convert": convert.main, "generate": generate.main, "train": train.main}
    ran = []
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            name, command, *arguments = shlex.split(line)
            assert name == "jaxdist"
            ran.append(command)
            assert mains[command](arguments) == 0, line
    assert ran == ["convert", "generate", "train", "convert"]
    assert (tmp_path / "models" / "tuned" / "tokenizer.json").is_file()
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    capsys.readouterr()
    exec(compile(block, "docs/how-to/hugging-face.md", "exec"), {})
    assert capsys.readouterr().out == "LlamaForCausalLM 3 True\n"
    for family in interop.FAMILIES:
        assert f"`{family}`" in FAMILIES_PAGE
