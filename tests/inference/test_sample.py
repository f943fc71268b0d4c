"""The sample at the end of a run that trains on chats: a chat, and its answer's end."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from jaxdist.data import DataConfig, open_dataset
from jaxdist.data.chat import open_encoder
from jaxdist.inference import sample
from jaxdist.inference.decoding import Generation
from jaxdist.storage.untrusted import visible
from jaxdist.trainer.callbacks import RunEnd
from support.chats import TEMPLATES, rows, turn, write_rows, write_tokenizer

pytest.importorskip("jinja2", reason="extra `chat` is not installed")
pytest.importorskip("tokenizers", reason="extra `chat` is not installed")


class Answers:
    """A generator that answers each prompt with the same tokens, and keeps its calls."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.calls = []

    def __call__(self, weights, prompts, **options):
        self.calls.append((prompts, options))
        return [Generation(self.tokens, ended=True)]


@pytest.fixture(name="cache", scope="module")
def cache_fixture(tmp_path_factory):
    """Makes a folder that keeps which files were tried out: each trial is a process."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def sampled(tmp_path, monkeypatch, cache):
    """Returns a function that writes the sample of a run on chats.

    It gives the prompt's tokens, the options of the generator, the text, and the run's
    encoder of chats.
    """

    def write(template, kind, prompt="\n", share=100):
        path = write_rows(tmp_path / "rows.jsonl", rows(kind))
        data = DataConfig(
            source="jsonl",
            path=str(path),
            format="chat",
            packing="documents",
            tokenizer=str(write_tokenizer(tmp_path / "model", template, begins=True)),
            cache_dir=cache,
            validation_share=share,
        )
        folder = tmp_path / "run"
        dataset = open_dataset(data, sequence_length=128, folder=folder, log=print)
        assert bool(dataset.num_validation_tokens) == bool(share)
        encoder = open_encoder(data, dataset.tokenizer, folder)
        run = mock.MagicMock(folder=folder, dataset=dataset)
        run.config = SimpleNamespace(
            data=data,
            seed=0,
            train=SimpleNamespace(sample_tokens="auto", sample_prompt=prompt),
            precision=SimpleNamespace(compute="float32"),
        )
        run.spec.abstract_model.max_length = None
        generate = Answers(dataset.tokenizer.encode("it holds values"))
        monkeypatch.setattr(sample, "text_generator", lambda *_, **__: generate)
        callback = sample.Sample()
        callback.on_start(run)
        callback.on_end(RunEnd(state=None))
        ((prompts, options),) = generate.calls
        return prompts[0], options, (folder / "sample.txt").read_text(), encoder

    return write


@pytest.mark.parametrize("name", ["marked", "headers"])
def test_a_users_turn_is_answered_to_its_end(sampled, name):
    question = "what is a list?"
    tokens, options, text, encoder = sampled(TEMPLATES[name], "messages", question)
    assert tokens.tolist() == encoder.prompt([turn("user", question)]).tolist()
    rendered = encoder.template.render([turn("user", question)], prompts=True).text
    assert "assistant" in rendered.partition(question)[2]
    # with the special tokens, which say whose turn it is
    assert text == rendered + "it holds values"
    end = "<|eot_id|>" if name == "headers" else "<|im_end|>"
    ends = {encoder.tokenizer.special_tokens[i] for i in options["sampling"].end_tokens}
    assert end in ends


@pytest.mark.parametrize(
    ("kind", "share"),
    [("messages", 100), ("messages", 0), ("prompt-completion", 100), ("text", 100)],
)
def test_without_a_prompt_a_question_of_the_data_is_answered(sampled, kind, share):
    tokens, options, text, encoder = sampled(TEMPLATES["plain"], kind, share=share)
    prompts = []
    for row in rows(kind):
        if kind == "text":
            begin = [encoder.tokenizer.begin_of_document]
            ids = [*begin, *encoder.tokenizer.encode(row["prompt"])]
        else:
            messages = row.get("messages") or [*row["prompt"], *row["completion"]]
            roles = [message["role"] for message in messages]
            end = len(row["prompt"]) if kind != "messages" else roles.index("assistant")
            ids = encoder.prompt(messages[:end]).tolist()
        prompts.append([int(i) for i in ids])
    assert tokens.tolist() in prompts
    assert text.endswith("it holds values")
    assert options["sampling"].end_tokens == encoder.end_ids
    assert options["sampling"].end_tokens


def test_a_row_without_learned_tokens_has_no_question():
    dataset = mock.MagicMock(num_validation_tokens=0)
    empty = np.zeros((1, 8), np.int32)
    dataset.read.return_value = dict.fromkeys(
        ("weights", "segment_ids", "tokens"), empty
    )
    assert not sample._question(dataset).size


def test_control_characters_of_a_sample_move_no_cursor():
    assert visible("\x02user\n\ta\x1b[2J\x7f\x9b\x03é") == "␂user\n\ta␛[2J␡\ufffd␃é"
