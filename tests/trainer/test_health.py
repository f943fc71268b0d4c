"""Numerical faults, made for real: skipped, counted, rolled back exactly; spikes;
replicas that differ.
"""

import json
import math
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import library
from jaxdist.checkpoint.folders import CheckpointError, list_steps
from jaxdist.config import ConfigError
from jaxdist.config.groups.health import HealthConfig
from jaxdist.config.schema import faults
from jaxdist.data.dataset import Dataset
from jaxdist.distributed import consistency, coordination
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.operations.watch import pace, replica_check
from jaxdist.operations.watch.replica_check import compare_replicas
from jaxdist.telemetry.metrics import read_events, read_rows
from jaxdist.trainer import restore, run_config, run_metadata, step_work, training
from jaxdist.trainer.health import Diverged, Monitor, SkippingDataset
from jaxdist.trainer.loop import TrainingStopped
from support.runs import SMALL_MODEL

pytestmark = pytest.mark.usefixtures("shared_steps")

SIZE = 4  # sequences per step
BAD = range(10 * SIZE, 14 * SIZE)  # samples of steps 11 to 14, which break the loss
STEPS = 18


class Touchy(Transformer):
    """A transformer whose loss is not finite on some samples."""

    Config = TransformerConfig

    def head(self, x_BSD, batch):
        found = super().head(x_BSD, batch)
        bad = jnp.any((batch["sample"] >= BAD.start) & (batch["sample"] < BAD.stop))
        return found._replace(sum=jnp.where(bad, jnp.nan, found.sum))


def config_of(**changes) -> run_config.RunConfig:
    config = run_config.default_config(f"{__name__}:Touchy")
    small = {
        **SMALL_MODEL,
        "train.steps": STEPS,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "batch.global_size": SIZE,
        "batch.sequence_length": 16,
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 3,
        "optimizer.warmup_steps": 1,
        "optimizer.nonfinite_limit": 3,
        "health.nonfinite": "rollback",
    }
    config.update_from_flattened_dict(
        small | {k.replace("__", "."): v for k, v in changes.items()}
    )
    return run_config.from_config(config)


def losses(folder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(folder).train}


def run(folder, **changes):
    return jax.device_get(
        library.run(config_of(**changes), folder, devices=jax.devices()[:1])
    )


def equal(one, other) -> bool:
    pairs = zip(
        jax.tree.leaves(one.trainable), jax.tree.leaves(other.trainable), strict=True
    )
    return all(np.array_equal(a, b) for a, b in pairs)


class Story:
    """A run that went back once, and its workdir as it was right after that."""

    def __init__(self, folder):
        self.folder, self.then, self.read = folder / "run", folder / "then", []
        with pytest.MonkeyPatch.context() as patch:
            honest, back = Dataset.train_batch, restore.roll_back

            def train_batch(dataset, step, size, rows=slice(None)):
                if threading.current_thread().name.startswith("jaxdist-train-data"):
                    self.read.append(step)
                return honest(dataset, step, size, rows)

            def roll_back(*given):
                found = back(*given)
                shutil.copytree(self.folder, self.then)
                self.read.clear()
                return found

            patch.setattr(Dataset, "train_batch", train_batch)
            patch.setattr(restore, "roll_back", roll_back)
            self.state = run(self.folder)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return Story(tmp_path_factory.mktemp("story"))


def test_a_rollback_leaves_out_the_window_and_goes_on(story):
    events = read_events(story.folder)
    bad = [event for event in events if event["event"] == "nonfinite"]
    assert [(e["step"], e["skipped_in_a_row"]) for e in bad] == [
        (11, 1),
        (12, 2),
        (13, 3),
        (14, 4),
    ]
    assert [(e["first_sample"], e["last_sample"]) for e in bad[:2]] == [
        (40, 43),
        (44, 47),
    ]
    (back,) = [event for event in events if event["event"] == "restore"]
    assert back["step"] == 8
    assert back["diverged_at"] == 14
    assert back["left_out"] == [8, 14]
    assert json.loads((story.folder / "skipped.json").read_text()) == {
        "format": "jaxdist-1",
        "windows": [[8, 14]],
    }
    # 12 was saved among the bad steps
    assert list_steps(story.then / "checkpoints") == [4, 8]
    assert (
        "rolled back"
        in json.loads((story.then / "quarantine" / "12.json").read_text())["reason"]
    )
    rows = read_rows(story.folder).train
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert story.read[: STEPS - 8] == list(range(14, 14 + STEPS - 8))
    assert events[-1]["event"] == "stop"
    assert events[-1]["reason"] == "finished"


