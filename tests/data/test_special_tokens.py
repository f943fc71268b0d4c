"""Special tokens in texts, and the files beside a tokenizer.json that say which of them
end one.
"""

import json

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, load_tokenizer, open_dataset, tokenizer_config

tokenizers = pytest.importorskip("tokenizers", reason="extra `text` is not installed")

CHAT = "<|im_start|>user\nadd <tool> two<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
SPECIAL, ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<tool>"


@pytest.fixture(scope="module", name="made")
def made_fixture():
    """Returns a byte-level BPE with three special tokens and one that is only added."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["user assistant add two four " * 9], trainer)
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([ADDED])
    return made


@pytest.fixture(scope="module", name="cache")
def cache_fixture(tmp_path_factory):
    """Keeps that the tokenizer was tried out: each trial is a process."""
    return tmp_path_factory.mktemp("cache")


def folder_of(made, path):
    path.mkdir()
    (path / "tokenizer.json").write_text(made.to_str())
    return path


def test_special_and_added_tokens_encode_as_the_tokenizers_file_says(
    made, tmp_path, cache
):
    folder = folder_of(made, tmp_path / "model")
    expected = made.encode(CHAT, add_special_tokens=False).ids
    assert {made.token_to_id(name) for name in (*SPECIAL[1:], ADDED)} < set(expected)
    tokenizer = load_tokenizer(str(folder), cache=cache)
    assert tokenizer.encode(CHAT).tolist() == expected
    text = load_tokenizer(str(folder), cache=cache, special_tokens="text")
    ids = text.encode(CHAT).tolist()
    assert made.token_to_id("<|im_end|>") not in ids
    assert made.token_to_id(ADDED) in ids
    assert text.decode(ids) == CHAT
    assert len(ids) > len(expected)
    assert text.fingerprint != tokenizer.fingerprint


def test_a_corpus_says_that_it_spells_them_and_each_setting_has_its_cache(
    made, tmp_path
):
    folder = folder_of(made, tmp_path / "model")
    (tmp_path / "a.txt").write_text(CHAT * 20)
    counts = {}
    for setting in ("tokens", "text", "tokens", "text"):
        options = DataConfig(
            source="text",
            path=str(tmp_path / "a.txt"),
            tokenizer=str(folder),
            special_tokens=setting,
            validation_share=0,
            cache_dir=str(tmp_path / "cache"),
        )
        dataset = open_dataset(options, sequence_length=16, log=(lines := []).append)
        said = [line for line in lines if "spell special tokens" in line]
        assert len(said) == (setting == "tokens"), (
            "at each start, the first and the later ones"
        )
        assert all(
            "<|im_start|> 40, <|im_end|> 40" in line and "special_tokens=text" in line
            for line in said
        )
        batch = dataset.train_batch(0, 64)["tokens"]
        assert (
            counts.setdefault(
                setting, np.isin(batch, made.token_to_id("<|im_end|>")).sum()
            )
            >= 0
        )
        assert dataset.num_train_tokens == len(dataset.tokenizer.encode(CHAT * 20)) + 1
    assert counts["tokens"] > 0 == counts["text"]
    assert len(list((tmp_path / "cache").glob("tokens-*/meta.json"))) == 2


def test_a_text_ends_at_any_token_that_a_file_names(made, tmp_path, cache):
    folder = folder_of(made, tmp_path / "model")
    assert load_tokenizer(str(folder), cache=cache).end_ids == (
        made.token_to_id("<|endoftext|>"),
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 5, 10**6]})
    )
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [9]}})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<tool>"}))
    names = [made.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert load_tokenizer(str(folder), cache=cache).end_ids == (3, 5, 7, 9, *names)
    copy = folder_of(made, tmp_path / "run")
    tokenizer_config.write(copy, tokenizer_config.read(folder))
    assert load_tokenizer("bpe:300", folder=copy, cache=cache).end_ids == (
        3,
        5,
        7,
        9,
        *names,
    )


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("generation_config.json", "{", "not JSON"),
        (
            "generation_config.json",
            '{"eos_token_id": "x"}',
            "eos_token_id is str; required: int",
        ),
        ("config.json", "[]", "it is list; required: dict"),
        (
            "tokenizer_config.json",
            '{"eos_token": 3}',
            "eos_token is int; required: str",
        ),
        ("special_tokens_map.json", "\udcff", "not JSON"),
    ],
)
def test_a_malformed_file_beside_a_tokenizer_is_named(
    made, tmp_path, cache, name, text, fault
):
    folder = folder_of(made, tmp_path / "model")
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(str(folder), cache=cache)
    (line,) = raised.value.faults
    assert str(folder / name) in line
    assert fault in line
    assert "remove it" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("content", "fault"), [(b"{", "not a tokenizer.json"), (b"{\xff}", "in position 1")]
)
def test_a_tokenizer_that_cannot_be_read_is_named_with_a_cure(tmp_path, content, fault):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(str(tmp_path))
    (line,) = raised.value.faults
    assert str(tmp_path) in line
    assert fault in line
    assert "use another one" in line
    assert "\n" not in line
