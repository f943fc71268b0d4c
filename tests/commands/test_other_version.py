"""Folders of another version: each command names them in one line and changes nothing.

tests/data/other_version is a run of four steps by the last commit that wrote no format
into its files (349a906), without the data of its arrays.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist import (
    convert,
    evaluate,
    generate,
    plan,
    report,
    runs,
    status,
    train,
)
from jaxdist.checkpoint import __main__ as checkpoint
from jaxdist.checkpoint import integrity
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset, packing, token_cache
from jaxdist.operations.copies import copies
from jaxdist.storage import run_format
from jaxdist.storage.digest import digest
from jaxdist.trainer import exit_code, training
from support.paths import DATA
from support.runs import TINY, environment, run_of
from support.runs import train as trained

pytestmark = pytest.mark.usefixtures("shared_steps")

NEWER = "jaxdist-2"


def contents(*folders: Path) -> dict[str, tuple]:
    """Lists size, time and digest of all files in the folders."""
    found = {}
    for folder in folders:
        for path in [folder, *sorted(folder.rglob("*"))]:
            about = path.stat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (
                about.st_mode,
                about.st_mtime_ns,
                hashlib.sha256(data).hexdigest(),
            )
    return found


def rewrite(file: Path, **fields: object) -> None:
    document = json.loads(file.read_text()) | fields
    if "seal" in document:
        del document["seal"]
        document["seal"] = digest(json.dumps(document, sort_keys=True, indent=1))
    file.write_text(json.dumps(document, sort_keys=True, indent=1))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Returns a folder with a run of this version, `run`, its copies and its cache."""
    root = tmp_path_factory.mktemp("ours")
    trained(
        root / "run",
        train__steps=8,
        profile__start_step=3,
        profile__num_steps=2,
        checkpoint__copy_to=f"file://{root / 'store'}",
        data__cache_dir=str(root / "cache"),
    )
    return root


@pytest.fixture(params=["older", "newer"])
def version(request):
    return request.param


@pytest.fixture
def folder(tmp_path, version):
    """Returns a workdir of another version. A store of its copies has equal files."""
    folder = shutil.copytree(DATA / "other_version", tmp_path / "there" / "run")
    if version == "newer":
        for name in ("config.json", "run.json", "ledger.json"):
            rewrite(folder / name, format=NEWER)
        rewrite(folder / "checkpoints" / "4" / "manifest.json", format=NEWER)
    return folder