def test_a_rollback_takes_back_the_targets_that_were_counted(story):
    rows = read_rows(story.folder).train
    (back,) = [e for e in read_events(story.folder) if e["event"] == "restore"]
    assert back["diverged_at"] > back["step"]  # steps were counted, and undone
    for row in rows:
        assert row["tokens_seen"] == row["step"] * SIZE * 16


@pytest.mark.parametrize(
    "died", ["right after", "before the file was written", "after the next save"]
)
def test_a_run_that_dies_and_begins_again_goes_the_same_way(story, tmp_path, died):
    workdir = tmp_path / "run"
    shutil.copytree(
        story.folder if died == "after the next save" else story.then, workdir
    )
    if died == "before the file was written":
        (workdir / "skipped.json").unlink()
    if died == "after the next save":
        (workdir / "skipped.json").unlink()  # the checkpoint knows, too
        for step in (16, 18):
            shutil.rmtree(workdir / "checkpoints" / str(step))
    state = run(workdir)
    restores = [event for event in read_events(workdir) if event["event"] == "restore"]
    assert [e["step"] for e in restores if "reason" not in e] == [
        12 if died == "after the next save" else 8
    ]
    assert equal(state, story.state)
    assert losses(workdir) == losses(story.folder)


def test_without_leave_to_roll_back_the_run_stops(tmp_path):
    with pytest.raises(TrainingStopped, match="4 steps in a row with non-finite"):
        run(tmp_path / "run", health__nonfinite="stop")
    assert [e["event"] for e in read_events(tmp_path / "run")][-1] == "stop"
    with pytest.raises(TrainingStopped, match="non-finite"):
        run(tmp_path / "other", health__max_rollbacks=0)


def test_windows_are_a_function_of_the_step():
    dataset = SkippingDataset(object.__new__(Dataset), [[4, 6], [9, 10]])
    assert [dataset.position(step) for step in range(9)] == [
        0,
        1,
        2,
        3,
        6,
        7,
        8,
        10,
        11,
    ]
    more = dataset.without(6, 7)  # which took batches 7 and 8
    assert more.windows == [[4, 6], [9, 10], [7, 9]]
    assert [more.position(step) for step in range(7)] == [0, 1, 2, 3, 6, 10, 11]
    overlapping = SkippingDataset(dataset, [[4, 6], [5, 9], [6, 7], [8, 10]])
    assert [overlapping.position(step) for step in range(6)] == [0, 1, 2, 3, 10, 11]
    nothing = dataset.without(6, 5)
    assert [nothing.position(step) for step in range(9)] == [
        dataset.position(step) for step in range(9)
    ]
    # a spike, and then a drift, which both go back to step 5
    spiked = SkippingDataset(object.__new__(Dataset)).without(6, 8)
    drifted = spiked.without(6, 5)
    assert drifted.windows == [[5, 8], [8, 8]]
    assert run_metadata.check_windows(drifted.windows)
    assert [drifted.position(step) for step in range(8)] == [
        spiked.position(step) for step in range(8)
    ]


# --- spikes and steps that are not finite ---------------------------------------------


def monitor(**config):
    events = []
    made = Monitor(
        HealthConfig(**config),
        nonfinite_limit=2,
        samples=lambda step: (10 * step, 10 * step + 9),
        event=lambda name, step, **fields: events.append((name, step, fields)),
        note=lambda text: None,
    )
    return made, events


def look(made, number, loss, skipped=0):
    made.check_step(number, {"loss": jnp.float32(loss), "skipped": jnp.int32(skipped)})


def test_spikes_are_seen_and_noise_and_progress_are_not():
    made, events = monitor()
    noise = np.random.default_rng(0).standard_normal(400)
    for number in range(1, 401):
        look(made, number, 5 * math.exp(-number / 100) + 1 + 0.05 * noise[number - 1])
    assert not events
    look(made, 401, 3.0)
    ((name, step, fields),) = events
    assert name == "spike"
    assert step == 401
    assert fields["loss"] == 3.0
    assert 1 < fields["median"] < 1.3
    assert (fields["first_sample"], fields["last_sample"]) == (4010, 4019)
    quiet, events = monitor(spike_sigmas=0)
    for number in range(1, 60):
        look(quiet, number, 100.0 if number == 50 else 1.0)
    assert not events


