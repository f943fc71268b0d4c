"""benchmarks/step/needle.py: its models learn answers that are in their haystacks."""

import importlib
import json
import random

import numpy as np
import pytest

from jaxdist.data import DataConfig, open_dataset
from support.paths import ROOT


@pytest.fixture
def needle(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/step"))
    return importlib.import_module("needle")


def test_the_answers_alone_are_learned(needle, tmp_path):
    needle.write_data(tmp_path, 3, needle.SHORT)
    data = DataConfig(
        source="jsonl",
        format="chat",
        packing="documents",
        validation_share=0,
        path=str(tmp_path / f"{needle.SHORT}.jsonl"),
        cache_dir=str(tmp_path / "cache"),
        chat_template=str(tmp_path / "needle.jinja"),
    )
    dataset = open_dataset(
        data, sequence_length=needle.SHORT, vocab_size=256, log=lambda _: None
    )
    batch = dataset.train_batch(0, 3)
    lines = (tmp_path / f"{needle.SHORT}.jsonl").read_text().splitlines()
    wanted = set()
    for line in lines:
        asked, answers = (
            [m["content"] for m in json.loads(line)["messages"]][i::2] for i in (0, 1)
        )
        assert sum(map(len, asked + answers)) == needle.SHORT
        for question, digits in zip(asked, answers, strict=True):
            assert asked[0].count(question[-1] + digits) == 1
        wanted.add("".join(answers))
    targets, weights = batch["targets"], batch["weights"]
    assert {
        bytes(t[w > 0].astype(np.uint8)).decode()
        for t, w in zip(targets, weights, strict=True)
    } == wanted


@pytest.mark.parametrize("depth", [0.0625, 0.9375])
def test_a_prompt_asks_for_the_code_at_its_depth(needle, depth):
    found = needle.prompts(depth, 20, seed=1)
    assert len({prompt for prompt, _ in found}) == 20
    for prompt, digits in found:
        assert len(prompt + digits) == needle.LONG
        name = prompt[-1]
        assert abs(prompt.index(f"{name}{digits}") / needle.LONG - depth) < 0.03
        assert prompt.count(name) == 2  # in the haystack, and asked for
    rng = random.Random(0)
    assert len({code.name for code in needle.codes(rng, 26)}) == 26
