"""Chats as tokens: rendered by templates, what of them is learned, packed, cut off, and
what is refused.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="extra `chat` is not installed")
pytest.importorskip("tokenizers", reason="extra `chat` is not installed")

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, chat, chat_template, load_tokenizer, open_dataset
from jaxdist.data.dataset import Dataset
from jaxdist.data.sources.documents import Document
from support.chats import (
    HEADERS,
    MARKED,
    PLAIN,
    TEMPLATES,
    conversations,
    rows,
    turn,
    write_rows,
    write_tokenizer,
)
from support.paths import ROOT


@pytest.fixture(scope="module", autouse=True)
def tried_fixture(tmp_path_factory):
    """Keeps what was tried out for all tests: each trial is a process."""
    global CACHE
    CACHE = tmp_path_factory.mktemp("cache")


def encoder_of(folder, template="", **options):
    write_tokenizer(folder, template, **options)
    config = DataConfig(format="chat", cache_dir=str(CACHE))
    return chat.open_encoder(config, load_tokenizer(str(folder), cache=CACHE))


def encoded(encoder, some):
    """Returns ids, weights and counts of rows."""
    return encoder.encode(
        [Document(str(n), json.dumps(row)) for n, row in enumerate(some)]
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistants_turns_and_their_ends_are_learned(name, tmp_path):
    encoder = encoder_of(tmp_path / "model", TEMPLATES[name])
    tokenizer = encoder.tokenizer
    ids, weights, counts = encoded(encoder, rows("messages"))
    assert not counts
    end = "<|eot_id|>" if name == "headers" else "<|im_end|>\n"
    for messages, tokens, learned in zip(conversations(), ids, weights, strict=True):
        text = encoder.template.render(messages).text
        assert (
            tokens.tolist()
            == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
        )
        kept = tokenizer._tokenizer.decode(
            tokens[learned == 1].tolist(), skip_special_tokens=False
        )
        answers = (m["content"] for m in messages if m["role"] == "assistant")
        assert kept == "".join(
            (x.strip() if name == "headers" else x) + end for x in answers
        )
    stop = tokenizer._tokenizer.token_to_id(end.strip())
    assert stop in encoder.end_ids
    assert stop not in tokenizer.end_ids


ORDINARY = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"


def test_a_template_whose_turns_end_in_ordinary_text_is_warned_of(tmp_path):
    """Nothing then stops a generated answer at the end of its turn."""
    encoder = encoder_of(tmp_path / "model", ORDINARY)
    assert encoder.warning.startswith(
        "warning: after an answer the chat template writes '\\n\\n', without an end token: "
        "generation does not stop there. Write {{ eos_token }} after each answer, or"
    )
    for number, text in enumerate((*TEMPLATES.values(), ORDINARY + "<|end_of_text|>")):
        # The last one ends no turn, but the whole: a model that learns it stops.
        assert not encoder_of(tmp_path / str(number), text).warning
    lines = []
    (tmp_path / "ordinary.jinja").write_text(ORDINARY)
    template = {"chat_template": str(tmp_path / "ordinary.jinja")}
    options = options_of(tmp_path, tokenizer="bytes", **template)
    open_dataset(options, sequence_length=300, log=lines.append)
    assert encoder.warning in lines


def test_marks_and_prefixes_say_the_same(tmp_path):
    marked, plain = (
        encoder_of(tmp_path / name, text)
        for name, text in (("marked", MARKED), ("plain", PLAIN))
    )
    assert marked.template.marks_answers
    assert not plain.template.marks_answers
    for some in ("messages", "prompt-completion"):
        one, two = (encoded(encoder, rows(some)) for encoder in (marked, plain))
        for a, b in zip((*one[0], *one[1]), (*two[0], *two[1]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert marked.fingerprint != plain.fingerprint


KEPT = "(m.content if loop.last or m.role == 'user' else m.content[:3])"
FORGETFUL = PLAIN.replace("m.content", KEPT)


def test_a_template_that_rewrites_history_teaches_the_last_turn_alone(tmp_path):
    encoder = encoder_of(tmp_path / "model", FORGETFUL)
    _, weights, counts = encoded(encoder, rows("messages"))
    assert (
        counts["last"]
        == sum(sum(m["role"] == "assistant" for m in c) > 1 for c in conversations())
        > 0
    )
    assert (
        "8 rows: the chat template rewrites earlier turns" in encoder.notes(counts)[0]
    )
    _, prompted, _ = encoded(encoder, rows("prompt-completion"))
    for a, b in zip(weights, prompted, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.any()
    (_, (silent,), counts) = encoded(encoder, [{"messages": conversations()[2][:-1]}])
    assert not silent.any()
    assert counts["last"] == 1


@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_and_its_completion_as_texts_need_no_template(begins, tmp_path):
    encoder = encoder_of(tmp_path / "model", begins=begins)
    (ids, again), (learned, _), counts = encoded(
        encoder,
        [
            {"prompt": "what is", "completion": x}
            for x in (" a list", " a list<|end_of_text|>")
        ],
    )
    plain = encoder.tokenizer.encode("what is a list<|end_of_text|>").tolist()
    assert (
        ids.tolist()
        == again.tolist()
        == [encoder.tokenizer.begin_of_document] * begins + plain
    )
    assert learned.sum() == len(ids) - len(encoder.tokenizer.encode("what is")) - begins
    assert not counts
    _, (learned,), counts = encoded(
        encoder, [{"prompt": "what is in pyth", "completion": "on"}]
    )
    assert counts["mismatch"] == 1
    assert learned.any()
    with pytest.raises(
        ConfigError,
        match="0: messages need a chat template.*set data.chat_template=FILE",
    ):
        encoded(encoder, rows("messages", 1))


def test_templates_see_what_transformers_gives_them():
    source = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{ m.content }}{{ eos_token }}{{ m.more | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y')[:2] }}{{ tools }}{{ documents is none }}"
        "{% if messages | length > 3 %}{{ raise_exception('too long: <3') }}{% endif %}"
    )
    template = chat_template.ChatTemplate(source, {"eos_token": "</s>"})
    messages = [{**turn("user", "é"), "more": {"b": "<é>", "a": 1}}, turn("tool", "no")]
    rendered = template.render(messages)
    assert rendered.text == 'é</s>{"b": "<é>", "a": 1}\n20NoneTrue'
    assert rendered.spans == []
    with pytest.raises(ConfigError, match="its chat template fails: too long: <3"):
        template.render(messages * 2)
    assert (
        chat_template.ChatTemplate("{{ undefined_name }}x", {}).render([]).text == "x"
    )
    with pytest.raises(ConfigError, match="its chat template fails: .*bos_token"):
        chat_template.ChatTemplate("{{ bos_token + 'x' }}", {}).render([])


# --- As a data set --------------------------------------------------------------------


def options_of(tmp_path, template=PLAIN, some="messages", **changes):
    folder = tmp_path / "model"
    if not folder.exists():
        write_tokenizer(folder, template)
    path = tmp_path / "rows.jsonl"
    if not path.exists():
        write_rows(path, rows(some, 40))
    own = {
        "source": "jsonl",
        "path": str(path),
        "format": "chat",
        "packing": "documents",
    }
    own |= {"tokenizer": str(folder), "cache_dir": str(CACHE)}
    return DataConfig(**(own | changes))


LENGTH_S = 24  # of a row; an example is cut off after one token more


class OpenedChats(NamedTuple):
    """Forty chats as a data set, and as the encoder gives them one by one."""

    options: DataConfig
    dataset: Dataset
    lines: list[str]
    ids: list[np.ndarray]
    weights: list[np.ndarray]

    def learned(self) -> list[np.ndarray]:
        """Returns the weights of each example's targets that fit in a row."""
        return [weights[1 : LENGTH_S + 1] for weights in self.weights]