def test_a_flood_of_spikes_is_a_beginning_a_number_and_an_end():
    made, events = monitor()
    for number in range(1, 2001):
        is_spike = 500 <= number < 1500 and number % 20 == 0
        look(made, number, 9.0 + number / 1000 if is_spike else 2.0)
    begin, end = events
    assert begin[:2] == ("spike", 500)
    assert (begin[2]["first_sample"], begin[2]["last_sample"]) == (5000, 5009)
    assert end[:2] == ("spikes_end", 1480)
    assert end[2] == {
        "first_step": 500,
        "spikes": 50,
        "highest": pytest.approx(10.48),
    }
    look(made, 2001, 5.0)
    assert events[2][:2] == ("spike", 2001), "a later one is told again"
    made.end_spikes()
    assert len(events) == 3, "a lone spike needs no end"


def test_a_series_of_spikes_that_the_run_ends_is_counted():
    made, events = monitor()
    for number in range(1, 61):
        look(made, number, 9.0 if number in (50, 55, 60) else 2.0)
    assert len(events) == 1
    made.end_spikes()
    assert events[1][0] == "spikes_end"
    assert events[1][2]["spikes"] == 3


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_noise_near_zero_is_no_spike(scale):
    """Of any unit: a loss of the caller's own may be small from the start."""
    made, events = monitor()
    noise = np.random.default_rng(0)
    for number in range(1, 3001):
        level = 5 * math.exp(-number / 50) + 1e-5
        heavy_tailed = level * math.exp(noise.standard_normal() * (number > 1000))
        look(made, number, scale * heavy_tailed)
    assert not events
    look(made, 3001, scale * 0.5)  # a tenth of where it began
    assert [name for name, *_ in events] == ["spike"]


def test_a_spike_can_mean_going_back():
    made, _ = monitor(spike="rollback")
    for number in range(1, 41):
        look(made, number, 2.0)
    with pytest.raises(Diverged) as found:
        look(made, 41, 4.0)
    assert (found.value.first, found.value.last, found.value.policy) == (
        41,
        41,
        "rollback",
    )


def test_steps_that_are_not_finite_count_in_a_row():
    made, events = monitor()
    look(made, 1, math.nan, 1)
    look(made, 2, 1.0, 0)
    look(made, 3, math.nan, 1)
    look(made, 4, math.inf, 2)
    with pytest.raises(Diverged) as found:
        look(made, 5, math.nan, 3)
    assert [step for _, step, _ in events] == [
        1,
        3,
        4,
        5,
    ]
    assert found.value.policy == "stop"
    assert (found.value.first, found.value.last) == (3, 5)
    assert len(faults(HealthConfig(spike_sigmas=-1, max_rollbacks=-1))) == 2


# --- replicas -------------------------------------------------------------------------


