"""Trained runs opened from a workdir: weights, devices, and the two commands."""

import dataclasses
import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import convert, evaluate, generate
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.data import bpe
from jaxdist.evaluation import layout, loading, trained_run
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.inference.logits import LogitsFunction
from jaxdist.inference.scoring import windows
from jaxdist.models.transformer import Transformer
from jaxdist.parallel import execution
from jaxdist.parallel import mesh as meshes
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.protocols.model_spec import describe
from jaxdist.trainer import compose, exit_code
from support.inference import (  # noqa: F401  pytest finds them here
    STEPS,
    TOP,
    alone_fixture,
    command_fixture,
    here_fixture,
    tiny_config,
    trained_fixture,
)
from support.models import TINY
from support.objectives import MODEL, SGD, Preference, batch_of_pairs
from support.paths import DATA

pytestmark = pytest.mark.usefixtures("shared_steps")


def test_the_average_is_read_and_nothing_else(trained, here, alone):
    state = trained[1]
    average, weights = (
        jax.tree.leaves(jax.device_get(t)) for t in (state.ema, state.trainable)
    )
    assert any((a != w).any() for a, w in zip(average, weights, strict=True))
    for run in (here, alone):
        found = jax.tree.leaves(run.state.trainable)
        for a, b in zip(average, found, strict=True):
            np.testing.assert_array_equal(a, b)
        assert run.state.opt_state is None
        assert run.state.ema is None
        assert int(run.state.step) == STEPS
    assert here.built.mesh.shape["fsdp"] == here.built.mesh.shape["tensor"] == 2
    assert alone.built.mesh.size == 1
    assert repr(here) == f"TrainedRun(step {STEPS}, {str(here.folder)!r})"
    leaves = jax.tree.leaves(here.state.trainable)
    where = jax.tree.leaves(here.built.shardings.trainable)
    assert all(x.sharding == s for x, s in zip(leaves, where, strict=True))
    assert not all(s.is_fully_replicated for s in where)


def test_the_held_out_loss_is_that_of_the_run(trained, here, alone):
    rows = [json.loads(line) for line in (trained[0] / "metrics.jsonl").open()]
    logged = next(row for row in rows if "eval_loss" in row)
    seen = []
    for run in (here, alone):
        found = run.evaluate(watch=lambda *batch: seen.append(batch))
        assert found.loss == pytest.approx(logged["eval_loss"], rel=1e-6)
        assert found.tokens == logged["eval_tokens"] > 1000
        assert found.step == logged["step"] == STEPS
        assert found.perplexity == pytest.approx(math.exp(found.loss))
        # a token is a byte
        assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    assert seen[-1][0] == seen[-1][1] > 1
    assert alone.evaluate(validation_tokens=100).tokens == 100


def test_any_mesh_writes_the_same_text(here, alone):
    prompts = ["the cat ", "é on"]
    # more rows than a batch
    options = {"max_tokens": 12, "sampling": TOP, "seed": 5, "num_samples": 5}
    found = alone.generate(prompts, **options)
    assert [len(samples) for samples in found] == [5, 5]
    texts = [[sample.text for sample in samples] for samples in found]
    assert all(
        text.startswith(p)
        for p, some in zip(prompts, texts, strict=True)
        for text in some
    )
    assert len({tuple(s.tokens) for samples in found for s in samples}) == 10
    assert all(
        sample.tokens.size == 12 and not sample.ended
        for some in found
        for sample in some
    )
    assert [
        [s.text for s in some] for some in here.generate(prompts, **options)
    ] == texts