@pytest.fixture
def opened(tmp_path):
    options = options_of(tmp_path, validation_share=128)
    lines = []
    dataset = open_dataset(options, sequence_length=LENGTH_S, log=lines.append)
    encoder = chat.open_encoder(options, dataset.tokenizer)
    ids, weights, _ = encoded(encoder, rows("messages", 40))
    return OpenedChats(options, dataset, lines, ids, weights)


def batches_of(dataset):
    """Returns all rows of training and some of the held-out ones, with padding."""
    train = dataset.read("train", np.arange(dataset.num_train_samples))
    return train, dataset.read("validation", np.arange(50))


def segments_of(batch):
    """Yields tokens (with the last target), weights and positions of each example."""
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            last_target = batch["targets"][row][here][-1]
            tokens = (*batch["tokens"][row][here].tolist(), int(last_target))
            yield tokens, batch["weights"][row][here], batch["positions"][row][here]


def test_each_example_of_a_batch_has_its_weights_and_positions_from_zero(opened):
    expected = {
        tuple(ids[: LENGTH_S + 1].tolist()): learned
        for ids, learned in zip(opened.ids, opened.learned(), strict=True)
    }
    with_learned_tokens = {
        tokens for tokens, learned in expected.items() if learned.any()
    }
    assert 0 < len(with_learned_tokens) < len(expected), "some have none"

    found = set()
    for batch in batches_of(opened.dataset):
        for tokens, weights, positions in segments_of(batch):
            np.testing.assert_array_equal(weights, expected[tokens])
            np.testing.assert_array_equal(positions, np.arange(len(positions)))
            found.add(tokens)

    assert found == with_learned_tokens


