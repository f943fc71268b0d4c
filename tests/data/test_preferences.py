"""Pairs of preferences: rows of files, tokens and labels of both halves, truncation, and
rows of a batch with whole pairs.
"""

import dataclasses
import json
import re
from typing import NamedTuple

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset, sample_shapes, token_cache
from jaxdist.data.packing import PackingPlan
from jaxdist.data.preferences import PAIRS_PER_ROW, PackedPairs, plan_pairs
from jaxdist.data.sources.preference_rows import halves
from jaxdist.data.sources.record_formats import RECORD_FORMATS
from jaxdist.storage.untrusted import Malformed
from jaxdist.trainer import run_config
from support.chats import PLAIN, conversations, turn, write_rows, write_tokenizer

LENGTH_S = 32  # of a row; a half has at most 17 tokens


def texts(count: int = 40) -> list[dict]:
    """Returns pairs of texts of unequal length; some prompts fill a half."""
    return [
        {
            "prompt": f"{number:02d}" + "p" * (number % 17),
            "chosen": "c" * (1 + number % 3) + f"{number:02d}",
            "rejected": "r" * (1 + number % 5) + f"{number:02d}",
        }
        for number in range(count)
    ]


def chats(count: int = 12) -> list[dict]:
    """Returns pairs of conversations that differ in the last turn."""
    return [
        {
            "prompt": chat[:-1],
            "chosen": chat[-1:],
            "rejected": [turn("assistant", f"no {number}")],
        }
        for number, chat in enumerate(conversations(count))
    ]


def options_of(tmp_path, rows: list[dict], **changes) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    own = {"source": "jsonl", "path": str(path), "format": "preferences"}
    own |= {"packing": "documents", "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**(own | changes))


def opened(options: DataConfig, lines: list[str] | None = None, length: int = LENGTH_S):
    log = (lines if lines is not None else []).append
    return open_dataset(options, sequence_length=length, log=log)


def refusal(options: DataConfig, length: int = LENGTH_S) -> str:
    """Returns the one line with which the data are refused."""
    with pytest.raises(ConfigError) as caught:
        opened(options, length=length)
    (fault,) = caught.value.faults
    assert "\n" not in fault
    return fault


def train_rows(dataset):
    return dataset.read("train", np.arange(dataset.num_train_samples))


def held_out_rows(dataset):
    return dataset.read("validation", np.arange(50))


# --- Rows of files --------------------------------------------------------------------


def split_of(chosen, rejected, **more):
    """Returns prompt, chosen and rejected as the documents have them."""
    first, second = map(
        json.loads, halves({"chosen": chosen, "rejected": rejected} | more)
    )
    assert first["prompt"] == second["prompt"]
    return first["prompt"], first["completion"], second["completion"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("Hi. Yes", "Hi. No", ("Hi.", " Yes", " No")),
        ("Hi.Yes", "Hi.No", ("Hi.", "Yes", "No")),
        ("a  b", "a  c", ("a ", " b", " c")),
        ("ab", "abc", ("a", "b", "bc")),
        ("ab ", "ab c", ("ab", " ", " c")),
    ],
)
def test_the_common_beginning_of_texts_is_the_prompt(chosen, rejected, expected):
    assert split_of(chosen, rejected) == expected
    prompt, one, two = expected
    assert split_of(rejected, chosen) == (prompt, two, one)


def test_the_common_beginning_of_messages_is_the_prompt():
    ask, yes, no = turn("user", "Hi"), turn("assistant", "yes"), turn("assistant", "no")
    assert split_of([ask, yes], [ask, no]) == ([ask], [yes], [no])
    assert split_of([ask, yes], [ask, yes, ask, no]) == ([ask], [yes], [yes, ask, no])
    # tables fill absent fields with None
    padded = {**ask, "tool_calls": None}
    assert split_of([padded, yes], [ask, no]) == ([ask], [yes], [no])
    # a text that repeats the first turn
    assert split_of([ask, yes], [ask, no], prompt="Hi") == ([ask], [yes], [no])
    assert split_of([yes], [no], prompt=[ask]) == ([ask], [yes], [no])


