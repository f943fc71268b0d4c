"""The command `train`: an invalid input gets one line with its fix, and exit code 78."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdist import status, train
from jaxdist.checkpoint.folders import read_step
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.planner import dry_run
from jaxdist.storage import run_format
from jaxdist.trainer import cli, exit_code, run_config
from support.runs import command, overrides, refused

pytestmark = pytest.mark.usefixtures("shared_steps")

FEW = (
    "train.steps=2",
    "train.max_minutes=0",
    "train.eval_every=0",
    "optimizer.warmup_steps=1",
)
FEW += ("model.num_layers=2", "data.validation_share=0", "train.log_every=1")
FEW += ("optimizer.name=adamw",)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns the settings of a small text corpus and of its cache."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 2000)
    cache = f"data.cache_dir={folder / 'cache'}"
    return ["data.source=text", f"data.path={folder / 'text.txt'}", cache]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    """Returns the workdir of a run of two steps, and the arguments that made it."""
    folder = tmp_path_factory.mktemp("run")
    settings = overrides(*FEW, "train.sample_tokens=0", *corpus)
    arguments = ["--config", "quickstart", "--workdir", str(folder), *settings]
    assert train.main(arguments) == 0
    assert (folder / "checkpoints" / "2").is_dir()
    return folder, arguments


@pytest.mark.parametrize("content", [b"{\xff}", b"[]", b"null", b'{"seed": '])
@pytest.mark.parametrize("name", ["config.json", "skipped.json"])
def test_a_damaged_file_is_one_fault(finished, tmp_path, capsys, name, content):
    folder, arguments = finished
    workdir = shutil.copytree(folder, tmp_path / "run")
    (workdir / name).write_bytes(content)
    again = [str(workdir) if word == str(folder) else word for word in arguments]
    (fault,) = refused(capsys, *again)
    assert f"{workdir / name} is damaged" in fault


def test_status_shows_why_a_start_was_refused(tmp_path, capsys):
    """Before its first event, a run has no line but that of its terminal."""
    arguments = ["--config", "quickstart", "--workdir", str(tmp_path / "run")]
    settings = overrides("data.source=text", f"data.path={tmp_path / 'absent'}")
    (fault,) = refused(capsys, *arguments, *settings)
    assert status.main([str(tmp_path / "run")]) == 0
    assert f"failed: before its first step: {fault}" in capsys.readouterr().out


def test_a_signal_that_nobody_can_hear_is_refused_in_one_line():
    command = [sys.executable, "-m", "jaxdist.train", "--config", "quickstart"]
    odd = os.environ | {"JAXDIST_STOP_SIGNALS": "SIGKILL"}
    done = subprocess.run(command, env=odd, capture_output=True, text=True)
    (fault,) = done.stderr.splitlines()
    assert done.returncode == 78
    assert "SIGKILL cannot ask a run to stop" in fault


def test_a_workdir_is_a_local_folder(capsys):
    (fault,) = refused(capsys, "--config", "quickstart", "--workdir", "gs://bucket/run")
    assert (
        "--workdir gs://bucket/run: must be a local folder; checkpoint.folder takes gs://"
        in fault
    )


# --- faults of keys and values --------------------------------------------------------

CASES = {
    "unknown key": (
        ["train.step=3"],
        ["train.step: no such field. Did you mean train.steps?"],
    ),
    "wrong type": (
        ["train.steps=many"],
        ["train.steps: got 'many', required int >= 1. Meaning: optimizer"],
    ),
    "not a choice": (
        ["optimizer.name=adam"],
        [
            "optimizer.name: got 'adam', required one of adamw, lion, adafactor, sgd, muon, "
            "given. Did you mean adamw?"
        ],
    ),
    "a group": (
        ["batch=3"],
        ["batch: is a group. Set one of its fields: batch.global_size"],
    ),
    "batch": (
        ["batch.global_size=12"],
        ["batch.global_size=12 is not divisible", "8 or 16"],
    ),
    "batch too small": (["batch.global_size=4"], ["nearest legal sizes: 8"]),
    "query heads": (
        ["mesh.tensor=4", "model.num_heads=6", "model.num_kv_heads=2"],
        [
            "blocks/attention/out and 1 more: dim heads=6 is not divisible by mesh.tensor=4",
            "nearest legal sizes of this dim: 4 or 8",
        ],
    ),
    "kv heads, neither divides": (
        ["mesh.tensor=4", "model.num_heads=12", "model.num_kv_heads=6"],
        ["dim kv_heads=6 is not divisible by mesh.tensor=4"],
    ),
    "kv heads and heads": (
        ["model.num_kv_heads=3"],
        ["model.num_kv_heads=3 does not divide"],
    ),
    "width": (
        ["mesh.fsdp=8", "model.d_model=100"],
        ["d_model=100", "mesh.fsdp=8", "96 or 104"],
    ),
    "two -1": (
        ["mesh.fsdp=-1"],
        ["mesh.data and mesh.fsdp are both -1; at most one", "give the other"],
    ),
    "mesh too large": (
        ["mesh.data=16"],
        [
            "mesh: data 16 needs 16 devices, there are 8; set sizes whose product",
            "start with XLA_FLAGS=--xla_force_host_platform_device_count=16",
        ],
    ),
    "mesh does not divide": (["mesh.fsdp=3"], ["fsdp 3 needs 3 devices", "divides 8"]),
    "zero without shards": (
        ["mesh.zero=1"],
        ["mesh.zero=1 with mesh.fsdp=1", "set mesh.fsdp"],
    ),
    "learned positions": (
        ["model.positions=learned", "model.max_positions=64", "train.sample_tokens=0"],
        [
            "batch.sequence_length=128 exceeds the model's longest sequence, 64",
            "raise model.max_positions",
        ],
    ),
    "no learned positions": (
        ["model.positions=learned"],
        ["model.max_positions: learned"],
    ),
    "remat": (["remat.policy=ful"], ["remat.policy='ful': must be none, full, dots"]),
    "warm-up": (
        ["train.steps=50", "optimizer.warmup_steps=51"],
        ["optimizer.warmup_steps", "<= train.steps = 50"],
    ),
    "steps": (["train.steps=0"], ["train.steps: got 0, required int >= 1"]),
    "no path": (["data.source=bin"], ["data.source=bin needs data.path; it is empty."]),
    "seed": (
        ["seed=-1"],
        ["seed: got -1, required int >= 0 and < 9223372036854775808"],
    ),
    "seed beyond 64 bits": (
        [f"seed={2**64}"],
        [f"seed: got '{2**64}', required int >= 0"],
    ),
    "huge": (
        [f"train.steps={10**30}"],
        [f"train.steps: got '{10**30}', required int >= 1 of 64 bits"],
    ),
    "thousands of digits": (
        [f"seed={'9' * 5000}"],
        ["seed: got '999", "(5,002 characters), required"],
    ),
    "deep": (
        [f"seed={'-' * 5000}1"],
        ["seed: got '---", "... (5,003 characters), required int"],
    ),
    "beyond an array": (
        ["model.d_ff=4294967296"],
        ["model.d_ff: got 4294967296, required less than 2**31"],
    ),
    "steps beyond an array": (
        ["train.steps=4294967296"],
        ["train.steps: got 4294967296, required less"],
    ),
    "product": (
        ["batch.global_size=1073741824", "batch.sequence_length=65536"],
        [
            "batch.global_size=1073741824 x batch.sequence_length=65536 x model.",
            "no array is so large",
        ],
    ),
    "product of the model": (
        [
            "model.d_model=1073741824",
            "model.d_ff=1073741824",
            "batch.sequence_length=8",
        ],
        ["parameters; lower its sizes"],
    ),
    "emulated": (["mesh.fsdp=1000000"], ["mesh"]),
    "model": (
        ["model.target=jaxdist.models.transformer:Transfomer"],
        ["mean Transformer?"],
    ),
    "model module": (
        ["model.target=nowhere:Net"],
        ["model.target='nowhere:Net': cannot import"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_has_one_line_with_its_cure(case, capsys, tmp_path):
    settings, fragments = CASES[case]
    workdir = tmp_path / "run"
    arguments = [
        "--config",
        "quickstart",
        "--workdir",
        str(workdir),
        *overrides(*settings),
    ]
    faults = refused(capsys, *arguments)
    assert len(faults) == 1, faults
    for fragment in fragments:
        assert fragment in faults[0]
    assert not workdir.exists()  # nothing is left behind by what could not begin


def test_several_faults_are_said_at_once(capsys):
    faults = refused(
        capsys,
        "--config",
        "quickstart",
        "--workdirs=x",
        "--dry",  # flags are written out
        "--config.seed=x",
        "--config.tran.steps=1",
    )
    assert faults == [
        "--workdirs=x: no such flag; Did you mean --workdir? --help lists them",
        "--dry: no such flag; Did you mean --dry-run? --help lists them",
        "seed: got 'x', required int >= 0 and < 9223372036854775808. Meaning: seed of everything "
        "random: initial values, data order, dropout.",
        "tran.steps: no such field. Did you mean train.steps?",
    ]
    many = [
        "batch.global_size=12",
        "remat.policy=ful",
        "data.source=bin",
        "mesh.tensor=3",
    ]
    assert len(refused(capsys, "--config", "quickstart", *overrides(*many))) == 3
    many[0] = "batch.global_size=13"
    # with a legal mesh, batch and parameters are looked at too
    many[-1] = "mesh.tensor=4"
    faults = refused(
        capsys, "--config", "quickstart", *overrides(*many, "model.d_ff=30")
    )
    assert len(faults) == 4
    assert (
        "blocks/mlp/down and 2 more: dim d_ff=30 is not divisible by mesh.tensor=4"
        in faults[3]
    )


def test_a_key_or_a_config_in_a_flags_place_says_how_it_is_written(capsys):
    assert refused(
        capsys,
        "--config",
        "quickstart",
        "--steps",
        "100",
        "--optimizer.learning-rate=1",
    ) == [
        "--steps: no such flag; Did you mean --config.train.steps=100? --help lists them",
        "--optimizer.learning-rate=1: no such flag; Did you mean --config.optimizer.learning_rate=1? "
        "--help lists them",
    ]
    lists = "no such flag; Did you mean --config quickstart? --help lists them"
    assert refused(capsys, "quickstart") == [f"quickstart: {lists}"]
    (first, second) = refused(capsys, "--workdir", "/nowhere", "--steps=3")
    assert "--config.train.steps=3" in first
    assert "/nowhere holds no run to resume" in second


def test_names_of_configs_and_flags(capsys):
    assert "mean quickstart?" in refused(capsys, "--config", "quickstrat")[0]
    assert "no such file" in refused(capsys, "--config", "nowhere/run.py")[0]
    assert "takes no argument" in refused(capsys, "--config", "quickstart:tiny")[0]
    assert "--config is missing" in refused(capsys)[0]
    assert (
        "expected one argument"
        in refused(capsys, "--config", "quickstart", "--workdir")[0]
    )
    assert refused(capsys, "--config", "quickstart", "--config.seed") == [
        "seed: has no value; write --config.seed=VALUE"
    ]


def test_the_process_exits_with_78():
    command = [
        sys.executable,
        "-m",
        "jaxdist.train",
        "--config",
        "quickstart",
        "--config.sed=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: sed: no such field. Did you mean seed?")


# --- faults of the data ---------------------------------------------------------------


def test_data_that_is_missing_empty_or_beyond_the_vocabulary(capsys, tmp_path):
    def of(*settings: str) -> list[str]:
        arguments = ["--config", "quickstart", "--workdir", str(tmp_path / "run")]
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        return refused(capsys, *arguments, *overrides(*settings, cache))

    missing = tmp_path / "nowhere.txt"
    (fault,) = of("data.source=text", f"data.path={missing}")
    assert f"data.path={missing}: no text file there" in fault
    assert "give a" in fault
    empty = tmp_path / "empty.txt"
    empty.touch()
    (fault,) = of("data.source=text", f"data.path={empty}")
    assert "0 training tokens" in fault or "no documents" in fault
    for content, words in (
        (b"", "0 training tokens"),
        (b"abc", "cut off or of another type"),
    ):
        (tmp_path / "bad.bin").write_bytes(content)
        (fault,) = of("data.source=bin", f"data.path={tmp_path / 'bad.bin'}")
        assert words in fault
    ids = np.arange(301).repeat(50).astype("<u2")
    ids.tofile(tmp_path / "ids.bin")
    (fault,) = of("data.source=bin", f"data.path={tmp_path / 'ids.bin'}")
    assert (
        "token id 300 with model.vocab_size=256. Set model.vocab_size to 301 or more"
        in fault
    )


def test_an_evaluation_without_held_out_data(capsys, tmp_path, corpus):
    arguments = ["--config", "quickstart", "--workdir", str(tmp_path / "run")]
    settings = [*corpus, "data.validation_share=0"]
    (fault,) = refused(capsys, *arguments, *overrides(*settings))
    assert "train.eval_every=0" in fault


# --- faults of the workdir ------------------------------------------------------------


def test_a_workdir_that_cannot_be_written(capsys, tmp_path, corpus):
    # Root may write anywhere, so permissions prove nothing: a file stands in the way.
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        arguments = [
            "--config",
            "quickstart",
            "--workdir",
            str(folder),
            *overrides(*corpus),
        ]
        (fault,) = refused(capsys, *arguments)
        assert f"--workdir {folder}: cannot be written (" in fault
        assert "give a folder" in fault


# to itself, and to what is not there
@pytest.mark.parametrize("target", ["link", "nowhere"])
@pytest.mark.parametrize("name", ["link", "link/run"])
def test_a_workdir_behind_a_link_to_nowhere(capsys, tmp_path, corpus, name, target):
    (tmp_path / "link").symlink_to(tmp_path / target)
    (fault,) = refused(
        capsys,
        "--config",
        "quickstart",
        "--workdir",
        str(tmp_path / name),
        *overrides(*corpus),
    )
    assert (
        f"cannot be written ({tmp_path / 'link'} is a symbolic link to nowhere); give a folder"
        in fault
    )


def test_a_workdir_in_use(capsys, finished):
    folder, arguments = finished
    code = f"import fcntl; lock = open({str(folder / '.lock')!r}, 'r+'); "
    code += "fcntl.flock(lock, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=-1, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        (fault,) = refused(capsys, *arguments)
        holder.communicate("\n")
    assert fault.startswith(f"--workdir {folder}: in use by process ")
    assert "stop it or give another --workdir" in fault


def test_a_changed_config_is_refused_with_its_differences(capsys, finished):
    folder, arguments = finished
    before = (folder / "config.json").read_text()
    changed = overrides("seed=1", "optimizer.learning_rate=0.5", "model.d_ff=256")
    faults = refused(capsys, *arguments, *changed)
    changes = dict(fault.split(": ", 1) for fault in faults)
    assert set(changes) == {"seed", "model.d_ff", "optimizer.learning_rate"}
    cure = f"the run in {folder} has 384, now 256; put it back, or branch with init.from_run={folder}@2 in"
    assert changes["model.d_ff"].startswith(cure)
    assert (folder / "config.json").read_text() == before


def test_the_workdir_of_another_config_is_one_line_with_the_command_that_resumes_it(
    capsys, finished
):
    folder, _ = finished
    before = (folder / "config.json").read_text()
    words = ("--config", "gpt2_124m:tiny", "--workdir", str(folder))
    (fault,) = refused(capsys, *words)
    assert fault.startswith(f"{folder} holds a run of another config: ")
    assert re.search(r": (\S+, ){3}\S+ and \d+ more keys differ\. Give this run", fault)
    assert f"resume its run: python -m jaxdist.train --workdir {folder};" in fault
    assert f"branch with init.from_run={folder}@2 in another folder" in fault
    assert (folder / "config.json").read_text() == before


def test_a_changed_learning_rate_is_refused_with_the_command_that_branches(
    capsys, finished
):
    folder, arguments = finished
    changed = overrides("optimizer.learning_rate=0.5", "train.steps=3")
    fault, command = refused(capsys, *arguments, *changed)
    assert fault.startswith("optimizer.learning_rate: the run in")
    says, _, text = command.partition(": ")
    assert says == (
        "the command that branches, with its data from 0 (or from where the run stands, "
        "with --config.init.data_position=true)"
    )
    words = shlex.split(text)
    assert words[:2] == ["jaxdist", "train"]
    assert train.main(words[2:]) == 0
    branch = json.loads((Path(f"{folder}-branch") / "config.json").read_text())
    assert branch["optimizer"]["learning_rate"] == 0.5
    assert branch["train"]["steps"] == 3
    assert branch["init"]["optimizer"] is True
    assert branch["init"]["from_run"] == f"{folder}@2"


def test_a_checkpoint_knows_its_runs_config(finished):
    stored = read_step(finished[0] / "checkpoints", 2).metadata["config"]
    written = json.loads((finished[0] / "config.json").read_text())
    assert run_format.marked(stored) == written


def test_a_run_does_not_begin_anew_because_its_checkpoints_are_looked_for_elsewhere(
    capsys, finished, tmp_path
):
    folder, arguments = finished
    before = (folder / "config.json").read_text()
    (fault,) = refused(
        capsys, *arguments, *overrides(f"checkpoint.folder={tmp_path / 'other'}")
    )
    assert fault.startswith(
        f"checkpoint.folder: the run in {folder} has its checkpoints in {folder}/checkpoints"
    )
    assert (folder / "config.json").read_text() == before


def test_a_finished_run_says_so_and_harmless_changes_pass(capsys, finished):
    folder, arguments = finished
    assert (
        train.main(arguments + overrides("checkpoint.keep_last=1", "data.prefetch=0"))
        == 0
    )
    said = capsys.readouterr()
    assert (
        f"{folder} is finished at step 2. To continue, raise train.steps"
        in said.out + said.err
    )
    assert json.loads((folder / "config.json").read_text())["data"]["prefetch"] == 0


def test_a_workdir_alone_goes_on_with_its_own_config(capsys, finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "lr:0.1")
    assert train.main(["--workdir", str(folder)]) == 0
    assert f"{folder} is finished at step 2" in capsys.readouterr().out
    # which it compares with
    (fault,) = refused(capsys, "--workdir", str(folder), "--config.seed=1")
    assert fault.startswith(f"seed: the run in {folder} has 0, now 1")
    (fault,) = refused(capsys, "--workdir", str(tmp_path))
    assert f"--config is missing, and {tmp_path} holds no run" in fault


# --- help, defaults, dry run ----------------------------------------------------------


def test_the_flags_of_a_tests_run_keep_capitals(tmp_path):
    flags = command(
        tmp_path, data__path="/Data/Train.TXT", data__prefetch=0, init__x=True
    )
    assert "--config.data.path=/Data/Train.TXT" in flags
    assert "--config.data.prefetch=0" in flags
    assert "--config.init.x=true" in flags


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--config", "llama3_8b", "--help"])
    text = capsys.readouterr().out
    assert not stopped.value.code
    assert "--workdir" in text
    assert "--dry-run" in text
    for path in run_config.full_schema(run_config.registry.DEFAULT_TARGET):
        assert f"--config.{path} " in text
    assert "= 128256" in text  # the config's value, not the class's default


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("quickstart", "runs/quickstart"),
        ("my/file.py", "runs/file"),
        ("gpt2_124m:tiny", "runs/gpt2_124m-tiny"),
        ("a.py:x=1,y/2", "runs/a-x-1-y-2"),
    ],
)
def test_the_default_workdir(given, folder):
    assert cli.default_workdir(given) == folder


def test_dry_run_needs_no_data_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [
        "mesh.fsdp=2",
        "mesh.data=4",
        "batch.global_size=16",
        "batch.accumulation=1",
        "batch.sequence_length=64",
    ]
    settings += [
        "model.num_layers=2",
        "model.d_model=64",
        "model.d_ff=128",
        "model.vocab_size=512",
    ]
    settings += ["train.ema_decay=0.9"]
    assert (
        train.main(["--config", "gpt2_124m", "--dry-run", *overrides(*settings)]) == 0
    )
    text = capsys.readouterr().out
    for line in (
        "mesh: data 4 x fsdp 2 (8 x cpu)",
        "batch: 16 sequences a step = 1 accumulation x 8 batch shards x 2 per device",
        "data, before training: data.source=bin needs data.path",
        "position_embedding",
        "cpu: no flags are set",
        "memory per device, by the compiler",
    ):
        assert line in text
    assert not list(tmp_path.iterdir())


def test_a_step_that_the_compiler_refuses_ends_a_dry_run_with_its_reason(
    capsys, monkeypatch
):
    def refuse(*_):
        raise dry_run.StepTooLarge("the step does not fit: 9 bytes too many")

    monkeypatch.setattr(dry_run, "compile_step", refuse)
    words = ["--config", "quickstart", "--dry-run", *overrides("model.num_layers=1")]
    assert exit_code.exit_code(lambda: train.main(words)) == 78
    printed = capsys.readouterr()
    assert "memory per device, by arithmetic" in printed.out
    assert "the step does not fit: 9 bytes too many" in printed.err


@pytest.mark.parametrize(
    ("environ", "mesh", "devices"),
    [
        ({"JAX_PLATFORMS": "cpu"}, MeshConfig(fsdp=8), 8),
        ({"JAX_PLATFORMS": "cpu"}, MeshConfig(data=2, fsdp=8, tensor=4), 64),
        ({"JAX_PLATFORMS": "cpu"}, MeshConfig(), None),
        ({"JAX_PLATFORMS": "tpu"}, MeshConfig(fsdp=8), None),
        (
            {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            },
            MeshConfig(fsdp=8),
            None,
        ),
    ],
)
def test_a_dry_run_emulates_the_devices_it_lacks(environ, mesh, devices):
    assert dry_run.missing_devices(mesh, environ) == devices
