"""`jaxdist checkpoint`: what it prints, its exit codes, and that it needs neither jax
nor a device.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxdist.checkpoint import __main__ as command
from jaxdist.checkpoint import folders, state_dict
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from support.checkpoints import a_data_file, flip, make_state, mesh_of, saved


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Returns a workdir with the steps 1 and 2, not to be changed."""
    workdir = tmp_path_factory.mktemp("sound") / "run"
    saved(workdir / "checkpoints", [1, 2])
    return workdir


@pytest.fixture
def workdir(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


@pytest.fixture
def called(capsys):
    """Returns a function that gives a command's exit code and its JSON (or text)."""

    def call(*words: object, text: bool = False):
        code = command.main([*map(str, words), *([] if text else ["--json"])])
        out = capsys.readouterr().out
        return code, out if text or not out else json.loads(out)

    return call


def test_files_of_another_shape_are_said_to_be(workdir, called, capsys):
    folders.quarantine(workdir / "checkpoints", 2, "it was damaged")
    (workdir / "quarantine" / "2.json").write_text("[" * 100_000)
    (workdir / "checkpoints" / "1" / "manifest.json").write_text("[" * 100_000)
    code, found = called("list", workdir)
    assert code == 0
    assert "nested deeper than" in found["steps"][0]["fault"]
    assert found["quarantine"][0]["step"] == "2"
    assert "nested deeper" in found["quarantine"][0]["reason"]
    assert called("list", workdir, text=True)[0] == 0
    for text in (
        "[]",
        '{"format": "jaxdist-1", "checkpoint": 3}',
        '{"format": "jaxdist-1", "checkpoint": {"folder": []}}',
        "{" * 100_000,
    ):
        (workdir / "config.json").write_text(text)
        assert command.main(["list", str(workdir)]) == 78
        assert "config.json is damaged" in capsys.readouterr().err


def test_list_says_what_is_there_and_what_is_in_quarantine(workdir, called):
    folders.quarantine(workdir / "checkpoints", 2, "it was damaged")
    (workdir / "checkpoints" / "7").mkdir()
    code, found = called("list", workdir)
    assert code == 0
    assert found["folder"] == str(workdir / "checkpoints")
    one, seven = found["steps"]
    assert (one["step"], one["arrays"]) == (1, 13)
    assert one["files"] >= 8
    assert one["bytes"] > 1000
    assert seven["step"] == 7
    assert "manifest.json is missing" in seven["fault"]
    (aside,) = found["quarantine"]
    assert (aside["step"], aside["reason"]) == (2, "it was damaged")
    assert called("list", workdir / "checkpoints")[1] == found
    code, text = called("list", workdir, text=True)
    assert "step 1, arrays 13, files" in text
    assert "it was damaged" in text


def test_a_workdir_may_have_a_number_for_its_name(workdir, called, tmp_path):
    job = shutil.copytree(workdir, tmp_path / "12345")
    _, found = called("list", job)
    assert found["folder"] == str(job / "checkpoints")
    assert "12345" not in str(found["steps"])


def test_inspect_shows_arrays_and_metadata_of_the_newest_or_the_named_step(
    sound, called
):
    code, found = called("inspect", sound)
    assert code == 0
    assert (found["step"], found["metadata"]) == (2, {"data": 2})
    arrays = state_dict.describe(state_dict.to_canonical(make_state(mesh_of(1, 1))))
    assert {n: (x["dtype"], tuple(x["shape"])) for n, x in found["arrays"].items()} == {
        name: (info.dtype, info.shape) for name, info in arrays.items()
    }
    assert all(len(x["fingerprint"]) == 8 for x in found["arrays"].values())
    assert called("inspect", sound / "checkpoints" / "1")[1]["step"] == 1
    assert (
        "trainable/norm dtype float32, shape [8]"
        in called("inspect", sound, text=True)[1]
    )


def test_verify_finds_damage_and_says_how_bad_it_is(workdir, called):
    code, found = called("verify", workdir)
    assert code == 0
    assert ["fault" in row for row in found["steps"]] == [False, False]
    flip(a_data_file(workdir / "checkpoints" / "2"), 77)
    code, found = called("verify", workdir)
    assert code == 1
    assert ["fault" in row for row in found["steps"]] == [False, True]
    assert found["good"] == "1 of 2"
    assert "has changed since it was sealed" in found["steps"][1]["fault"]
    assert called("verify", workdir / "checkpoints" / "1")[0] == 0
    (workdir / "checkpoints" / "1" / "manifest.json").unlink()
    assert called("verify", workdir)[0] == 77
    assert not (workdir / "quarantine").exists()  # it only looks


def test_diff_names_the_arrays_that_differ(workdir, called, tmp_path):
    steps = workdir / "checkpoints"
    assert called("diff", steps / "1", steps / "1")[1]["equal"]
    code, found = called("diff", steps / "1", workdir)
    assert code == 1
    assert not found["equal"]
    assert found["metadata"] == ["run.data: 1 and 2"]
    assert len(found["different"]) == 13
    assert set(found["different"].values()) == {"values"}
    one = make_state(mesh_of(1, 1), seed=1)
    other = one._replace(
        trainable=one.trainable | {"norm": one.trainable["norm"].astype("bfloat16")},
        model_state={"new": one.step},
        frozen={},
    )
    other = other._replace(
        trainable=other.trainable | {"embed": other.trainable["embed"].at[3, 3].add(1)}
    )
    with CheckpointManager(
        tmp_path / "other", CheckpointConfig(asynchronous=False)
    ) as store:
        store.save(1, jax.device_put(other, jax.devices()[0]), {"data": 1, "new": 0})
    code, found = called("diff", steps / "1", tmp_path / "other")
    assert code == 1
    assert found["metadata"] == ["run.new: (absent) and 0"]
    assert found["different"] == {
        "trainable/norm": "float32[8] and bfloat16[8]",
        "trainable/embed": "values",
    }
    assert (found["only_first"], found["only_second"]) == (
        ["frozen/table"],
        ["model_state/new"],
    )


def test_what_cannot_be_is_told_with_its_exit_code(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for words, code, said in (
        (["verify", tmp_path / "none"], 78, "there is no such folder"),
        (["inspect", tmp_path / "empty"], 77, "there is no checkpoint in"),
        (["verify", tmp_path / "empty"], 77, ""),
        (["list"], 78, "path"),
        (["lst", tmp_path], 78, "invalid choice"),
        (["diff", tmp_path], 78, "other"),
    ):
        assert command.main([*map(str, words)]) == code, words
        assert said in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_may_not_be_read_is_a_fault_in_one_line(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run").chmod(0)
    os.seteuid(65534)
    try:
        code = command.main(["list", str(tmp_path / "run")])
    finally:
        os.seteuid(0)
    (fault,) = capsys.readouterr().err.splitlines()
    assert code == 78
    assert fault.startswith("error: ")
    assert "Permission denied" in fault


def test_it_runs_without_jax_and_as_a_command(sound):
    code = (
        "import sys; from jaxdist.checkpoint.__main__ import main; "
        f"codes = [main([a, {str(sound)!r}]) for a in ('list', 'inspect', 'verify')]; "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "assert codes == [0, 0, 0] and 'etils' in loaded, codes; "
        "assert not loaded & {'jax', 'jaxlib', 'orbax', 'flax', 'tensorstore', 'numpy'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    for module in (["jaxdist.checkpoint"], ["jaxdist", "checkpoint"]):
        run = [sys.executable, "-m", *module, "verify", str(sound), "--json"]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        assert len(json.loads(done.stdout)["steps"]) == 2