def test_tools_are_a_list_or_its_json():
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        for half in halves(
            {"prompt": "a", "chosen": "b", "rejected": "c", "tools": tools}
        ):
            assert json.loads(half)["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "a"}, "'rejected' has no value"),
        ({"chosen": "a", "rejected": None}, "'rejected' has no value"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "'chosen' equals 'rejected'"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
        ({"chosen": "a", "rejected": "b"}, "have no common beginning"),
        ({"chosen": " a", "rejected": " b"}, "have no common beginning"),
        ({"chosen": "", "rejected": "b"}, "have no common beginning"),
        ({"prompt": "p", "chosen": 3, "rejected": "b"}, "'chosen' is int"),
        (
            {"prompt": "p", "chosen": "a", "rejected": []},
            "'chosen' is str; required: list",
        ),
        (
            {"prompt": [], "chosen": "a", "rejected": "b"},
            "'prompt' is list; required: str",
        ),
        (
            {
                "prompt": [],
                "chosen": [turn("user", "a")],
                "rejected": [turn("user", "b")],
            },
            "'prompt' is empty; required: at least one message",
        ),
        (
            {
                "prompt": "p",
                "chosen": [turn("user", "a")],
                "rejected": [turn("user", "b")],
            },
            "have no common beginning, and there is no 'prompt' of their kind",
        ),
        (
            {"chosen": [turn("user", "a")], "rejected": [{"content": "b"}]},
            "the 'role' of a message is NoneType",
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": "{"}, "not JSON"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row, words):
    with pytest.raises(Malformed, match=re.escape(words)):
        halves(row)


def test_an_empty_answer_is_a_completion_of_its_end_alone():
    assert split_of("", "b", prompt="a") == ("a", "", "b")


def test_a_fault_names_the_file_and_the_line(tmp_path):
    good = texts(1)[0]
    options = options_of(tmp_path, [good, good | {"chosen": "x", "rejected": "x"}])
    assert refusal(options) == (
        f"{options.path} line 2: 'chosen' equals 'rejected'; required: two completions. "
        "Mend or remove the row."
    )


def test_missing_fields_are_named_with_the_format_that_fits(tmp_path):
    options = options_of(tmp_path, [{"text": "a", "chosen": "b"}])
    assert refusal(options) == (
        f"{options.path} line 1: no 'chosen' and 'rejected' (has: chosen, text). "
        "Rename the fields, or set data.format to text or chat."
    )
    options = options_of(tmp_path, [{"prompt": "a", "completion": "b"}])
    assert refusal(options).endswith("(has: completion, prompt). Set data.format=chat.")
    for other in ("chat", "text"):
        fault = refusal(options_of(tmp_path, texts(2), format=other))
        assert fault.endswith("Set data.format=preferences.")


# --- Settings -------------------------------------------------------------------------


def faults(**options) -> str:
    return "\n".join(DataConfig(format="preferences", **options).faults())


def test_contradictions_of_the_settings_are_named():
    jsonl = {"source": "jsonl", "path": "x"}
    assert not faults(**jsonl, packing="documents")
    assert "windows would mix examples; set data.packing=documents" in faults(**jsonl)
    assert (
        "data.format=preferences: preferences need their special tokens; "
        "set data.special_tokens=tokens."
    ) in faults(**jsonl, packing="documents", special_tokens="text")
    assert (
        "data.format=preferences: data.source=stdlib has no preferences; required: "
        "jsonl, parquet, huggingface."
    ) in faults(packing="documents")


@pytest.mark.parametrize("way", ["split", "truncate"])
def test_long_documents_are_refused(way):
    jsonl = {"source": "jsonl", "path": "x", "packing": "documents"}
    assert faults(**jsonl, long_documents=way) == (
        f"data.long_documents={way} has no effect: data.format=preferences keeps one "
        "part of each document. Set data.truncation, or remove this key."
    )


def test_a_key_without_effect_is_named():
    config = run_config.default_config()
    config.data.source, config.data.path = "jsonl", "x"
    config.data.packing, config.data.format = "documents", "preferences"
    config.data.truncation = "keep_end"
    assert not list(run_config.unread_options(run_config.from_config(config)))
    config.data.long_documents = "split"
    (line,) = run_config.unread_options(run_config.from_config(config))
    assert line.startswith(
        "data.long_documents=split has no effect: data.format=preferences does not "
        "read it, only text, chat."
    )
    config.data.long_documents, config.data.format = "auto", "chat"
    (line,) = run_config.unread_options(run_config.from_config(config))
    assert "data.truncation=keep_end has no effect: data.format=chat" in line


def test_sliding_windows_are_refused(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=128)
    with pytest.raises(ConfigError, match="stride=4: windows slide over texts"):
        open_dataset(options, sequence_length=LENGTH_S, log=print, stride=4)


# --- Rows of a batch ------------------------------------------------------------------


class Half(NamedTuple):
    """A half as a batch has it, or as it should be."""

    tokens: tuple[int, ...]  # with the last target
    weights: tuple[float, ...]  # of the targets


def expected_half(prompt: str, completion: str, longest: int, truncation: str) -> Half:
    """Returns a half of bytes, in plain Python."""
    tokens = list((prompt + completion).encode())
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    if truncation == "keep_start":
        tokens, weights = tokens[:longest], weights[:longest]
    else:
        tokens, weights = tokens[-longest:], weights[-longest:]
    return Half(tuple(tokens), tuple(weights[1:]))


def expected_pairs(rows: list[dict], truncation: str, length: int = LENGTH_S):
    """Returns the pairs that are kept, chosen first, and the number of the others."""
    pairs = [
        tuple(
            expected_half(row["prompt"], row[name], length // 2 + 1, truncation)
            for name in ("chosen", "rejected")
        )
        for row in rows
    ]
    kept = [pair for pair in pairs if all(any(half.weights) for half in pair)]
    return kept, len(pairs) - len(kept)


def pairs_of(batch) -> list[tuple[Half, Half]]:
    """Returns the pairs of a batch, and checks positions, segments and padding."""
    pairs = []
    for number, segments in enumerate(batch["segment_ids"]):
        row = {
            name: values[number] for name, values in batch.items() if name != "sample"
        }
        used = segments > 0
        count = int(segments.max())
        assert count % 2 == 0
        # segments 1, 2, 3 and so on, then padding
        np.testing.assert_array_equal(segments[used], np.sort(segments[used]))
        assert set(segments[used].tolist()) == set(range(1, count + 1))
        assert used[: used.sum()].all()
        for name in ("tokens", "targets", "positions", "weights"):
            assert not row[name][~used].any(), name
        found = []
        for segment in range(1, count + 1):
            here = segments == segment
            tokens = row["tokens"][here].tolist()
            targets = row["targets"][here].tolist()
            assert tokens[1:] == targets[:-1]
            assert row["positions"][here].tolist() == list(range(len(tokens)))
            found.append(Half((*tokens, targets[-1]), tuple(row["weights"][here])))
        pairs += zip(found[::2], found[1::2], strict=True)
    return pairs


def test_a_row_by_hand(tmp_path):
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "e"}]
    dataset = opened(options_of(tmp_path, rows), length=8)
    batch = train_rows(dataset)
    a, b, c, d, e = b"abcde"
    expected = {
        "tokens": [a, b, c, a, b, 0, 0, 0],
        "targets": [b, c, d, b, e, 0, 0, 0],
        "weights": [0, 1, 1, 0, 1, 0, 0, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0, 0],
    }
    for name, values in expected.items():
        assert batch[name].tolist() == [values], name
    shapes = sample_shapes(options_of(tmp_path, rows), 8)
    assert {name: (x.shape[1:], x.dtype.name) for name, x in batch.items()} == {
        name: tuple(shape) for name, shape in shapes.items()
    }
    assert (dataset.num_train_tokens, dataset.num_train_samples) == (3, 1)
    assert dataset.bytes_per_token is None


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_rows_have_each_pair_as_plain_python_has_it(truncation, tmp_path):
    options = options_of(tmp_path, texts(), truncation=truncation, validation_share=90)
    lines: list[str] = []
    dataset = opened(options, lines)
    train, held_out = pairs_of(train_rows(dataset)), pairs_of(held_out_rows(dataset))
    assert train
    assert held_out
    kept, dropped = expected_pairs(texts(), truncation)
    assert sorted(train + held_out) == sorted(kept)
    assert (dropped > 0) == (truncation == "keep_start")
    assert dataset.train_batch(0, 2)["weights"].sum() > 0
    learned = sum(sum(half.weights) for pair in kept for half in pair)
    assert dataset.num_train_tokens + dataset.num_validation_tokens == learned

    counts = re.findall(
        r"(\d+) (?:training|held-out) pairs, (\d+) of (\d+) tokens learned; (\d+) halves "
        rf"longer than 17 tokens and cut to their {'first' if dropped else 'last'} ones, "
        r"(\d+) pairs dropped without a learned token in a half \((\d+) learned tokens "
        r"lost\), (\d+) kept with equal halves",
        "\n".join(lines),
    )
    total = np.array(counts, int).sum(0).tolist()
    both = [
        row["prompt"] + row[name] for row in texts() for name in ("chosen", "rejected")
    ]
    whole = sum(len(row["chosen"]) + len(row["rejected"]) for row in texts())
    longer = sum(len(text) > 17 for text in both)
    equal = sum(one == two for one, two in kept)
    assert len(counts) == 2
    assert total == [
        40,
        learned,
        sum(map(len, both)),
        longer,
        dropped,
        whole - learned,
        equal,
    ]


def test_halves_that_truncation_makes_equal_are_kept_and_counted(tmp_path):
    rows = [{"prompt": "abc", "chosen": "defghX", "rejected": "defghY"}]
    lines: list[str] = []
    batch = train_rows(opened(options_of(tmp_path, rows), lines, length=8))
    ((one, two),) = pairs_of(batch)
    assert one == two
    assert "1 kept with equal halves" in "\n".join(lines)
    keep_end = options_of(tmp_path, rows, truncation="keep_end")
    ((one, two),) = pairs_of(train_rows(opened(keep_end, lines := [], length=8)))
    assert bytes(one.tokens) == b"efghX"
    assert "0 kept with equal halves" in "\n".join(lines)


def test_data_without_a_whole_pair_are_refused(tmp_path):
    rows = [{"prompt": "p" * 30, "chosen": "a", "rejected": "b"}] * 3
    fault = refusal(options_of(tmp_path, rows))
    assert (
        "no pair has learned tokens in both halves among their first 17 tokens. Raise "
        "batch.sequence_length"
    ) in fault
    keep_end = options_of(tmp_path, rows, truncation="keep_end")
    assert opened(keep_end).num_train_samples


def side_of(dataset) -> PackedPairs:
    (samples,) = dataset._samples["train"]
    assert isinstance(samples, PackedPairs)
    return samples


def test_several_pairs_share_a_row_which_holds_64_at_most(tmp_path):
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b", "id": number}
        for number in range(3 * PAIRS_PER_ROW + 5)
    ]
    for length in (512, 100, 16):
        options = options_of(tmp_path, rows, validation_share=0)
        dataset = opened(options, length=length)
        side = side_of(dataset)
        smallest = -(-length // PAIRS_PER_ROW)
        most = length // max(smallest, 2)
        assert side.pairs_per_row.max() == most <= PAIRS_PER_ROW
        assert side.num_pairs == side.pairs_per_row.sum() == len(rows)
        assert side.num_rows == -(-len(rows) // most)
        batch = side.read(np.arange(side.num_rows + 1))
        assert len(pairs_of(batch)) == len(rows)
        np.testing.assert_array_equal(
            batch["segment_ids"].max(1), [*(2 * side.pairs_per_row), 0]
        )


def test_a_pair_is_placed_by_best_fit(tmp_path):
    # predictions of the pairs: 10, 6, 4, 4; a row has 16
    rows = [
        {"prompt": "p", "chosen": "a" * size, "rejected": "b" * size}
        for size in (2, 5, 3, 2)
    ]
    side = side_of(opened(options_of(tmp_path, rows, validation_share=0), length=16))
    assert side.pairs_per_row.tolist() == [2, 2]
    sizes = [len(one.tokens) - 1 for one, _ in pairs_of(side.read(np.arange(2)))]
    assert sizes == [5, 3, 2, 2]


def test_held_out_pairs_are_whole_and_stay_below_the_wanted_count(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=128)
    everything = pairs_of(held_out_rows(opened(options)))
    few = opened(dataclasses.replace(options, validation_tokens=30))
    pairs = pairs_of(held_out_rows(few))
    assert 0 < len(pairs) < len(everything)
    assert set(pairs) < set(everything)
    learned = sum(sum(half.weights) for pair in pairs for half in pair)
    assert learned == few.num_validation_tokens <= 30


def test_a_stored_plan_is_read_again_and_a_broken_one_is_not(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=0)
    before = train_rows(opened(options))
    plans = sorted((tmp_path / "cache").glob("packing-*.npz"))
    again = opened(options, lines := [])
    assert plans == sorted((tmp_path / "cache").glob("packing-*.npz"))
    assert not any("tokenized" in line for line in lines)
    for name, values in train_rows(again).items():
        np.testing.assert_array_equal(values, before[name])
    for path in plans:
        with np.load(path) as kept:
            plan = PackingPlan(**kept)
        if len(plan.owner):
            first = np.array([0, *range(1, len(plan.owner) + 1)])
            np.savez(path, **plan._replace(first=first)._asdict())
    for name, values in train_rows(opened(options)).items():
        np.testing.assert_array_equal(values, before[name])


def test_the_fingerprint_knows_the_truncation(tmp_path):
    prints = {
        opened(options_of(tmp_path, texts(), truncation=way)).fingerprint
        for way in ("keep_start", "keep_end")
    }
    assert len(prints) == 2


# --- Split ----------------------------------------------------------------------------


def test_both_halves_are_on_one_side(tmp_path):
    options = options_of(tmp_path, texts(200), validation_share=128)
    dataset = opened(options, length=64)
    sides = [train_rows(dataset), held_out_rows(dataset)]
    numbers = []
    for batch in sides:
        pairs = pairs_of(batch)
        for one, two in pairs:
            assert one.tokens[:2] == two.tokens[:2], "halves of one prompt"
        numbers.append(
            {bytes(one.tokens)[-2:] + bytes(one.tokens)[:2] for one, _ in pairs}
        )
    assert len(numbers[0]) > 50
    assert len(numbers[1]) > 50


def test_batches_of_the_cache_do_not_split_a_pair(tmp_path, monkeypatch):
    write_tokenizer(tmp_path / "model", PLAIN)
    options = options_of(tmp_path, chats(), tokenizer=str(tmp_path / "model"))
    whole = train_rows(opened(options, length=128))
    monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", 1)
    again = dataclasses.replace(options, cache_dir=str(tmp_path / "other"))
    for name, values in train_rows(opened(again, length=128)).items():
        np.testing.assert_array_equal(values, whole[name])


# --- Chats and tokenizers -------------------------------------------------------------


@pytest.mark.parametrize("implicit", [False, True])
def test_messages_are_rendered_by_the_template(implicit, tmp_path):
    pytest.importorskip("jinja2", reason="extra `chat` is not installed")
    pytest.importorskip("tokenizers", reason="extra `chat` is not installed")
    write_tokenizer(tmp_path / "model", PLAIN)
    rows = chats()
    if implicit:
        rows = [
            {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}
            for row in rows
        ]
    options = options_of(
        tmp_path, rows, tokenizer=str(tmp_path / "model"), validation_share=0
    )
    dataset = opened(options, length=400)
    tokenizer = dataset.tokenizer._tokenizer
    found = []
    for pair in pairs_of(train_rows(dataset)):
        shown = []
        for half in pair:
            learned = np.array([0.0, *half.weights]) > 0
            tokens = np.array(half.tokens)
            shown += [
                tokenizer.decode(tokens[~learned], skip_special_tokens=False),
                tokenizer.decode(tokens[learned], skip_special_tokens=False),
            ]
        found.append(tuple(shown))
    expected = []
    for row in chats():
        prompt = "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"
            for m in row["prompt"]
        )
        prompt += "<|im_start|>assistant\n"
        chosen, rejected = (
            f"{row[name][0]['content']}<|im_end|>\n" for name in ("chosen", "rejected")
        )
        expected.append((prompt, chosen, prompt, rejected))
    assert sorted(found) == sorted(expected)


def test_messages_without_a_template_are_refused(tmp_path):
    pytest.importorskip("tokenizers", reason="extra `text` is not installed")
    write_tokenizer(tmp_path / "model")
    options = options_of(tmp_path, chats(), tokenizer=str(tmp_path / "model"))
    assert refusal(options).startswith("rows.jsonl#1: messages need a chat template")


def test_tokens_that_merge_across_the_prompt_are_scored_in_both_halves(tmp_path):
    """As in TRL: the completion begins where the prompt's tokens end to agree."""
    pytest.importorskip("tokenizers", reason="extra `text` is not installed")
    write_tokenizer(tmp_path / "model")
    rows = [{"chosen": "what is python", "rejected": "what is pyth."}]
    options = options_of(
        tmp_path, rows, tokenizer=str(tmp_path / "model"), validation_share=0
    )
    dataset = opened(options, lines := [])
    tokenizer = dataset.tokenizer._tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompt = ids("what is pyth")
    chosen, rejected = (ids(f"{x}<|end_of_text|>") for x in rows[0].values())
    common = min(
        next(i for i, token in enumerate([*prompt, -1]) if half[i : i + 1] != [token])
        for half in (chosen, rejected)
    )
    assert common < len(prompt), "tokens merge"
    ((one, two),) = pairs_of(train_rows(dataset))
    for half, tokens in ((one, chosen), (two, rejected)):
        assert list(half.tokens) == tokens
        learned = [float(place >= common) for place in range(1, len(tokens))]
        assert list(half.weights) == learned
    assert "do not begin with the prompt's tokens" in "\n".join(lines)


# --- Sources --------------------------------------------------------------------------


def write_parquet(folder, rows) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="extra `hf` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def write_huggingface(folder, rows) -> str:
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return str(folder / "rows")


@pytest.mark.parametrize("kind", ["texts", "chats"])
@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_tables_give_the_pairs_of_jsonl(source, kind, tmp_path):
    rows = texts() if kind == "texts" else chats()
    changes = {"validation_share": 0, "tokenizer": "bytes"}
    if kind == "chats":
        pytest.importorskip("tokenizers", reason="extra `chat` is not installed")
        changes["tokenizer"] = str(write_tokenizer(tmp_path / "model", PLAIN))
    options = options_of(tmp_path, rows, **changes)
    writer = {"parquet": write_parquet, "huggingface": write_huggingface}[source]
    other = dataclasses.replace(options, source=source, path=writer(tmp_path, rows))
    found = [pairs_of(train_rows(opened(one, length=512))) for one in (options, other)]
    assert sorted(found[0]) == sorted(found[1])
    assert found[0]


def test_a_mixture_mixes_pairs(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=60)
    write_rows(
        tmp_path / "more.jsonl",
        [row | {"chosen": "X" + row["chosen"]} for row in texts()],
    )
    mixture = dataclasses.replace(
        options,
        source="mixture",
        path="",
        mixture=(f"1:jsonl:{options.path}", f"1:jsonl:{tmp_path / 'more.jsonl'}"),
    )
    dataset = opened(mixture)
    batch = dataset.train_batch(0, 8)
    pairs = pairs_of(batch)
    has_mark = {ord("X") in one.tokens for one, _ in pairs}
    assert has_mark == {False, True}
    for step in (2, 1, 0):  # resume at every step
        for name, values in opened(mixture).train_batch(step, 8).items():
            np.testing.assert_array_equal(values, dataset.train_batch(step, 8)[name])
    other = dataclasses.replace(mixture, mixture=("1:stdlib:", "1:text:x"))
    with pytest.raises(ConfigError, match="data.source=stdlib has no preferences"):
        opened(other)


def test_the_plan_of_a_store_of_odd_halves_is_an_error(tmp_path):
    options = options_of(tmp_path, texts(2), validation_share=0)
    stores = []
    real = token_cache.open_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            token_cache,
            "open_tokens",
            lambda *args: stores.append(real(*args)) or stores[0],
        )
        opened(options)
    (store,) = stores
    assert len(plan_pairs(store, LENGTH_S).owner) == 4
    with pytest.raises(AssertionError, match="a half has no other one"):
        plan_pairs(store.take(np.arange(3)), LENGTH_S)
    with pytest.raises(AssertionError, match="halves of two pairs"):
        plan_pairs(store.take(np.array([0, 2])), LENGTH_S)


def test_each_format_is_a_choice_of_the_config():
    assert set(RECORD_FORMATS) == {"text", "chat", "preferences"}
    for name in RECORD_FORMATS:
        assert RECORD_FORMATS[name].name == name


# --- Halves that are scored at their last token ---------------------------------------


def scored(options: DataConfig, lines: list[str] | None = None, length: int = LENGTH_S):
    log = (lines if lines is not None else []).append
    return open_dataset(options, sequence_length=length, log=log, scored=True)


def inputs_of(batch):
    """Returns the inputs of all halves, with their weights."""
    return sorted(
        (
            tuple(batch["tokens"][row][at].tolist()),
            tuple(batch["weights"][row][at].astype(int).tolist()),
        )
        for row, segments in enumerate(batch["segment_ids"])
        for segment in range(1, segments.max() + 1)
        for at in [segments == segment]
    )


def test_a_scored_half_has_all_its_tokens_as_inputs(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=0)
    length = 200  # no half is truncated
    plain = opened(options, length=length)
    batch = train_rows(scored(options, length=length))
    wanted = []
    read = train_rows(plain)
    for row, segments in enumerate(read["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            last = read["targets"][row][at][-1]
            weights = read["weights"][row][at].astype(int).tolist()
            tokens = (*read["tokens"][row][at].tolist(), last)
            wanted.append((tokens, (*weights, 0)))
    assert inputs_of(batch) == sorted(wanted)
    assert batch["weights"].sum() == read["weights"].sum()


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_scored_halves_are_truncated_to_half_a_row_of_inputs(truncation, tmp_path):
    rows = [
        {"prompt": "p" * count, "chosen": "cdefghij", "rejected": "klmno"}
        for count in (3, 12, 15, 16, 30)
    ]
    options = options_of(tmp_path, rows, validation_share=0, truncation=truncation)
    lines = []
    batch = train_rows(scored(options, lines))
    found = {bytes(tokens).decode() for tokens, _ in inputs_of(batch)}
    half = LENGTH_S // 2
    kept = [3, 12, 15] if truncation == "keep_start" else [3, 12, 15, 16, 30]
    cut = slice(half) if truncation == "keep_start" else slice(-half, None)
    assert found == {
        ("p" * count + answer)[cut]
        for count in kept
        for answer in ("cdefghij", "klmno")
    }
    (line,) = (line for line in lines if "training pairs" in line)
    assert f"halves longer than {half} tokens" in line
    assert f"{5 - len(kept)} pairs dropped" in line


def test_scored_and_plain_rows_have_caches_and_fingerprints_of_their_own(tmp_path):
    options = options_of(tmp_path, texts(), validation_share=0)
    plain, rewards = opened(options), scored(options)
    assert plain.fingerprint != rewards.fingerprint
    cache = tmp_path / "cache"
    assert len(list(cache.glob("packing-*.npz"))) >= 2
    before = sorted(cache.iterdir())
    again = scored(options)
    assert again.fingerprint == rewards.fingerprint
    assert sorted(cache.iterdir()) == before


def test_texts_are_not_scored(tmp_path):
    options = DataConfig(source="stdlib", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="set data.format=preferences"):
        scored(options)