def test_both_splits_together_learn_each_learned_token_once(opened):
    train, held_out = batches_of(opened.dataset)

    assert train["weights"].sum() == opened.dataset.num_train_tokens
    assert held_out["weights"].sum() == opened.dataset.num_validation_tokens
    assert opened.dataset.num_validation_tokens > 0
    learned = sum(int(weights.sum()) for weights in opened.learned())
    assert train["weights"].sum() + held_out["weights"].sum() == learned


def test_the_log_counts_examples_that_are_cut_off_or_left_out(opened):
    counts = re.findall(
        rf"(\d+) longer than {LENGTH_S + 1} tokens and cut off there "
        r"\((\d+) learned tokens lost\), (\d+) dropped without a learned token",
        " ".join(opened.lines),
    )
    assert len(counts) == 2, "a line for training and one for held-out examples"

    cut_off, lost, left_out = np.array(counts, int).sum(0)
    assert cut_off == sum(len(ids) > LENGTH_S + 1 for ids in opened.ids) > 0
    assert lost == sum(int(w[LENGTH_S + 1 :].sum()) for w in opened.weights) > 0
    assert left_out == sum(not learned.any() for learned in opened.learned()) > 0


def test_a_second_opening_reads_the_cache_and_logs_the_same_counts(opened):
    lines = []
    again = open_dataset(opened.options, sequence_length=LENGTH_S, log=lines.append)

    assert again.fingerprint == opened.dataset.fingerprint
    assert any("tokenized" in line for line in opened.lines)
    assert not any("tokenized" in line for line in lines)
    counts = [line for line in opened.lines if "examples" in line]
    assert [line for line in lines if "examples" in line] == counts


def test_held_out_examples_stay_below_the_wanted_count_of_tokens(opened):
    options = dataclasses.replace(opened.options, validation_tokens=9)
    few = open_dataset(options, sequence_length=LENGTH_S, log=print)
    assert 0 < few.num_validation_tokens <= 9 < opened.dataset.num_validation_tokens


def test_chats_have_no_bytes_per_token(opened):
    assert opened.dataset.bytes_per_token is None


def test_the_cache_knows_template_and_format(tmp_path):
    options = options_of(tmp_path, cache_dir=str(tmp_path / "cache"))
    one = open_dataset(options, sequence_length=64, log=print)
    (tmp_path / "other.jinja").write_text(HEADERS)
    other = dataclasses.replace(options, chat_template=str(tmp_path / "other.jinja"))
    two = open_dataset(other, sequence_length=64, folder=tmp_path / "run", log=print)
    assert one.fingerprint != two.fingerprint
    assert len(list((tmp_path / "cache").glob("tokens-*/weights.bin"))) == 2
    (tmp_path / "other.jinja").unlink()  # what the run has kept is enough
    again = open_dataset(
        other, sequence_length=64, folder=tmp_path / "run", log=(lines := []).append
    )
    assert again.fingerprint == two.fingerprint
    assert not any("tokenized" in line for line in lines)
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == HEADERS
    stop = two.tokenizer._tokenizer.token_to_id("<|eot_id|>")
    assert stop in load_tokenizer("bpe:300", folder=tmp_path / "run").end_ids


