"""Fine-tuning on chats, from the shipped config to answers and an export."""

import ast
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxdist import convert, generate, train
from jaxdist.config import ConfigError
from jaxdist.data.sources import chat_rows
from jaxdist.evaluation import loading
from jaxdist.evaluation.trained_run import Sample, TrainedRun
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.telemetry.metrics import read_rows
from support.chats import HEADERS, rows, turn, write_rows, write_tokenizer
from support.huggingface import SMOLLM, run_convert
from support.paths import CONFIGS, DOCS
from support.runs import SMALL_MODEL
from support.weight_sources import parsed

pytestmark = pytest.mark.usefixtures("shared_steps")

pytest.importorskip("jinja2", reason="extra `chat` is not installed")

TINY = {
    **SMALL_MODEL,
    "data.source": "text",
    "data.path": "text.txt",
    "data.validation_share": 0,
}
SHORT = {
    "train.steps": 2,
    "train.eval_every": 0,
    "train.log_every": 1,
    "optimizer.warmup_steps": 1,
}
SHORT |= {"train.sample_tokens": 0, "checkpoint.every_steps": 0, "batch.global_size": 8}


def flags(changes):
    return [f"--config.{key}={value}" for key, value in changes.items()]


def test_the_shipped_set_has_200_chats():
    lines = (CONFIGS / "python_questions.jsonl").read_text().splitlines()
    some = [json.loads(chat_rows.chat_row(json.loads(line))) for line in lines]
    assert len({json.dumps(row) for row in some}) == 200
    for row in some:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (
            len(row["messages"]) // 2
        )


