"""Names and prompts that are not UTF-8: they work, or fail with one line."""

import io
import json
import os
import subprocess
import sys

import pytest

from jaxdist import train
from jaxdist.config import ConfigError, is_text
from jaxdist.evaluation import trained_run
from jaxdist.storage import atomic, run_format
from jaxdist.telemetry import display
from jaxdist.trainer import run_config, workdir
from support.paths import ROOT
from support.runs import refused

ODD = os.fsdecode(b"w\xff")


def jaxdist(folder, *arguments):
    """Runs a command whose output takes UTF-8 only."""
    environment = os.environ | {
        "PYTHONIOENCODING": "utf-8:strict",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "jaxdist", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def test_the_names_are_not_utf8():
    assert not is_text(ODD)
    assert not is_text("\ud800")
    assert is_text("wÿ \U0001f600")


def test_a_run_cannot_be_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (fault,) = refused(capsys, "--config", "quickstart", "--workdir", ODD)
    assert r"w\udcff': not UTF-8" in fault
    assert not os.listdir(tmp_path)
    (tmp_path / ODD).mkdir()
    monkeypatch.chdir(ODD)
    (fault,) = refused(capsys, "--config", "quickstart")  # runs/quickstart below it
    assert "not UTF-8" in fault
    config = run_config.default_config()
    config.checkpoint.folder = f"/tmp/{ODD}"
    with pytest.raises(ConfigError, match="not UTF-8"):
        workdir.checkpoints_folder(tmp_path, run_config.from_config(config))


@pytest.mark.slow
def test_what_was_copied_there_is_read(tmp_path):
    folder = tmp_path / ODD
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    config = run_config.default_config().to_dict()
    (folder / "config.json").write_text(json.dumps(run_format.marked(config)))
    done = jaxdist(tmp_path, "report", ODD)
    assert done.returncode == 0
    assert rb"w\udcff" in done.stdout
    assert (folder / "report.html").read_text().endswith("</html>\n")
    for action in ("list", "verify", "inspect"):
        assert jaxdist(tmp_path, "checkpoint", action, ODD).returncode in (0, 77)
    done = jaxdist(tmp_path, "generate", "--workdir", ODD, "--prompt", "x")
    assert done.returncode == 78
    assert b"not UTF-8" in done.stderr
    done = jaxdist(
        tmp_path, "convert", "--from", ODD, "--to", "x", "--format", "huggingface"
    )
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", [ODD, "\ud800"])
def test_prompts_are_text(text, capsys):
    with pytest.raises(ConfigError, match="the prompt .* is not UTF-8 text"):
        trained_run._checked_text(text)
    (fault,) = refused(
        capsys, "--config", "quickstart", f"--config.train.sample_prompt={text}"
    )
    assert "train.sample_prompt=" in fault
    assert "is not UTF-8 text" in fault


@pytest.mark.parametrize(
    "flags", [["--config", ODD], ["--config", f"{ODD}/x.py"], [f"--{ODD}"]]
)
def test_other_flags_are_one_line(flags, capsys):
    assert (
        len(
            refused(
                capsys, *(["--config", "quickstart"] if len(flags) == 1 else []), *flags
            )
        )
        == 1
    )


def test_text_is_printed_and_written_escaped(tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    display.print_safe(f"data: {ODD}")
    train._parser().parse_args([])
    print(ODD, "\ud800", flush=True)
    assert out.buffer.getvalue() == b"data: w\\udcff\nw\\udcff \\ud800\n"
    atomic.write_text(tmp_path / "page", ODD)
    assert (tmp_path / "page").read_text() == r"w\udcff"