def test_a_start_without_a_template_does_not_hide_the_next_one(tmp_path):
    (tmp_path / "mine.jinja").write_text(HEADERS)
    mine = options_of(tmp_path, template="", chat_template=str(tmp_path / "mine.jinja"))
    without = dataclasses.replace(mine, chat_template="")
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="set data.chat_template=FILE.jinja"):
        open_dataset(without, sequence_length=64, folder=run, log=print)
    assert (run / "tokenizer.json").is_file()
    assert not (run / "chat_template.jinja").exists()
    open_dataset(mine, sequence_length=64, folder=run, log=print)
    assert (run / "chat_template.jinja").read_text() == HEADERS
    written = (run / "chat_template.jinja").stat().st_mtime_ns
    open_dataset(mine, sequence_length=64, folder=run, log=print)
    assert (run / "chat_template.jinja").stat().st_mtime_ns == written


def test_bytes_can_chat(tmp_path):
    source = "{% for m in messages %}\x02{{ m.role }}\n{{ m.content }}\x03{% endfor %}"
    source += "{% if add_generation_prompt %}\x02assistant\n{% endif %}"
    (tmp_path / "bytes.jinja").write_text(source)
    options = options_of(
        tmp_path, tokenizer="bytes", chat_template=str(tmp_path / "bytes.jinja")
    )
    dataset = open_dataset(
        options, sequence_length=300, folder=tmp_path / "run", log=print
    )
    batch = dataset.train_batch(0, 4)
    learned = bytes(batch["targets"][batch["weights"] > 0].astype(np.uint8)).decode()
    answers = {
        m["content"]
        for chat in conversations(40)
        for m in chat
        if m["role"] == "assistant"
    }
    assert len(parts := learned.split("\x03")) > 4
    assert set(parts[:-1]) <= answers
    assert not parts[-1]
    assert load_tokenizer("bytes", folder=tmp_path / "run").end_ids == (3,)


def test_tables_have_the_rows_of_jsonl(tmp_path):
    """Tables fill fields that a row has not with nothing."""
    arrow = pytest.importorskip("pyarrow", reason="extra `hf` is not installed")
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="extra `hf` is not installed"
    )
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    some = [
        {"messages": chat} | ({"tools": '[{"name": "f"}]'} if n % 2 == 0 else {})
        for n, chat in enumerate(conversations())
    ]
    write_rows(tmp_path / "rows.jsonl", some)
    parquet.write_table(arrow.Table.from_pylist(some), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(some).save_to_disk(tmp_path / "saved")
    found = []
    for source, name in (
        ("jsonl", "rows.jsonl"),
        ("parquet", "rows.parquet"),
        ("huggingface", "saved"),
    ):
        options = options_of(
            tmp_path, source=source, path=str(tmp_path / name), validation_share=0
        )
        dataset = open_dataset(options, sequence_length=200, log=print)
        found.append(dataset.read("train", np.arange(dataset.num_train_samples)))
    for batch in found[1:]:
        for key in ("tokens", "weights", "segment_ids"):
            assert sorted(map(bytes, batch[key])) == sorted(map(bytes, found[0][key]))
            assert batch["weights"].any()
    options = options_of(
        tmp_path, source="parquet", path=str(tmp_path / "rows.parquet"), format="text"
    )
    assert refusal(options)[0].endswith("(has: messages, tools). Set data.format=chat.")


# --- What is refused ------------------------------------------------------------------


def refusal(options):
    with pytest.raises(ConfigError) as raised:
        open_dataset(options, sequence_length=32, log=print)
    assert all("\n" not in fault for fault in raised.value.faults)
    return raised.value.faults


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packing": "window"}, "set data.packing=documents"),
        ({"source": "stdlib", "path": ""}, "data.source=stdlib has no chats"),
        ({"special_tokens": "text"}, "set data.special_tokens=tokens"),
        ({"format": "text", "chat_template": "x"}, "set data.format=chat"),
        ({"format": "text"}, "(has: messages). Set data.format=chat"),
        ({"chat_template": "/nowhere.jinja"}, "data.chat_template=/nowhere.jinja: "),
    ],
)
def test_options_that_contradict_are_refused(changes, words, tmp_path):
    assert any(words in fault for fault in refusal(options_of(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"text": "x"}', "no 'messages', or 'prompt' and 'completion' (has: text)"),
        (
            '{"prompt": "x"}',
            "no 'messages', or 'prompt' and 'completion' (has: prompt)",
        ),
        ('{"messages": []}', "'messages' is empty"),
        ('{"messages": "x"}', "'messages' is str; required: list"),
        ('{"messages": ["x"]}', "a message of 'messages' is str; required: dict"),
        ('{"messages": [{"content": "x"}]}', "the 'role' of a message is NoneType"),
        (
            '{"messages": [{"role": "user", "content": 3}]}',
            "the 'content' of a message is int",
        ),
        (
            '{"prompt": "x", "completion": [{"role": "assistant"}]}',
            "'prompt' is str; required: list",
        ),
        ('{"messages": [{"role": "user"}], "tools": "["}', "not JSON"),
        ('["messages"]', "it is list; required: dict"),
        ('{"messages": \udcff}', "not UTF-8 at byte"),
    ],
)
def test_a_row_that_is_no_chat_is_named(row, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(rows("messages")[0])
    path.write_bytes(f"{good}\n{row}\n".encode("utf-8", "surrogateescape"))
    (fault,) = refusal(options_of(tmp_path))
    assert f"{path} line 2: " in fault
    assert words in fault


def test_a_row_that_the_template_refuses_is_named(tmp_path):
    strict = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}"
        + PLAIN
    )
    write_rows(
        tmp_path / "rows.jsonl", [{"messages": [turn("assistant", "x")], "id": "odd"}]
    )
    (fault,) = refusal(options_of(tmp_path, strict))
    assert fault == "odd: its chat template fails: begin with a user"


