"""The reference's log-probabilities, computed once before training: kept, resumed,
shared by runs, equal on other layouts.
"""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="extra `text` is not installed")

from jaxdist import library
from jaxdist.config import ConfigError
from jaxdist.evaluation.loading import load_run
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import reference, reference_file
from support.runs import TINY, command, run_of, start_group

NUM_PAIRS = 60
PAIRS = {
    "batch.sequence_length": 64,
    "objective.name": "dpo",
    "data.source": "jsonl",
    "data.format": "preferences",
    "data.packing": "documents",
    "data.validation_share": 50,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(NUM_PAIRS):
            a, b, wrong = random.integers(1, 50, 3).tolist()
            row = {
                "prompt": f"{a} + {b} =",
                "chosen": f" {a + b}.",
                "rejected": f" {a + b + wrong}!",
            }
            file.write(json.dumps(row) + "\n")
    return path


def config_of(pairs, **changes):
    values = {
        **TINY,
        "train.steps": 8,
        "train.eval_every": 4,
        **PAIRS,
        "data.path": str(pairs),
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "checkpoint.every_steps": 4,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return run_of("quickstart", **values)


def train(config, folder, devices=1):
    library.run(config, folder, devices=jax.devices()[:devices])
    return reference_file.read(folder / reference_file.NAME)


def count_batches(monkeypatch, *, fail_at=None):
    """Counts the batches of reference passes; raises at one of them."""
    seen = []
    honest = reference._build_sums

    def build(config, built):
        sums_of = honest(config, built)

        def counted(*arguments):
            if len(seen) == fail_at:
                raise RuntimeError("killed in the pass")
            seen.append(arguments)
            return sums_of(*arguments)

        return counted

    monkeypatch.setattr(reference, "_build_sums", build)
    return seen


@pytest.mark.slow
def test_an_interrupted_pass_continues_with_equal_bits(pairs, tmp_path, monkeypatch):
    whole = train(config_of(pairs, data__cache_dir=str(tmp_path / "a")), tmp_path / "1")
    assert whole.values.shape == (2 * NUM_PAIRS,)
    assert np.all(whole.values < -1)
    config = config_of(pairs, data__cache_dir=str(tmp_path / "b"))
    monkeypatch.setattr(reference, "_SAVE_EVERY_S", 0.0)
    with monkeypatch.context() as patch:
        seen = count_batches(patch, fail_at=2)
        with pytest.raises(RuntimeError, match="killed in the pass"):
            train(config, tmp_path / "2")
    assert len(seen) == 2
    partial = reference_file.read(tmp_path / "2" / reference_file.NAME)
    num_missing = np.isnan(partial.values).sum()
    assert 0 < num_missing < 2 * NUM_PAIRS
    seen = count_batches(monkeypatch)
    found = train(config, tmp_path / "2")
    num_rows = len(seen) + 2
    assert 0 < len(seen) < num_rows
    np.testing.assert_array_equal(found.values, whole.values)
    np.testing.assert_array_equal(found.places, whole.places)
    ours, theirs = (read_rows(tmp_path / name).train for name in ("1", "2"))
    assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]


@pytest.mark.slow
def test_an_interrupted_pass_and_run_continue_on_another_layout(
    pairs, tmp_path, monkeypatch
):
    plain = {"model__dropout": 0.0}
    train(
        config_of(pairs, data__cache_dir=str(tmp_path / "a"), **plain), tmp_path / "1"
    )
    config = config_of(pairs, data__cache_dir=str(tmp_path / "b"), **plain)
    with monkeypatch.context() as patch:
        count_batches(patch, fail_at=2)
        with pytest.raises(RuntimeError, match="killed in the pass"):
            train(config, tmp_path / "2")
    split = config_of(
        pairs,
        data__cache_dir=str(tmp_path / "b"),
        mesh__fsdp=4,
        train__steps=4,
        **plain,
    )
    train(split, tmp_path / "2", devices=8)
    tensor = config_of(
        pairs, data__cache_dir=str(tmp_path / "b"), mesh__tensor=2, **plain
    )
    train(tensor, tmp_path / "2", devices=2)
    ours, theirs = (read_rows(tmp_path / name).train for name in ("1", "2"))
    assert len(ours) == 8
    np.testing.assert_allclose(
        [row["loss"] for row in theirs], [row["loss"] for row in ours], rtol=1e-5
    )


@pytest.mark.slow
def test_runs_on_the_same_weights_and_data_share_the_pass(pairs, tmp_path, monkeypatch):
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    first = train(config_of(pairs, **cache), tmp_path / "1")
    seen = count_batches(monkeypatch)
    second = train(config_of(pairs, objective__beta=0.5, **cache), tmp_path / "2")
    assert not seen
    np.testing.assert_array_equal(first.values, second.values)
    train(config_of(pairs, seed=1, **cache), tmp_path / "3")  # other weights
    assert seen
    seen.clear()
    monkeypatch.setattr(reference.consistency, "code", lambda model: {"source": "new"})
    train(config_of(pairs, **cache), tmp_path / "4")
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.fsdp": 4, "mesh.tensor": 2},
        {
            "mesh.pipeline": 2,
            "mesh.fsdp": 2,
            "mesh.context": 2,
            "pipeline.microbatches": 2,
        },
    ],
    ids=str,
)
def test_other_layouts_compute_the_same(pairs, tmp_path, mesh):
    wanted = train(
        config_of(pairs, data__cache_dir=str(tmp_path / "a")), tmp_path / "1"
    )
    config = config_of(pairs, **mesh, data__cache_dir=str(tmp_path / "b"))
    found = train(config, tmp_path / "2", devices=8)
    np.testing.assert_array_equal(found.places, wanted.places)
    np.testing.assert_allclose(found.values, wanted.values, rtol=1e-5)