COMMANDS = {
    "train": (train.main, "--config quickstart --workdir RUN", 78),
    "train, without --config": (train.main, "--workdir RUN", 78),
    "train, its config": (train.main, "--config RUN/config.json --workdir NEW", 78),
    "train, a dry run": (
        train.main,
        "--config quickstart --workdir RUN --dry-run",
        78,
    ),
    "init.from_run": (
        train.main,
        "--config quickstart --workdir NEW --config.init.from_run=RUN",
        78,
    ),
    "init.from_run, a step": (
        train.main,
        "--config quickstart --workdir NEW --config.init.from_run=RUN/checkpoints@4",
        77,
    ),
    "checkpoint.folder": (
        train.main,
        "--config quickstart --workdir NEW --config.checkpoint.folder=RUN/checkpoints",
        78,
    ),
    "checkpoint.copy_to": (
        train.main,
        "--config quickstart --workdir NEW --config.checkpoint.copy_to=file://RUN",
        78,
    ),
    "evaluate": (evaluate.main, "--workdir RUN", 78),
    "generate": (generate.main, "--workdir RUN --prompt x", 78),
    "report": (report.main, "RUN", 78),
    "status": (status.main, "RUN", 78),
    "checkpoint list": (checkpoint.main, "list RUN", 78),
    "checkpoint list, a folder": (checkpoint.main, "list RUN/checkpoints", 77),
    "checkpoint inspect": (checkpoint.main, "inspect RUN/checkpoints/4", 77),
    "checkpoint verify": (checkpoint.main, "verify RUN/checkpoints", 77),
    "checkpoint diff": (
        checkpoint.main,
        "diff RUN/checkpoints/4 RUN/checkpoints/4",
        77,
    ),
    "convert": (convert.main, "--from RUN --to NEW --format huggingface", 78),
    "plan": (plan.main, "--config quickstart --workdir RUN --on cpu:1", 78),
    "plan, of the run": (plan.main, "--workdir RUN", 78),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_names_it_and_leaves_it(name, folder, version, tmp_path, capfd):
    main, words, code = COMMANDS[name]
    words = words.replace("RUN", str(folder)).replace("NEW", str(tmp_path / "new"))
    before = contents(folder.parent)
    assert exit_code.exit_code(lambda: main(words.split())) == code
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert str(folder) in error
    assert "was written by another version of jaxdist. It has " in error
    bare = "checkpoint" in name or "a step" in name
    if version == "newer":
        assert f"format {NEWER!r}" in error
    else:
        assert "no format" in error or (bare and "format 1" in error)
    assert f"reads '{run_format.FORMAT}' only. Use the version that wrote it" in error
    assert contents(folder.parent) == before


def test_a_folder_of_hugging_face_is_no_other_version(tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    words = ["--workdir", str(tmp_path), "--prompt", "a"]
    assert exit_code.exit_code(lambda: generate.main(words)) == 78
    error = capfd.readouterr().err
    assert "holds a Hugging Face model, not a run" in error
    assert f"convert --from {tmp_path} --to" in error


def test_runs_lists_it(folder, capsys):
    before = contents(folder.parent)
    assert runs.main([str(folder.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] == "other version"
    assert "was written by another version" in row["reason"]
    assert runs.main([str(folder.parent)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert contents(folder.parent) == before


def test_launch_and_fit_leave_it(folder):
    before = contents(folder.parent)
    python = [sys.executable, "-m"]
    command = [*python, "jaxdist.launch", "--", *python, "jaxdist.train"]
    words = ["--config", "quickstart", "--workdir", str(folder)]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, env=environment(1)
    )
    assert done.returncode == 78
    assert "was written by another version" in done.stdout
    with pytest.raises(ConfigError, match="was written by another version"):
        training.run(run_of("quickstart"), folder)  # what fit calls
    assert contents(folder.parent) == before


@pytest.mark.parametrize("name", ["config.json", "run.json"])
def test_one_of_the_two_files_is_enough(folder, name, capsys):
    other = {"config.json": "run.json", "run.json": "config.json"}[name]
    (folder / other).unlink()
    before = contents(folder.parent)
    words = ["--config", "quickstart", "--workdir", str(folder)]
    assert exit_code.exit_code(lambda: train.main(words)) == 78
    assert "was written by another version" in capsys.readouterr().err
    assert contents(folder.parent) == before


@pytest.mark.slow
def test_a_step_of_another_version_among_ours_is_left(ours, tmp_path, capsys, version):
    folder = shutil.copytree(ours / "run", tmp_path / "run")
    rewrite(
        folder / "checkpoints" / "7" / "manifest.json",
        format=1 if version == "older" else NEWER,
    )
    before = contents(folder)
    settings = [f"--config.{key}={value}" for key, value in TINY.items()]
    words = ["--config", "quickstart", "--workdir", str(folder), *settings]
    assert exit_code.exit_code(lambda: train.main(words)) == 78
    assert f"{folder}/checkpoints/7 was written" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "change",
    [("jaxdist-1", "jaxdist-3"), ('"format"', '"fermat"'), ('"seal"', '"seel"')],
)
def test_a_damaged_manifest_is_of_no_other_version(ours, tmp_path, change):
    step = shutil.copytree(ours / "run" / "checkpoints" / "8", tmp_path / "8")
    file = step / "manifest.json"
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(CheckpointError) as raised:
        integrity.read_manifest(step)
    assert not isinstance(raised.value, integrity.OtherVersion)


def test_a_store_of_another_version_is_left_by_a_run_that_has_steps(
    ours, folder, tmp_path
):
    before = contents(folder.parent)
    store = copies.Copies(f"file://{folder}")
    with pytest.raises(CheckpointError, match="has the copies of another run"):
        store.copy(ours / "run" / "checkpoints", 8)
    with pytest.raises(integrity.OtherVersion, match=f"file://{folder}, step 4"):
        copies.fetch_newest(store, tmp_path)
    assert contents(folder.parent) == before


def test_every_document_of_a_run_carries_the_format(ours):
    documents = [file for file in ours.rglob("*.json") if "plugins" not in file.parts]
    documents += ours.rglob("metadata/metadata")
    assert {file.name for file in documents} >= {
        "config.json",
        "run.json",
        "ledger.json",
        "manifest.json",
        "metadata",
        "meta.json",
        "top_ops.json",
    }
    for file in documents:
        assert json.loads(file.read_text())["format"] == run_format.FORMAT, file


def test_caches_of_another_version_are_made_anew(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)

    def opened(lines):
        config = DataConfig(
            source="text",
            path=str(tmp_path / "text.txt"),
            cache_dir=str(tmp_path / "cache"),
            packing="documents",
        )
        return open_dataset(config, sequence_length=16, log=lines.append)

    with monkeypatch.context() as past:
        past.setattr(token_cache, "_VERSION", 2)
        past.setattr(packing, "_VERSION", 1)
        past.setattr(run_format, "marked", dict)
        past.setattr(run_format, "unmarked", lambda document, place: dict(document))
        older = opened([])
    before = contents(*(tmp_path / "cache").iterdir())
    newer = opened(lines := [])
    assert any("tokenized 1 documents" in line for line in lines)
    assert newer.fingerprint == older.fingerprint
    assert before.items() <= contents(*(tmp_path / "cache").iterdir()).items()
    # An entry without a format, under the key of this version.
    (meta,) = (
        file
        for file in (tmp_path / "cache").glob("*/meta.json")
        if "format" in file.read_text()
    )
    document = json.loads(meta.read_text())
    del document["format"]
    meta.write_text(json.dumps(document))
    assert opened(lines := []).fingerprint == older.fingerprint
    assert any("tokenized 1 documents" in line for line in lines)