def when(content: str, harm: str) -> str:
    """Returns a template that does harm to a conversation with this text alone."""
    return f"{{% if messages[0].content == '{content}' %}}{harm}{{% endif %}}" + PLAIN


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
)
ENDLESS_TEXT = (
    "{% for a in range(99999) %}{{ 'x' * 50000 }}{% endfor %}"  # of small parts
)
CALLS_ITSELF = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
HARM = {
    "memory": ("{{ 'x' * 1500000000 }}", "more than 1024 MiB of memory"),
    "length": (ENDLESS_TEXT, "more than 100,000 characters"),
    "depth": (CALLS_ITSELF, "calls itself without end"),
}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "line 1: "),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested"),
        ("x" * (1 << 20), "more than 1,048,576 bytes"),
        pytest.param(ENDLESS, "takes more than 4 s", marks=pytest.mark.slow),
        *HARM.values(),
    ],
)
def test_a_harmful_template_is_refused(source, words, tmp_path):
    (fault,) = refusal(options_of(tmp_path, source))
    assert fault.startswith("the tokenizer's chat template: ")
    assert words in fault


@pytest.mark.parametrize("kind", HARM)
def test_a_template_that_harms_one_row_names_the_row_and_its_limit(kind, tmp_path):
    harm, words = HARM[kind]
    chats = [
        {"messages": [turn("user", str(n)), turn("assistant", "y")], "id": f"row {n}"}
        for n in range(9)
    ]
    write_rows(tmp_path / "rows.jsonl", chats)
    (fault,) = refusal(options_of(tmp_path, when("6", harm)))
    assert fault.startswith("row 6: the tokenizer's chat template: it ")
    assert words in fault


def test_a_template_that_harms_a_prompt_is_named_and_serves_the_next(tmp_path):
    encoder = encoder_of(tmp_path / "model", when("k", HARM["memory"][0]))
    with pytest.raises(
        ConfigError, match="the tokenizer's chat template: it needs more"
    ):
        encoder.prompt([turn("user", "k")])
    assert len(encoder.prompt([turn("user", "l")]))


def test_a_limit_is_no_refusal_of_a_view(tmp_path):
    """Answers whose prompt is refused are skipped; one that exceeds a limit is not."""
    harm = "{% if messages | length == 3 %}" + HARM["depth"][0] + "{% endif %}"
    encoder = encoder_of(tmp_path / "model", harm + PLAIN)
    chat = [turn(role, "x") for role in ("user", "assistant") * 2]
    with pytest.raises(ConfigError, match="0: the tokenizer's chat template: it nests"):
        encoded(encoder, [{"messages": chat}])


def test_many_rows_in_several_batches_keep_their_order(tmp_path, monkeypatch):
    encoder = encoder_of(tmp_path / "model", PLAIN)
    whole = encoded(encoder, rows("messages"))
    monkeypatch.setattr(chat_template, "_BATCH_BYTES", 700)
    for one, two in zip(whole[0], encoded(encoder, rows("messages"))[0], strict=True):
        np.testing.assert_array_equal(one, two)