@pytest.mark.slow
def test_a_run_is_the_reference_of_another(pairs, tmp_path):
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    other = config_of(pairs, seed=3, **cache)
    library.run(other, tmp_path / "other", devices=jax.devices()[:1])
    found = {}
    for reference_form in ("computed", "module"):
        config = config_of(
            pairs,
            objective__reference_from=str(tmp_path / "other"),
            objective__reference=reference_form,
            model__dropout=0.0,
            **cache,
        )
        folder = tmp_path / reference_form
        library.run(config, folder, devices=jax.devices()[:1])
        found[reference_form] = [row["loss"] for row in read_rows(folder).train]
    assert abs(found["module"][0] - np.log(2)) > 1e-3
    np.testing.assert_allclose(found["computed"], found["module"], rtol=1e-5)
    # a finished run reads its reference no more
    (tmp_path / "other").rename(tmp_path / "moved")
    library.run(config, folder, devices=jax.devices()[:1])


@pytest.mark.slow
def test_a_resumed_run_and_evaluate_read_the_file(pairs, tmp_path):
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    train(config_of(pairs, **cache), tmp_path / "whole")
    train(config_of(pairs, train__steps=4, **cache), tmp_path / "parts")
    for file in (tmp_path / "cache").glob("reference-*"):
        file.unlink()
    train(config_of(pairs, **cache), tmp_path / "parts")
    whole, parts = (read_rows(tmp_path / name) for name in ("whole", "parts"))
    losses = [row["loss"] for row in whole.train]
    assert len(losses) == 8
    assert [row["loss"] for row in parts.train] == losses
    last = whole.evaluation[-1]
    assert last["eval_loss"] == parts.evaluation[-1]["eval_loss"]
    found = load_run(tmp_path / "whole").evaluate()
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-6)
    assert found.metrics["rewards/accuracies"] == last["eval_rewards/accuracies"]
    assert found.tokens == last["eval_tokens"] > 5


@pytest.mark.slow
def test_a_missing_file_is_told_once_the_weights_have_moved_on(pairs, tmp_path):
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    train(config_of(pairs, train__steps=4, **cache), tmp_path / "run")
    file = tmp_path / "run" / reference_file.NAME
    content = file.read_bytes()
    for damaged in (b"", content[:100], content[:-100]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="put the file back"):
            train(config_of(pairs, **cache), tmp_path / "run")
    file.unlink()
    with pytest.raises(ConfigError, match="put the file back"):
        load_run(tmp_path / "run").evaluate()
    file.write_bytes(content)
    train(config_of(pairs, **cache), tmp_path / "run")


@pytest.mark.slow
def test_more_held_out_pairs_than_were_computed_are_refused(pairs, tmp_path):
    cache = {"data__cache_dir": str(tmp_path / "cache")}
    limited = config_of(pairs, train__steps=4, data__validation_tokens=20, **cache)
    train(limited, tmp_path / "run")
    fewer = load_run(tmp_path / "run").evaluate(validation_tokens=10)
    assert fewer.tokens > 0
    with pytest.raises(ConfigError, match=r"was data\.validation_tokens raised"):
        train(config_of(pairs, **cache), tmp_path / "run")