@pytest.mark.slow
def test_the_config_is_followed_from_the_quickstart_to_an_answer(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    head = ast.get_docstring(ast.parse((CONFIGS / "sft_lora.py").read_text()))
    lines = [
        line.strip()
        for line in head.splitlines()
        if line.strip().startswith("python -m")
    ]
    base, tuned, answer = (shlex.split(line)[3:] for line in lines)
    (tmp_path / "text.txt").write_text("def f(x): return x\n" * 200)
    with pytest.raises(ConfigError, match="init.from_run=runs/quickstart"):
        train.main(tuned)
    cache = {"data.cache_dir": tmp_path / "cache"}
    assert train.main([*base, *flags(TINY | SHORT | cache)]) == 0
    capsys.readouterr()
    sampled = {"train.sample_tokens": 4}
    assert train.main([*tuned, *flags(SHORT | cache | sampled)]) == 0
    said = capsys.readouterr().out
    assert "training examples" in said
    assert "0 dropped" in said
    assert "trainable" in said
    # the sample answers a question that is held out
    text = (tmp_path / "runs/sft_lora/sample.txt").read_text()
    assert re.match("\x02user\\n[^\x03]+\x03\x02assistant\\n", text)
    assert "sample:\n␂user\n" in said
    assert [
        row["tokens_seen"] > 0 for row in read_rows(tmp_path / "runs/sft_lora").train
    ] == [True, True]
    assert {"chat_template.jinja", "tokenizer_config.json"} <= set(
        os.listdir("runs/sft_lora")
    )
    run = loading.load_run("runs/sft_lora")
    assert run.tokenizer.end_ids == (3,)
    question = answer[answer.index("--prompt") + 1]
    (sample,) = run.chat(
        [[turn("user", question)]], max_tokens=5, sampling=SamplingConfig(0.0)
    )[0]
    capsys.readouterr()
    assert generate.main([*answer, "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == sample.text + "\n"
    assert question not in sample.text
    # A terminal would obey control characters; a pipe or a file gets all of them.
    controls = Sample("a\tb\n\x1b[2J\x0e", sample.tokens, ended=True)
    with monkeypatch.context() as patched:
        patched.setattr(TrainedRun, "chat", lambda *_, **__: [[controls]])
        assert generate.main(answer) == 0
        assert capsys.readouterr().out == "a\tb\n\x1b[2J\x0e\n"
        patched.setattr(sys.stdout, "isatty", lambda: True)
        assert generate.main(answer) == 0
        assert capsys.readouterr().out == "a\tb\n␛[2J␎\n"
    # Two turns typed: the second question follows the first and its answer.
    talk = [
        turn("user", question),
        turn("assistant", sample.text),
        turn("user", "And why?"),
    ]
    (second,) = run.chat([talk], max_tokens=5, sampling=SamplingConfig(0.0))[0]
    answer[answer.index("--prompt") : answer.index("--prompt") + 2] = ["--interactive"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\nAnd why?\n"))
    assert generate.main([*answer, "--max-tokens", "5", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{sample.text}\n{second.text}\n"
    assert "warning" not in said.err
    assert run.evaluate().tokens > 0
    template = Path("runs/sft_lora/chat_template.jinja")
    template.write_text(template.read_text().replace("\\x03", "\\n"))
    words = ["--chat", "--prompt", question, "--max-tokens", "2"]
    assert generate.main([*answer[:2], *words]) == 0
    assert "generation does not stop there" in capsys.readouterr().err


@pytest.mark.slow
def test_a_chat_goes_out_as_transformers_wants_it(tmp_path, monkeypatch):
    """The export has the chat template, and the ids that end a turn."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    folder, work, out = (
        write_tokenizer(tmp_path / "model", HEADERS),
        tmp_path / "work",
        tmp_path / "out",
    )
    path = write_rows(tmp_path / "rows.jsonl", rows("messages", 30))
    data = {
        "source": "jsonl",
        "path": path,
        "format": "chat",
        "packing": "documents",
        "tokenizer": folder,
    }
    data |= {"cache_dir": tmp_path / "cache", "validation_share": 0}
    changes = TINY | SHORT | {f"data.{key}": value for key, value in data.items()}
    changes |= {
        "model.vocab_size": 320,
        "batch.sequence_length": 64,
        "optimizer.name": "adamw",
    }
    changes |= {"model.zero_init_outputs": "false", "model.qk_norm": "none"}
    assert (
        train.main(["--config", "quickstart", "--workdir", str(work), *flags(changes)])
        == 0
    )
    assert (
        convert.main(["--from", str(work), "--to", str(out), "--format", "huggingface"])
        == 0
    )
    assert (out / "chat_template.jinja").read_text() == HEADERS
    tokenizer = loading.load_run(work).tokenizer
    names = [tokenizer._tokenizer.id_to_token(i) for i in tokenizer.end_ids]
    assert names == ["<|end_of_text|>", "<|eot_id|>"]
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert ends == list(tokenizer.end_ids)
    about = json.loads((out / "tokenizer_config.json").read_text())
    assert (about["bos_token"], about["eos_token"]) == (
        "<|begin_of_text|>",
        "<|end_of_text|>",
    )


def test_the_page_can_be_followed(tmp_path, monkeypatch):
    """The page's commands are run by the tests above, or resolve."""
    page = (DOCS / "how-to/chats.md").read_text()
    first, second = re.findall(r"```sh\n(.*?)```", page, re.S)
    assert [line.removeprefix("jaxdist ") for line in first.splitlines()] == [
        line.strip().removeprefix("python -m jaxdist.")
        for line in (CONFIGS / "sft_lora.py").read_text().splitlines()
        if line.strip().startswith("python -m")
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    write_rows(tmp_path / "chats" / "a.jsonl", rows("messages"))
    command = shlex.split(
        second.replace("\\\n", " ").replace("models/smollm", str(SMOLLM))
    )
    run = parsed(command[2:])
    assert run.data.format == "chat"
    assert not list(run.data.faults())
    assert run.lora.rank == 16
    for row in re.findall(r"```json\n(.*?)```", page, re.S)[0].splitlines():
        assert chat_rows.chat_row(json.loads(row))


def test_a_model_without_a_template_cannot_chat(tmp_path):
    assert run_convert(SMOLLM, tmp_path / "work", "jaxdist") == 0
    run = loading.load_run(tmp_path / "work")
    with pytest.raises(
        ConfigError, match="no chat template; put one there as chat_template.jinja"
    ):
        run.chat([[turn("user", "the inn")]])
    with pytest.raises(ConfigError, match="--system: a turn of a chat; give --chat"):
        generate.main(
            ["--workdir", str(tmp_path / "work"), "--prompt", "a", "--system", "b"]
        )
