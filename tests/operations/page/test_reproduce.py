"""The command that repeats a run: what is in it, what is not, and what a run's folder
cannot put there.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist import train
from jaxdist.operations.page import summary
from jaxdist.operations.page.html import render
from jaxdist.operations.page.status import as_text, read_status
from jaxdist.trainer import provenance, reproduce
from support.runs import TINY, losses

pytestmark = pytest.mark.usefixtures("shared_steps")

TRAINED = {
    "command": {
        "argv": ["python", "-m", "jaxdist.train"],
        "folder": os.getcwd(),
        "trains": True,
    }
}
OURS = {"model.target": "jaxdist.models.transformer:Transformer"}


def command_of(folder, info=TRAINED, config=OURS) -> str:
    return reproduce.repeat(folder, info, config)["command"]


def test_flags_are_recorded_and_secrets_are_not():
    environ = {
        "XLA_FLAGS": "--a=1",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": "--b",
        "NCCL_DEBUG": "INFO",
        "JAX_API_KEY": "x",
        "TPU_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "HF_TOKEN": "x",
        "PATH": "/bin",
        "LD_PRELOAD": "evil.so",
    }
    assert set(reproduce.recorded(environ)) == {
        "XLA_FLAGS",
        "JAX_PLATFORMS",
        "LIBTPU_INIT_ARGS",
        "NCCL_DEBUG",
    }


def test_a_train_command_repeats_from_the_config_of_its_folder(tmp_path):
    folder = tmp_path / "my run"
    environment = {
        "XLA_FLAGS": "--a=1 --b=2",
        "JAXDIST_PROCESS_ID": "0",
        "JAXDIST_COORDINATOR": "x:1",
    }
    # by jax: of this venv
    environment |= {"TPU_LIBRARY_PATH": "/venv/libtpu.so", "TPU_SKIP_MDS_QUERY": "1"}
    text = command_of(folder, TRAINED | {"environment": environment})
    words = shlex.split(text)
    assert words[0] == "XLA_FLAGS=--a=1 --b=2"
    assert words[1:4] == [
        "python",
        "-m",
        "jaxdist.train",
    ]
    assert words[words.index("--config") + 1] == str(folder / "config.json")
    assert words[words.index("--workdir") + 1] == str(tmp_path / "my run-again")
    assert "JAXDIST" not in text
    assert "TPU_" not in text


def test_a_group_repeats_under_launch(tmp_path):
    info = TRAINED | {"num_processes": 4, "hosts": ["a", "a", "b", "b"]}
    text = command_of(tmp_path, info)
    assert text.startswith("jaxdist launch --processes 2 -- python -m jaxdist.train ")
    assert text.endswith("# on each of 2 machines, under a scheduler")
    assert "#" not in command_of(tmp_path, info | {"hosts": ["a"] * 4})


def test_a_script_repeats_as_it_was_called(tmp_path):
    stored = {"argv": ["python", "mine.py", "--name", "a b"], "trains": False}
    assert command_of(tmp_path, {"command": stored}) == "python mine.py --name 'a b'"
    group = {"command": stored, "num_processes": 2}
    assert (
        command_of(tmp_path, group)
        == "jaxdist launch --processes 2 -- python mine.py --name 'a b'"
    )


def test_a_command_goes_to_where_its_paths_relate_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = TRAINED["command"] | {"folder": "/some where"}
    text = command_of(Path("runs/x"), {"command": there, "environment": {"NPROC": "8"}})
    assert text.startswith("cd '/some where' && NPROC=8 python -m jaxdist.train ")
    assert (
        f"--config {tmp_path}/runs/x/config.json --workdir {tmp_path}/runs/x-again"
        in text
    )
    text = command_of(tmp_path, config=OURS | {"checkpoint.folder": "gs://bucket/x/"})
    # beside, not within
    assert text.endswith("--config.checkpoint.folder=gs://bucket/x-again")


def test_a_recorded_command_has_no_secrets():
    words = [
        "python",
        "a.py",
        "--hf-token=hf_x",
        "--api_key",
        "sk-x",
        "wandb.password=x",
        "https://me:pw@host/repo",
    ]
    text = " ".join(reproduce.without_secrets(words))
    assert (
        text
        == "python a.py --hf-token=*** --api_key *** wandb.password=*** https://***@host/repo"
    )
    others = [
        "--config.train.sample_tokens=5",
        "--config.data.tokenizer",
        "gpt2",
        "--monkey",
        "x",
        "--token",
        "--b",
    ]
    assert reproduce.without_secrets(others) == others
    assert reproduce.recorded({"JAX_X": "s3://a:b@c/d"}) == {"JAX_X": "s3://***@c/d"}


def test_a_run_whose_start_folder_is_gone_has_none(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert provenance._folder() == ""


@pytest.mark.parametrize(
    "stored", [None, 3, [], {}, {"argv": "ls"}, {"argv": [1]}, {"argv": None}]
)
def test_what_is_no_command_is_left_out(tmp_path, stored):
    assert reproduce.repeat(tmp_path, {"command": stored}, OURS) is None
    assert reproduce.as_lines(None) == []


def test_code_that_the_folder_names_stays_behind_a_comment(tmp_path):
    config = {"model.target": "evil.py:Model; rm -rf ~", "train.loggers": ["a.b:C"]}
    environment = {
        "LD_PRELOAD": "evil.so",
        "XLA_FLAGS": "$(rm -rf ~)",
        "JAX_A B": "x",
        "JAX_X": 3,
    }
    text = command_of(tmp_path, TRAINED | {"environment": environment}, config)
    before, _, after = text.partition("  # ")
    assert "evil" not in before
    assert "evil.py:Model; rm" in after
    assert "a.b:C" in after
    assert shlex.split(before)[0] == "XLA_FLAGS=$(rm -rf ~)"
    assert "'$(rm -rf ~)'" in before
    moved = command_of(tmp_path, TRAINED, {"model.target": "x\n\x1b[2Jevil:Y"})
    assert moved.isprintable()


def test_a_commit_is_of_the_clone_that_tracks_the_package(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert provenance.commit(package) == {}
    git("init", "-q")
    # not in the index: an environment inside of a clone
    assert provenance.commit(package) == {}
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")
    known = provenance.commit(package)
    assert len(known["commit"]) == 40
    assert known["dirty"] is False
    (package / "__init__.py").write_text("x = 1\n")
    assert provenance.commit(package) == known | {"dirty": True}


def test_a_run_says_what_repeats_it_and_that_has_its_losses(
    tmp_path, monkeypatch, capsys
):
    changes = TINY | {"train.steps": 6, "checkpoint.save_at_end": False}
    flags = [f"--config.{key}={str(value).lower()}" for key, value in changes.items()]
    folder = tmp_path / "first"
    # as `python -m` has it, where no test before this one has begun a notebook
    monkeypatch.setattr("sys.argv", [str(provenance._PACKAGE / "train.py")])
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert train.main(["--config", "quickstart", "--workdir", str(folder), *flags]) == 0
    info = json.loads((folder / "run.json").read_text())
    assert info["hosts"]
    assert info["num_chips"] == 1
    assert info["command"]["trains"]
    assert info["environment"]["XLA_FLAGS"]
    assert {
        "jax",
        "orbax-checkpoint",
        "python",
    } <= set(info["versions"])
    document = read_status(folder).document()
    text = document["repeat"]["command"]
    assert f"repeat    {text}" in as_text(document)
    assert document["repeat"]["source"] == info["source"]["hash"]
    assert "Repeat" in render([summary.read_run(folder)])
    words = shlex.split(text)
    assert train.main(words[words.index("jaxdist.train") + 1 :]) == 0
    assert len(losses(folder)) == 6
    assert losses(folder) == losses(tmp_path / "first-again")