def replicated(spec: P, bad: int | None = None) -> jax.Array:
    """Returns an array of equal values whose copy on one device has one bit flipped."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    values, where = (
        np.arange(64, dtype=np.float32).reshape(8, 8),
        NamedSharding(mesh, spec),
    )
    parts = []
    for device, index in where.addressable_devices_indices_map(values.shape).items():
        part = values[index].copy()
        if device.id == bad:
            part.view(np.uint32).flat[3] ^= 1 << 20
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(values.shape, where, parts)


def test_copies_that_differ_are_found_and_named():
    assert len(jax.devices()) == 8
    split, whole = P("fsdp"), P()
    # no copies
    assert compare_replicas({"only": replicated(P("data", "fsdp"))}) is None
    assert (
        compare_replicas({"a": replicated(split), "b": replicated(whole)}).differing()
        == []
    )
    found = compare_replicas(
        {"a": replicated(split), "b": replicated(whole, bad=5)}
    ).differing()
    assert found == ["device 5 of process 0: b"]
    found = compare_replicas({"a": replicated(split, bad=5)}).differing()
    # one of two
    assert [text.split(" of ")[0] for text in sorted(found)] == ["device 1", "device 5"]


def test_copies_are_never_compared_if_the_interval_is_0(tmp_path):
    config = config_of(
        health__compare_every=0,
        train__steps=2,
        mesh__data=2,
        model__target="jaxdist.models.transformer:Transformer",
    )
    library.run(config, tmp_path / "run", devices=jax.devices()[:2])
    assert read_rows(tmp_path / "run").train[-1]["step"] == 2


def test_a_run_whose_copies_differ_goes_back_and_repeats_its_data(
    tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    honest = replica_check.compare_replicas
    drifted = []

    def compare(state):
        if int(state.step) == 10 and not drifted:
            drifted.append(10)
            return honest({"leaf": replicated(P(), bad=3)})
        return honest(state)

    monkeypatch.setattr(replica_check, "compare_replicas", compare)
    changes = {"health__compare_every": 5, "train__steps": 12, "mesh__data": 2}
    config = config_of(
        **changes, model__target="jaxdist.models.transformer:Transformer"
    )
    library.run(config, folder, devices=jax.devices()[:2])
    (drift,) = [event for event in read_events(folder) if event["event"] == "drift"]
    assert drift["step"] == 10
    assert drift["differing"] == ["device 3 of process 0: leaf"]
    (back,) = [event for event in read_events(folder) if event["event"] == "restore"]
    # 8 came after the last good comparison
    assert back["step"] == 4
    assert back["left_out"] == [4, 4]
    drifted.clear()
    stops = config_of(**changes, health__nonfinite="stop")
    with pytest.raises(TrainingStopped, match="device 3 .* replace the device"):
        library.run(stops, tmp_path / "stopped", devices=jax.devices()[:2])
    assert read_events(tmp_path / "stopped")[-1]["reason"] == "drift"
    monkeypatch.undo()
    library.run(config, tmp_path / "straight", devices=jax.devices()[:2])
    assert losses(folder) == losses(tmp_path / "straight")


def test_a_signal_in_the_last_step_finds_a_finished_run(tmp_path, monkeypatch):
    class Late(training.StopSignals):
        def finish_step(self):
            if self._steps == STEPS - 1:
                signal.raise_signal(signal.SIGINT)
            found = super().finish_step()
            assert found == (self._steps == STEPS)
            return found

    monkeypatch.setattr(training, "StopSignals", Late)
    run(tmp_path, model__target="jaxdist.models.transformer:Transformer")
    assert read_events(tmp_path)[-1]["reason"] == "finished"
    assert (tmp_path / "report.html").exists()


def test_no_usable_checkpoint_is_said_before_the_step_is_compiled(
    story, tmp_path, monkeypatch
):
    folder, release = tmp_path / "run", threading.Event()
    shutil.copytree(story.then, folder)
    for step in list_steps(folder / "checkpoints"):
        (folder / "checkpoints" / str(step) / "metadata" / "metadata").unlink()
    monkeypatch.setattr(step_work, "compile_step", lambda *_: release.wait(100))
    try:
        with pytest.raises(CheckpointError, match="no usable checkpoint"):
            run(folder)
        assert not release.is_set()
    finally:
        release.set()


# --- peers ----------------------------------------------------------------------------


def test_who_differs_from_most_is_named():
    same = {"optimizer.learning_rate": "0.1", "source of jaxdist": "abc"}
    told = {0: same, 1: same | {"optimizer.learning_rate": "0.2"}, 2: same}
    (text,) = coordination.disagreements(told)
    assert text.startswith(
        "process 1 differs from 2 of 3 processes: optimizer.learning_rate is 0.2"
    )
    assert coordination.disagreements({0: same, 1: same}) == []
    source = consistency.code(Touchy)
    assert source["source of jaxdist"]
    assert source["version of jax"] == jax.__version__
    assert f"source of {__name__}" in source


def test_the_slowest_is_named():
    found = pace.slowest({0: 0.01, 1: 0.2, 2: 0.012, 3: 0.011})
    assert found == {
        "slowest_process": 1,
        "slowest_busy_s": 0.2,
        "median_busy_s": 0.011,
    }


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        '{"format": "jaxdist-1"}',
        '{"format": "jaxdist-1", "windows": 3}',
        '{"format": "jaxdist-1", "windows": [[1]]}',
        '{"format": "jaxdist-1", "windows": [[3, 1]]}',
    ]
    + [
        f'{{"format": "jaxdist-1", "windows": [[0, {end}]]}}'
        for end in ("-1", "1.5", '"2"', "1e999", "true", str(2**63))
    ],
)
def test_windows_of_another_shape_are_refused(tmp_path, text):
    (tmp_path / "skipped.json").write_text(text)
    with pytest.raises(ConfigError, match="skipped.json is damaged"):
        run_metadata.skipped_windows(tmp_path, {})
