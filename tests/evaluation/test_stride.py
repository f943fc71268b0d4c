"""`evaluate --stride`, compared with scores of each token after its own window."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxdist import evaluate, library
from jaxdist.config import ConfigError
from jaxdist.evaluation import held_out_set, loading
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.trainer import compose, exit_code
from support.inference import (  # noqa: F401  pytest finds the fixtures here
    WORDS,
    alone_fixture,
    command_fixture,
    here_fixture,
    tiny_config,
    trained_fixture,
)

pytestmark = pytest.mark.usefixtures("shared_steps")

LENGTH_S = 32
# tokens of documents
SIZES = (1, 2, 20, LENGTH_S, LENGTH_S + 1, LENGTH_S + 2, 3 * LENGTH_S + 1, 201)


@pytest.fixture(scope="module", name="documents")
def documents_fixture(tmp_path_factory):
    """Returns a file of documents and their bytes; one document is empty."""
    order = np.random.default_rng(3).integers(len(WORDS), size=500)
    text, begin, texts = " ".join(WORDS[i] for i in order), 0, [""]
    for size in SIZES:
        texts.append(text[begin : begin + size])
        begin += size
    file = tmp_path_factory.mktemp("documents") / "held.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file, [
        np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts
    ]


def on(run, file, **options):
    """Returns the run with these documents held out."""
    data = dataclasses.replace(
        run.config.data,
        source="jsonl",
        path=str(file),
        validation_path=str(file),
        **options,
    )
    return dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))


def scorer(run):
    """Makes a function that scores each token in a row with its exact context."""
    arrays = jax.device_get((run.state.trainable, run.state.model_state))
    forward = jax.jit(lambda arrays, batch: run.spec.assemble(*arrays).forward(batch))

    def scores(documents, stride: int, known: list[int] | None = None) -> np.ndarray:
        """Scores tokens, [scored], without the `known` first ones of a document."""
        pairs = []
        for tokens, first in zip(documents, known or [1] * len(documents), strict=True):
            for place in range(first, len(tokens)):
                begin = stride * max(0, -(-(place - LENGTH_S) // stride))
                pairs.append((tokens[begin:place], tokens[place]))
        inputs = np.zeros((512, LENGTH_S), np.int32)
        for row, (before, _) in enumerate(pairs):
            inputs[row, : len(before)] = before
        positions = np.tile(np.arange(LENGTH_S, dtype=np.int32), (len(inputs), 1))
        logits = np.asarray(
            forward(arrays, {"tokens": inputs, "positions": positions}), np.float64
        )
        last = logits[np.arange(len(pairs)), [len(before) - 1 for before, _ in pairs]]
        targets = last[np.arange(len(pairs)), [target for _, target in pairs]]
        return targets - np.log(np.exp(last).sum(-1))

    return scores


@pytest.fixture(scope="module", name="scores")
def scores_fixture(alone):
    return scorer(alone)


@pytest.mark.parametrize(
    "packing", [pytest.param("window", marks=pytest.mark.slow), "documents"]
)
def test_each_token_is_scored_after_its_own_window(
    here, alone, scores, documents, packing
):
    file, texts = documents
    count, losses = sum(size - 1 for size in SIZES), []
    for stride in (1, 7, 16, 31, LENGTH_S):
        expected = scores(texts, stride)
        assert len(expected) == count
        losses.append(-math.fsum(expected) / count)
        for run in (alone, here) if stride in (7, LENGTH_S) else (alone,):
            found = on(run, file, packing=packing).evaluate(stride=stride)
            assert found.loss == pytest.approx(losses[-1], rel=1e-5)
            assert found.tokens == count
            assert found.perplexity == pytest.approx(math.exp(found.loss))
            # a token is a byte
            assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
            # without that of one token, and that of none
            assert found.documents == len(SIZES) - 1
            assert found.windows == sum(
                1 + -(-max(size - 1 - LENGTH_S, 0) // stride) for size in SIZES[1:]
            )
    assert np.ptp(losses) > 1e-4  # the stride is seen: twice what is allowed above


def test_a_split_sequence_and_few_targets(trained, alone, documents):
    one = on(alone, documents[0])
    split = loading.load_run(trained[0], mesh=MeshConfig(context=2, fsdp=4))
    again = on(split, documents[0]).evaluate(stride=5)
    assert again.loss == pytest.approx(one.evaluate(stride=5).loss, rel=1e-5)
    assert one.evaluate(stride=5, validation_tokens=50).tokens == 50
    plain = one.evaluate()
    assert (plain.windows, plain.documents) == (None, None)


def test_the_command_scores_by_a_stride(trained, here, command):
    code, out, _ = command(
        evaluate.main, "--workdir", trained[0], "--json", "--stride", 8
    )
    found, same = json.loads(out), here.evaluate(stride=8)
    assert code == 0
    assert found == json.loads(json.dumps(same._asdict())) | {"stride": 8}
    _, text, _ = command(evaluate.main, "--workdir", trained[0], "--stride", 8)
    assert text.endswith(f" ({found['windows']} windows of 1 documents)\n")


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--stride", 0), "--stride=0: must be >= 1"),
        (
            ("--stride", 33),
            "stride=33: required 1 to 32, the run's batch.sequence_length",
        ),
        (("--stride", 4, "--data", "x.npz"), "--data are arrays; leave out one"),
    ],
)
def test_a_stride_that_cannot_be_is_refused(trained, capsys, flags, fault):
    arguments = [str(word) for word in ("--workdir", trained[0], *flags)]
    assert exit_code.exit_code(lambda: evaluate.main(arguments)) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert fault in line


def test_the_command_scores_other_files(trained, alone, here, command, documents):
    file = documents[0]
    flags = ("--workdir", trained[0], "--json", "--data", file)
    code, out, _ = command(evaluate.main, *flags)
    found = json.loads(out)
    assert code == 0
    wanted = on(here, file).evaluate()
    assert found == json.loads(json.dumps(wanted._asdict())) | {"stride": None}
    assert found["tokens"] > sum(SIZES) // 2
    assert found["loss"] != pytest.approx(here.evaluate().loss, abs=1e-4)
    _, out, _ = command(evaluate.main, *flags, "--stride", 8)
    wanted = on(here, file).evaluate(stride=8)
    assert json.loads(out)["loss"] == pytest.approx(wanted.loss, rel=1e-6)
    _, out, _ = command(evaluate.main, *flags, "--validation-tokens", 50)
    assert json.loads(out)["tokens"] == 50


def test_other_files_may_be_texts(alone, tmp_path):
    text = " ".join(WORDS * 20)
    (tmp_path / "a.txt").write_text(text)
    found = alone.evaluate(str(tmp_path / "*.txt"))
    # a token is a byte, and no target is before the first
    assert len(text) - LENGTH_S <= found.tokens <= len(text) + 1
    assert found.perplexity == pytest.approx(math.exp(found.loss))


@pytest.mark.parametrize(
    ("changes", "files", "fault"),
    [
        ({"data.source": "digits"}, "a.txt", "not on documents; give arrays"),
        (
            {"objective.name": "dpo", "data.format": "preferences"},
            "pairs.jsonl",
            "known for its own pairs only",
        ),
        ({"data.format": "chat"}, "a.txt", "data a.txt: data.format=chat"),
    ],
)
def test_files_of_another_kind_are_refused(here, changes, files, fault):
    config = compose.with_overrides(here.config, changes)
    with pytest.raises(ConfigError, match=fault):
        held_out_set.on_files(config, files)


def test_texts_are_scored_in_the_same_windows(alone, scores, documents):
    texts = [text for text in documents[1] if len(text) > LENGTH_S]
    # a text without context follows a newline
    begun = [np.append(ord("\n"), text) for text in texts]
    pairs = [("", bytes(text.tolist()).decode()) for text in texts]
    for stride in (1, 7, LENGTH_S):
        found = alone.score(pairs, stride=stride)
        assert sum(score.tokens for score in found) == sum(map(len, texts))
        total = math.fsum(score.log_probability for score in found)
        assert total == pytest.approx(math.fsum(scores(begun, stride)), rel=1e-5)
    with pytest.raises(
        ConfigError, match="stride=33: required 1 to 32, tokens read at once"
    ):
        alone.score(pairs, stride=33)


def test_arrays_have_no_documents(alone):
    with pytest.raises(
        ConfigError,
        match="stride=4: windows slide over documents of tokens, and arrays",
    ):
        alone.evaluate({"x": np.zeros((8, 2))}, stride=4)


@pytest.mark.slow
def test_long_chats_of_a_model_with_experts(tmp_path):
    """Prompts are not scored, and padding does not reach the experts."""
    order = np.random.default_rng(5)

    def some(size: int) -> str:
        return " ".join(WORDS[i] for i in order.integers(len(WORDS), size=size))

    rows = [(some(9), some(7)) for _ in range(12)]
    chats = [{"prompt": before, "completion": f" {after}"} for before, after in rows]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = tiny_config(tmp_path)
    model = {
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_d_ff": 16,
        "capacity_factor": 1.0,
    }
    options = {
        "source": "jsonl",
        "format": "chat",
        "packing": "documents",
        "validation_path": str(file),
    }
    data = dataclasses.replace(config.data, path=str(file), **options)
    # some learned in 64
    batch = dataclasses.replace(config.batch, sequence_length=64, accumulation=1)
    config = dataclasses.replace(
        config, data=data, batch=batch, model={**config.model, **model}
    )
    library.run(config, tmp_path / "work")
    folder = tmp_path / "work"
    runs = [loading.load_run(folder, devices=jax.devices()[:1])]
    for axes in (
        {"fsdp": 2, "expert": 4},
        {"fsdp": 2, "expert": 2, "context": 2},
        {"tensor": 2, "expert": 4},
    ):
        runs.append(loading.load_run(folder, mesh=MeshConfig(data=1, **axes)))
    batch = dataclasses.replace(runs[0].config.batch, sequence_length=LENGTH_S)
    short = [
        dataclasses.replace(run, config=dataclasses.replace(run.config, batch=batch))
        for run in runs
    ]
    texts = [
        np.frombuffer((a + f" {b}").encode(), np.uint8).astype(np.int32)
        for a, b in rows
    ]
    known = [len(before) for before, _ in rows]
    count = sum(len(text) for text in texts) - sum(known)
    scores = scorer(runs[0])
    for stride in (5, LENGTH_S):
        expected = -math.fsum(scores(texts, stride, known)) / count
        for run in short:
            found = run.evaluate(stride=stride)
            assert (found.tokens, found.documents, found.bits_per_byte) == (
                count,
                len(rows),
                None,
            )
            assert found.loss == pytest.approx(expected, rel=1e-5)