def test_a_mesh_may_be_chosen_and_unfit_ones_are_replaced(trained):
    config = tiny_config(trained[0].parent)
    eight, two = jax.devices(), jax.devices()[:2]
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert layout.fitted(config, eight, None).config.mesh == config.mesh
    fitted = layout.fitted(config, two, None).config
    assert fitted.mesh == MeshConfig(data=1, fsdp=2)
    assert (fitted.batch.global_size, fitted.batch.accumulation) == (4, 1)
    staged = MeshConfig(pipeline=2, data=1, context=2, tensor=2)
    # of a chunk's layers, with padding: 5 divide no whole stack here
    again = RematConfig("full", every=5)
    fitted = layout.fitted(
        dataclasses.replace(config, mesh=staged, remat=again), eight, None
    ).config
    assert fitted.mesh == MeshConfig(data=1, fsdp=2, context=2, tensor=2)
    odd = dataclasses.replace(config, model={**config.model, "d_model": 15})
    assert layout.fitted(odd, two, None).config.mesh == MeshConfig()
    with pytest.raises(ConfigError, match="mesh"):
        loading.load_run(trained[0], mesh=MeshConfig(tensor=3))


# --- how probable texts are -----------------------------------------------------------


def test_windows_score_every_token_once_and_give_it_all_context_there_is_room_for():
    text = np.arange(10)
    found = windows(np.array([77]), text, 4)  # the example of lm_eval's documentation
    inputs = [window.tokens[:-1].tolist() for window in found]
    assert inputs == [[77, 0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert [w.tokens[w.known :].tolist() for w in found] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    for before in range(1, 12):
        for after in range(9):
            for longest in (1, 2, 3, 5, 20):
                whole = np.arange(before + after)
                found = windows(whole[:before], whole[before:], longest)
                scored = [window.tokens[window.known :] for window in found]
                assert np.concatenate([[], *scored]).tolist() == whole[before:].tolist()
                for window in found:
                    last = window.tokens[-1]
                    # all that there is room for
                    full = whole[max(0, last - longest) : last + 1]
                    assert window.tokens.tolist() == full.tolist()
                    assert window.known >= 1


def direct(run, inputs: bytes, targets: bytes) -> np.ndarray:
    """Computes log-probabilities [S, V] and those of targets [S] in a forward pass."""
    tokens = np.frombuffer(inputs, np.uint8).astype(np.int32)[None]
    batch = {
        "tokens": tokens,
        "positions": np.arange(tokens.shape[1], dtype=np.int32)[None],
    }
    state = jax.device_get((run.state.trainable, run.state.model_state))
    logits = jax.jit(lambda arrays, b: run.spec.assemble(*arrays).forward(b))(
        state, batch
    )[0]
    every = np.asarray(logits, np.float64)
    every -= np.log(np.exp(every).sum(-1, keepdims=True))
    return every, every[np.arange(len(targets)), np.frombuffer(targets, np.uint8)]


LONG = "the cat sat on a mat while two dogs ran past old t"


def test_scores_are_those_of_the_whole_forward_pass(here, alone):
    assert here.built.mesh.size == 8
    assert alone.built.mesh.size == 1
    assert here.longest == 32 < len(LONG) == 50
    pairs = [
        ("the cat ", "sat"),
        ("the cat", " sat"),
        ("a é", "é dog"),
        ("", "cat"),
        ("a", ""),
        ("", LONG),
    ]
    # more than one batch
    pairs += [(LONG, " dogs")] + [("the mat", f" {n} cats") for n in range(9)]
    batches = []
    scores = [
        run.score(pairs, watch=lambda *b: batches.append(b)) for run in (here, alone)
    ]
    assert batches[-1][0] == batches[-1][1] > 2
    for a, b in zip(*scores, strict=True):
        assert a.log_probability == pytest.approx(b.log_probability, rel=1e-5)
        assert a[1:] == b[1:]
    found = scores[1]
    assert found[0] == found[1]  # the space goes to the word
    assert found[4] == (0.0, True, 0)
    for number, (context, text) in enumerate(pairs[:4]):
        kept = context.rstrip() or "\n"
        whole = (kept + context[len(context.rstrip()) :] + text).encode()
        size = len(whole) - len(kept.encode())
        expected = direct(alone, whole[:-1], whole[1:])[1][-size:]
        assert found[number].tokens == size
        assert found[number].log_probability == pytest.approx(expected.sum(), rel=1e-5)
    whole = b"\n" + LONG.encode()  # 50 to score, 32 at a time
    parts = (
        direct(alone, whole[:32], whole[1:33])[1],
        direct(alone, whole[18:50], whole[19:51])[1][-18:],
    )
    assert found[5].tokens == 50
    assert found[5].log_probability == pytest.approx(
        sum(part.sum() for part in parts), rel=1e-5
    )
    whole = (LONG + " dogs").encode()  # cut off on the left
    expected = direct(alone, whole[-33:-1], whole[-32:])[1][-5:].sum()
    assert found[6].log_probability == pytest.approx(expected, rel=1e-5)


def test_logits_are_those_of_the_models_own_forward_pass(here, alone):
    ids = np.random.default_rng(0).integers(0, 256, (3, 10))  # 3 rows, 4 batch shards
    positions = np.tile(np.arange(10, dtype=np.int32), (3, 1))
    batch = {"tokens": ids.astype(np.int32), "positions": positions}
    forward = jax.jit(lambda model, batch: model.forward(batch))
    expected = np.asarray(forward(alone.model, batch))
    assert np.abs(expected).max() > 0.1
    for run in (here, alone):
        found = run.logits(ids)
        assert (found.shape, found.dtype) == ((3, 10, 256), np.float32)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(found.sharding.device_set) == 1
    assert len(here.logits(ids).sharding.device_set) == 8
    # two documents in a row are each as they are alone
    segments = np.where(positions < 4, 1, 2)
    own = positions - 4 * (segments - 1)
    packed = np.asarray(here.logits(ids, positions=own, segment_ids=segments))
    np.testing.assert_allclose(packed[:, :4], expected[:, :4], atol=1e-5)
    np.testing.assert_allclose(packed[:, 4:], alone.logits(ids[:, 4:]), atol=1e-5)
    assert np.abs(packed - expected).max() > 1e-3


def test_logits_are_computed_in_the_precision_of_the_run(here, alone):
    ids = np.random.default_rng(0).integers(0, 256, (2, 8))
    precision = dataclasses.replace(alone.config.precision, compute="bfloat16")
    low = [
        dataclasses.replace(
            run, config=dataclasses.replace(run.config, precision=precision)
        )
        for run in (here, alone)
    ]
    batch = {
        "tokens": ids.astype(np.int32),
        "positions": np.tile(np.arange(8, dtype=np.int32), (2, 1)),
    }

    def forward(arrays, batch):
        with execution.activate(compute="bfloat16"):
            return alone.spec.assemble(*arrays).forward(batch)

    expected = np.asarray(jax.jit(forward)(alone.state.model_arrays, batch))
    exact = np.asarray(alone.logits(ids))
    error = np.abs(expected - exact).max()
    assert 1e-4 < error < 0.1
    np.testing.assert_allclose(low[1].logits(ids), expected, atol=error / 10)
    assert 0 < np.abs(np.asarray(low[0].logits(ids)) - exact).max() < 3 * error


@pytest.mark.parametrize(
    ("ids", "options", "faults"),
    [
        ([1, 2], {}, [r"tokens is int64\[2\]; required integers .* give \[ids\]"]),
        (np.ones((1, 2)), {}, [r"tokens is float64\[1, 2\]; required integers"]),
        (np.ones((0, 2), int), {}, [r"tokens is int64\[0, 2\]; .* at least one"]),
        ([[1, 256]], {}, [r"tokens: 256 at \[0, 1\] is outside of 0 to 255"]),
        ([[-1, 0]], {}, [r"tokens: -1 at \[0, 0\] is outside of 0 to 255"]),
        (
            [[1, 2]],
            {"positions": [[-1, 0]], "segment_ids": [[1]]},
            [
                r"segment_ids is \[1, 1\], and the ids are \[1, 2\]",
                r"positions: -1 at \[0, 0\] is outside",
            ],
        ),
    ],
)
def test_ids_without_logits_are_refused(here, ids, options, faults):
    with pytest.raises(ConfigError) as caught:
        here.logits(ids, **options)
    assert len(caught.value.faults) == len(faults)
    for fault, found in zip(faults, caught.value.faults, strict=True):
        assert re.search(fault, found), found


def test_a_sequence_that_devices_cannot_split_is_refused(trained, alone):
    run = loading.load_run(trained[0], mesh=MeshConfig(context=2, fsdp=4))
    with pytest.raises(ConfigError, match="mesh.context=2 does not divide 3 tokens"):
        run.logits([[1, 2, 3]])
    found = run.logits([[1, 2, 3, 4]])
    np.testing.assert_allclose(found, alone.logits([[1, 2, 3, 4]]), atol=1e-5)


def test_a_row_beyond_learned_positions_is_refused():
    config = dataclasses.replace(TINY, positions="learned", max_positions=4)
    spec = describe(lambda rngs: Transformer(config, rngs=rngs))
    mesh = meshes.build_mesh(MeshConfig(), jax.devices()[:1])
    function = LogitsFunction(spec, mesh, execution.ONE_DEVICE, "float32")
    with pytest.raises(ConfigError, match="5 tokens exceed .* longest sequence of 4"):
        function(None, np.ones((1, 5), int))
    with pytest.raises(ConfigError, match=r"positions: 4 at \[0, 1\] is outside of 0"):
        function(None, [[1, 1]], positions=[[0, 4]])


def test_models_without_logits_are_named():
    mesh = meshes.build_mesh(MeshConfig(), jax.devices()[:1])

    def function(model_class):
        spec = describe(lambda rngs: model_class(rngs=rngs))
        weights = spec.init_params(jax.random.key(0))
        return LogitsFunction(spec, mesh, execution.ONE_DEVICE, "float32"), weights

    class Plain(nnx.Module):
        def __init__(self, *, rngs):
            self.kernel = nnx.Param(jnp.ones(3))

        def loss(self, batch, key):
            return self.kernel.sum()

    class Image(Plain):
        def forward(self, batch):
            return batch["image"] @ self.kernel[...]

    class Mean(Plain):
        def forward(self, batch):
            return batch["tokens"].mean(1, keepdims=True)

    with pytest.raises(ConfigError, match=r"Plain has no method forward\(batch\)"):
        function(Plain)
    for model_class, fault in (
        (Image, "Image.forward reads batch.'image'., which is neither of tokens, pos"),
        (
            Mean,
            r"Mean.forward returned \[1, 1\]; required \[B, S, V\] with B=1 and S=2",
        ),
    ):
        compute, weights = function(model_class)
        with pytest.raises(ConfigError, match=fault):
            compute(weights, [[0, 1]])


def test_greedy_is_what_greedy_decoding_writes(here, alone):
    greedy = SamplingConfig(temperature=0.0)
    for run in (here, alone):
        (text,) = run.complete(["the cat"], max_tokens=6, sampling=greedy)
        assert len(text) == 6
        assert text.isascii()
        other = text[:-1] + chr(ord(text[-1]) ^ 1)
        assert [
            score.greedy for score in run.score([("the cat", text), ("the cat", other)])
        ] == [True, False]


def test_an_answer_is_what_is_generated_up_to_the_first_stop(here):
    prompts, options = (
        ["the cat", "é on", "dogs"],
        {"max_tokens": 90, "sampling": TOP, "seed": 5},
    )
    whole = [
        s.text[len(p) :]
        for p, (s,) in zip(prompts, here.generate(prompts, **options), strict=True)
    ]
    assert all(len(text) > 60 for text in whole)
    assert here.complete(prompts, longest=200, **options) == whole
    stop = next(
        whole[0][i : i + 3]
        for i in range(40, 80)
        if whole[0].find(whole[0][i : i + 3]) == i
    )
    # in rounds of 32, 58
    found = here.complete(prompts, stops=["", stop, "\0"], longest=200, **options)
    assert 40 <= len(found[0]) < 80
    assert found[0] == whole[0][: whole[0].find(stop)]
    assert found == [text.partition(stop)[0].partition("\0")[0] for text in whole]
    # Half of what the model can hold is left to the prompt, which is cut off on the
    # left.
    (cut,) = here.complete([LONG], **options)
    (same,) = here.complete([LONG[-16:]], **options)
    assert cut == same
    assert 0 < len(cut.encode()) <= 48


FOLDERS = DATA / "huggingface"  # made by the library itself: see make.py there


@pytest.mark.parametrize(("family", "axes"), [("smollm", {}), ("gemma3", {"fsdp": 4})])
def test_published_models_score_as_their_own_library_says(family, axes, tmp_path):
    flags = [
        "--from",
        FOLDERS / family,
        "--to",
        tmp_path / "work",
        "--format",
        "jaxdist",
    ]
    assert convert.main([str(flag) for flag in flags]) == 0
    run = loading.load_run(tmp_path / "work", mesh=MeshConfig(**axes))
    assert run.built.mesh.size == 8
    assert ("local" in run.config.model["layer_pattern"]) == (family == "gemma3")
    tokens, logits = (
        np.load(FOLDERS / family / f"{name}.npy") for name in ("tokens", "logits")
    )
    parts = [window for row in tokens for window in windows(row[:1], row[1:], 64)]
    found = run._score(run.state.model_arrays, parts, longest=64)
    every = logits.astype(np.float64)
    every -= np.log(np.exp(every).sum(-1, keepdims=True))
    for row, own, score in zip(tokens, every, found, strict=True):
        expected = own[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(score.log_probabilities, expected, atol=1e-5)
        assert score.likeliest.tolist() == (own[:-1].argmax(-1) == row[1:]).tolist()
    np.testing.assert_allclose(run.logits(tokens), logits, atol=1e-5)
    # it has a tokenizer.json, whose merges the bits per byte take into account
    if family == "smollm":
        text = "the thin cat in the inn " * 9
        (tmp_path / "held.txt").write_text(text)
        file, cache = str(tmp_path / "held.txt"), str(tmp_path / "cache")
        data = dataclasses.replace(
            run.config.data,
            source="text",
            path=file,
            validation_path=file,
            cache_dir=cache,
        )
        batch = dataclasses.replace(run.config.batch, sequence_length=32)
        config = dataclasses.replace(run.config, data=data, batch=batch)
        held = dataclasses.replace(run, config=config).evaluate()
        count = len(run.tokenizer.encode(text)) + 1  # and the end of the document
        assert count < len(text)
        assert held.tokens == count - 1
        assert held.bytes_per_token == pytest.approx(len(text) / count)
        assert held.bits_per_byte == pytest.approx(
            held.loss * count / len(text) / math.log(2)
        )


def test_a_text_begins_as_its_tokenizer_says(alone):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = bpe.BpeTokenizer(made.to_str())
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    begins = bpe.BpeTokenizer(made.to_str())
    assert (
        plain.begin_of_document,
        begins.begin_of_document,
        begins.end_of_document,
    ) == (None, 0, 1)
    expected = {
        plain: ([2, 3], [1], ([2], [3]), ([1], [2])),
        begins: ([0, 2, 3], [0], ([0, 2], [3]), ([0], [2])),
    }
    for tokenizer, ids in expected.items():
        run = dataclasses.replace(alone)
        vars(run)["tokenizer"] = tokenizer
        pairs = [
            tuple(x.tolist() for x in run._encode_pair(*pair))
            for pair in (("a", " b"), ("", "a"))
        ]
        assert (run._encode("a b").tolist(), run._encode("").tolist(), *pairs) == ids


def test_generate_prints_the_text(trained, here, command):
    flags = (
        "--workdir",
        trained[0],
        "--prompt",
        "a cat",
        "--max-tokens",
        8,
        "--temperature",
        0,
    )
    code, out, err = command(
        generate.main, *flags, "--mesh", "fsdp=2,context=2,tensor=2"
    )
    assert "context 2" in err
    greedy = SamplingConfig(temperature=0.0)
    assert (code, out) == (
        0,
        here.generate(["a cat"], max_tokens=8, sampling=greedy)[0][0].text + "\n",
    )
    assert f"step {STEPS}" in err


def test_evaluate_prints_json(trained, command):
    code, out, _ = command(
        evaluate.main, "--workdir", trained[0], "--json", "--step", STEPS
    )
    found = json.loads(out)
    assert code == 0
    assert found["step"] == STEPS
    assert found["tokens"] > 1000
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    strange = trained_run.HeldOut(1, math.nan, 2, math.inf, None, None)
    assert json.loads(evaluate._as_json(strange._asdict()))["perplexity"] is None
    assert "perplexity inf" in evaluate._as_text(strange)


def test_a_loss_on_the_default_corpus_is_named(trained, command, alone, monkeypatch):
    _, _, err = command(evaluate.main, "--workdir", trained[0])
    assert "warning" not in err
    data = dataclasses.replace(alone.config.data, source="stdlib")
    config = dataclasses.replace(alone.config, data=data)
    state = alone.state._replace(step=np.int32(0))  # of a converted model
    converted = dataclasses.replace(alone, config=config, state=state)
    monkeypatch.setattr(loading, "load_run", lambda **_: converted)
    found = trained_run.HeldOut(1, 1.0, 2, math.e, None, None)
    monkeypatch.setattr(trained_run.TrainedRun, "evaluate", lambda *_, **__: found)
    _, _, err = command(evaluate.main, "--workdir", trained[0])
    assert "this is the loss on Python's standard library" in err


def test_what_cannot_be_is_told_with_its_exit_code(trained, tmp_path, command):
    flags = "--workdir", trained[0], "--prompt", "a", "--step", 3
    code, _, err = command(
        lambda words: exit_code.exit_code(lambda: generate.main(words)), *flags
    )
    assert code == 77
    assert "there is no checkpoint of step 3" in err
    (tmp_path / "config.json").write_text((trained[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        command(evaluate.main, "--workdir", tmp_path)
    for arguments, text in (
        (("--workdir", tmp_path / "none", "--prompt", "a"), "no run there"),
        (("--workdir", trained[0]), "--prompt"),
        (("--workdir", trained[0], "--prompt", "a", "--top-p", 2), "top_p: got 2.0"),
        (("--workdir", trained[0], "--prompt", ""), "empty"),
        (
            ("--workdir", trained[0], "--prompt", "a", "--num-samples", 0),
            "num_samples=0",
        ),
        (
            ("--workdir", trained[0], "--prompt", "a", "--mesh", "fspd=2"),
            "Did you mean fsdp",
        ),
        (("--workdir", trained[0], "--prompt", "a", "--mesh", "fsdp"), "fsdp"),
        (
            ("--workdir", trained[0], "--prompt", "a", "--mesh", "pipeline=2"),
            "without a pipeline; leave it out",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            command(generate.main, *arguments)
    for flags, text in (
        (("--limit", 2), "go with --tasks"),
        (("--tasks", "python_lines", "--limit", 0), "--limit=0"),
        (
            ("--tasks", "python_lines", "--validation-tokens", 9),
            "does not go with --tasks",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            command(evaluate.main, "--workdir", trained[0], *flags)


def test_a_damaged_checkpoint_is_passed_over(trained, here, tmp_path):
    config = dataclasses.replace(here.config.checkpoint, asynchronous=False)
    (tmp_path / "config.json").write_text((trained[0] / "config.json").read_text())
    with CheckpointManager(tmp_path / "checkpoints", config) as store:
        state = trained[1]
        for step in (1, 2):
            store.save(step, state._replace(step=state.step * 0 + step), {})
        assert all(saved.ok for saved in store.poll())
    for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    lines = []
    loading.load_run(tmp_path, log=lines.append)
    assert "checkpoint 2 cannot be used" in lines[0]


# --- text as it is drawn --------------------------------------------------------------


def test_a_stream_is_what_generate_gives_at_once(alone):
    for prompt, seed in (("the cat ", 5), ("é on", 6)):
        ((whole,),) = alone.generate([prompt], max_tokens=20, sampling=TOP, seed=seed)
        parts = list(alone.stream(prompt, max_tokens=20, sampling=TOP, seed=seed))
        assert prompt + "".join(parts) == whole.text
        assert 1 < len(parts) <= 3


def test_prompts_come_from_files_and_from_a_terminal(
    trained, tmp_path, capsys, monkeypatch
):
    (tmp_path / "a.txt").write_text("the cat")
    flags = ["--workdir", str(trained[0]), "--max-tokens", "9", "--temperature", "0"]
    assert generate.main([*flags, "--prompt-file", str(tmp_path / "a.txt")]) == 0
    by_file = capsys.readouterr().out
    assert generate.main([*flags, "--prompt", "the cat"]) == 0
    assert capsys.readouterr().out == by_file
    assert by_file.startswith("the cat")
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nthe cat\n"))
    assert generate.main([*flags, "--interactive"]) == 0
    said = capsys.readouterr()
    answer = by_file.removeprefix("the cat")
    # an empty line is no prompt
    assert said.out == f"{answer}\n{answer}"
    assert "error: " in said.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "give --prompt TEXT or --prompt-file FILE"),
        (
            ["--interactive", "--prompt", "a"],
            "--interactive reads its prompts: leave out --prompt",
        ),
        (["--interactive", "--num-samples", "2"], "leave out --num-samples=2"),
        (
            ["--prompt-file", "/none"],
            "--prompt-file /none: No such file or directory; give",
        ),
    ],
)
def test_prompts_that_are_none_are_refused(flags, text, capsys):
    assert (
        exit_code.exit_code(lambda: generate.main(["--workdir", "none", *flags])) == 78
    )
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_frozen_modules_are_read_where_the_objective_needs_them(tmp_path, monkeypatch):
    describe = compose.model_spec

    def with_reference(run, build=None):
        spec = describe(run, build)
        return spec.trained_for(Preference(), {"reference": spec})

    monkeypatch.setattr(compose, "model_spec", with_reference)
    batch = batch_of_pairs()
    del batch["sample"]
    devices = jax.devices()[:1]

    def make(rngs):
        return Transformer(MODEL, rngs=rngs)

    fitted = jaxdist.fit(
        make, SGD, batch, steps=1, devices=devices, folder=tmp_path, batch_size=8
    )
    whole, policy = [
        jaxdist.load_run(
            fitted.folder,
            model=make,
            devices=devices,
            modules=modules,
            log=lambda _: None,
        )
        for modules in (True, False)
    ]
    assert whole.evaluate(batch).tokens == 16
    assert [*whole.state.modules] == ["reference"]
    assert not policy.state.modules
    written = [run.generate_tokens([[1, 2]], max_tokens=4) for run in (whole, policy)]
    np.testing.assert_array_equal(written[0][0].tokens, written[1][0].tokens)


def test_what_writes_text_reads_no_frozen_module(trained, command, monkeypatch):
    load = loading.load_run
    asked = []

    def watched(*arguments, **options):
        asked.append(options["modules"])
        return load(*arguments, **options)

    monkeypatch.setattr(loading, "load_run", watched)
    code, *_ = command(
        generate.main, "--workdir", trained[0], "--prompt", "cat", "--max-tokens", 1
    )
    assert code == 0
    assert asked == [False]