# --- The process that renders ---------------------------------------------------------

ECHO = "{{ messages[0].content }}"


def process_of(template) -> int:
    return template._process._popen.pid


def is_running(pid: int) -> bool:
    """Returns whether a process is there and no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Waits until a process has ended; fails after a minute."""
    deadline_s = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_s, "it is left over"
        time.sleep(0.05)


def test_one_process_answers_all_and_ends_with_its_template():
    template = chat_template.ChatTemplate(ECHO, {})
    first = process_of(template)
    for n in range(3):
        assert template.render([turn("user", str(n))]).text == str(n)
    assert process_of(template) == first
    del template
    assert not is_running(first)


def test_a_process_that_was_killed_is_named_and_started_again():
    template = chat_template.ChatTemplate(ECHO, {})
    os.kill(process_of(template), signal.SIGSTOP)
    killed = threading.Timer(0.2, os.kill, (process_of(template), signal.SIGKILL))
    killed.start()
    with pytest.raises(ConfigError, match="the chat template: its process was killed"):
        template.render([turn("user", "x")])
    assert template.render([turn("user", "x")]).text == "x"


def test_threads_share_a_process():
    template = chat_template.ChatTemplate(ECHO, {})
    texts = [str(n) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        rendered = list(
            pool.map(lambda text: template.render([turn("user", text)]), texts)
        )
    assert [one.text for one in rendered] == texts


def test_a_process_that_has_ended_is_no_fault_of_a_fork_or_another_thread():
    template = chat_template.ChatTemplate(ECHO, {})
    process = template._process
    process._end()
    process.forget()
    assert process.ask(b"", 1) == (
        [],
        "its process has ended with chats of another thread",
    )
    assert template.render([turn("user", "x")]).text == "x"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_starts_its_own(method):
    """The first one's ends although the other still runs, and holds its pipes."""
    template = chat_template.ChatTemplate(ECHO, {})
    first = process_of(template)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    stop = context.Event()
    other = context.Process(target=_render_elsewhere, args=(template, results, stop))
    other.start()
    try:
        text, second = results.get(timeout=120)
        assert text == "there"
        assert second != first
        assert template.render([turn("user", "here")]).text == "here"
        template._process._end.detach()  # as if this process had been killed
        for pipe in (template._process._popen.stdin, template._process._popen.stdout):
            pipe.close()
        template._process._popen.wait(60)
    finally:
        stop.set()
        other.join(60)
    wait_for_end(second)


def _render_elsewhere(template, results, stop) -> None:
    text = template.render([turn("user", "there")]).text
    results.put((text, process_of(template)))
    stop.wait(120)


PARENT = f"""
import sys, time
from jaxdist.data.chat_template import ChatTemplate
template = ChatTemplate({ECHO!r}, {{}})
template.render([{{"role": "user", "content": "x"}}])
print(template._process._popen.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left_when_its_parent_is_killed(number):
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(number)
    wait_for_end(pid)


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
)
def test_a_template_reaches_nothing_outside_its_sandbox(source):
    with pytest.raises(ConfigError, match="its chat template fails: "):
        chat_template.ChatTemplate(
            source + "{{ ''.__class__.__mro__[1].__subclasses__() }}", {}
        ).render([])


def test_nothing_learned_is_refused(tmp_path):
    write_rows(
        tmp_path / "rows.jsonl",
        [{"messages": [turn("user", "x")], "id": n} for n in range(30)],
    )
    (fault,) = refusal(options_of(tmp_path))
    assert (
        "no example has a learned token among its first 33. Raise batch.sequence_length"
        in fault
    )


@pytest.mark.slow
def test_all_views_of_a_long_conversation_are_rendered():
    """Their texts are 720 MB together; the process may take 1 GiB."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = []
    views = []
    for pair in range(300):
        messages.append({"role": "user", "content": "a" * 2000})
        views.append(chat_template.View(2 * pair + 1, prompts=True))
        messages.append({"role": "assistant", "content": "b" * 2000})
        views.append(chat_template.View(2 * pair + 2))
    template = chat_template.load(source, {}, where="a template")
    (found,) = template.render_all([chat_template.Chat(messages, views)])
    assert len(found) == 600
    assert len(found[-1].text) > 1_200_000
