"""Training on preferences by commands: the shipped config, evaluate, bad input."""

import json
import os
import shlex

import pytest

pytest.importorskip("jinja2", reason="extra `chat` is not installed")

from jaxdist import evaluate, train
from jaxdist.config import EXIT_CONFIG, ConfigError, exit_code_of
from jaxdist.telemetry.metrics import read_rows
from support.paths import CONFIGS
from support.runs import SMALL_MODEL

TINY = {**SMALL_MODEL, "data.source": "text", "data.path": "text.txt"}
TINY |= {"data.validation_share": 0, "train.eval_every": 0}
SHORT = {
    "train.steps": 2,
    "train.log_every": 1,
    "train.eval_every": 2,
    "train.sample_tokens": 0,
    "optimizer.warmup_steps": 1,
    "batch.global_size": 8,
    "data.cache_dir": "cache",
}


def flags(changes):
    return [f"--config.{key}={value}" for key, value in changes.items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    (tmp_path / "text.txt").write_text("def f(x): return x\n" * 400)
    return tmp_path


def test_the_shipped_set_has_200_pairs():
    rows = (CONFIGS / "python_preferences.jsonl").read_text().splitlines()
    assert len(rows) == 200
    for line in rows:
        row = json.loads(line)
        (prompt,), (chosen,), (rejected,) = row.values()
        assert prompt["role"] == "user"
        assert chosen["role"] == rejected["role"] == "assistant"
        assert chosen["content"].startswith(rejected["content"])


@pytest.mark.slow
def test_the_shipped_config_follows_sft_lora(folder, capsys):
    for name in ("quickstart", "sft_lora", "dpo_lora"):
        changes = SHORT | (TINY if name == "quickstart" else {})
        assert train.main(["--config", name, *flags(changes)]) == 0
    said = capsys.readouterr().out
    assert "reference: log-probabilities of 400 answers" in said
    rows = read_rows(folder / "runs/dpo_lora")
    # the adapters of sft_lora are the reference, so the first margin is 0
    assert rows.train[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert rows.train[0]["loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert rows.train[0]["aux/sft"] > 1
    assert rows.evaluation[-1]["eval_tokens"] == 15
    assert evaluate.main(["--workdir", "runs/dpo_lora"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert " per pair over 15 pairs, aux/sft " in line
    assert "perplexity" not in line


GOOD = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (GOOD | {"rejected": " 2"}, "", "equal"),
        ({"prompt": "1", "chosen": "2"}, "", "rejected"),
        (GOOD, "--config.objective.beta=0", "objective.beta"),
        (GOOD, "--config.objective.name=next_token", "objective.name=dpo"),
        (GOOD, "--config.data.packing=window", "data.packing=documents"),
        (GOOD, "--config.objective.reference=base", "lora.rank"),
        (GOOD, "--config.objective.reference_from=nowhere", "reference_from=nowhere"),
    ],
    ids=str,
)
def test_bad_input_ends_with_78_in_one_line(folder, row, change, words):
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    command = (
        "--config quickstart --workdir run --config.objective.name=dpo"
        " --config.data.source=jsonl --config.data.path=pairs.jsonl"
        " --config.data.format=preferences --config.data.packing=documents"
        " --config.data.cache_dir=cache"
    )
    with pytest.raises(ConfigError) as caught:
        train.main([*shlex.split(command), *shlex.split(change)])
    assert exit_code_of(caught.value) == EXIT_CONFIG == 78
    assert any(words in fault for fault in caught.value.faults)
    assert "\n" not in "".join(caught.value.faults)
    assert not list(folder.glob("run/checkpoints/[0-9]*"))