KILLED = """
import os, signal, sys
from jaxdist.trainer import reference
reference._SAVE_EVERY_S = 0.0
honest = reference._build_sums
def build(config, built):
    sums_of = honest(config, built)
    seen = []
    def counted(*arguments):
        seen.append(1)
        if PASS and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return sums_of(*arguments)
    return counted
reference._build_sums = build
from jaxdist import every, library
from support.runs import run_of
def kill(view):
    if not PASS and view.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
import json
config = run_of("quickstart", **json.loads(sys.argv[1]))
library.run(config, sys.argv[2], callbacks=[every(1, kill)])
"""


GROUP = """
import os, sys, time
rank = int(os.environ["JAXDIST_PROCESS_ID"])
# a cache of its own for each process, as on nodes
os.environ["HOME"] = sys.argv[1] + "/home" + str(rank)
from jaxdist.trainer import reference
reference._SAVE_EVERY_S = 0.2
honest = reference._build_sums
def build(config, built):
    sums_of = honest(config, built)
    time.sleep(rank)  # this clock is behind
    def slow(*arguments):
        time.sleep(0.1)
        return sums_of(*arguments)
    return slow
reference._build_sums = build
from jaxdist import train
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_processes_with_clocks_and_caches_of_their_own_agree(pairs, tmp_path):
    """The second run finds the numbers in the cache of the first process alone."""
    changes = {
        "train.steps": 4,
        "train.eval_every": 4,
        **PAIRS,
        "data.path": str(pairs),
        "optimizer.warmup_steps": 0,
        "checkpoint.every_steps": 2,
        "mesh.fsdp": 2,
    }
    names = {key.replace(".", "__"): value for key, value in changes.items()}
    found = []
    for name in ("first", "second"):
        _, _, _, *flags = command(tmp_path / name, **names)
        line = [sys.executable, "-c", GROUP, str(tmp_path), *flags]
        group = start_group(line, 2, 1, stderr=subprocess.PIPE)
        ended = [process.communicate(timeout=240) for process in group]
        codes = [process.returncode for process in group]
        assert codes == [0, 0], ended
        said = "".join(out for out, _ in ended)
        assert ("reference: log-probabilities" in said) == (name == "first")
        found.append([row["loss"] for row in read_rows(tmp_path / name).train])
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert list((tmp_path / "home0").glob("**/reference-*.npz"))
    assert not list((tmp_path / "home1").glob("**/reference-*.npz"))
    # both resume, though only the first one reads the file
    more = names | {"train__steps": 6}
    _, _, _, *flags = command(tmp_path / "second", **more)
    line = [sys.executable, "-c", GROUP, str(tmp_path), *flags]
    group = start_group(line, 2, 1, stderr=subprocess.PIPE)
    ended = [process.communicate(timeout=240) for process in group]
    assert [process.returncode for process in group] == [0, 0], ended


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pass", "training"])
def test_kill_9_changes_no_bit(pairs, tmp_path, where):
    values = {
        "train.steps": 8,
        "train.log_every": 1,
        "train.eval_every": 4,
        "train.sample_tokens": 0,
        **PAIRS,
        "data.path": str(pairs),
        "batch.global_size": 8,
        "model.num_layers": 2,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.head_dim": 8,
        "checkpoint.every_steps": 2,
        "mesh.fsdp": 4,
    }

    def start(name, *, kills):
        changed = {**values, "data.cache_dir": str(tmp_path / f"cache of {name}")}
        code = KILLED if kills else KILLED.replace("os.kill", "print")
        code = f"PASS = {where == 'pass'}\n" + code
        return subprocess.run(
            [sys.executable, "-c", code, json.dumps(changed), str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )

    done = start("whole", kills=False)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = start("killed", kills=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert (tmp_path / "killed" / reference_file.NAME).exists()
    has_saved = any((tmp_path / "killed/checkpoints").glob("[0-9]*"))
    assert has_saved == (where == "training")
    done = start("killed", kills=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rows in ("train", "evaluation"):
        whole, parts = (
            getattr(read_rows(tmp_path / name), rows) for name in ("whole", "killed")
        )
        name = "loss" if rows == "train" else "eval_loss"
        assert [row[name] for row in parts] == [row[name] for row in whole]
    files = [
        reference_file.read(tmp_path / n / reference_file.NAME)
        for n in ("whole", "killed")
    ]
    np.testing.assert_array_equal(files[0].values, files[1].values)
