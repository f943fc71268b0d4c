"""Callbacks of a run: the order of their calls, what they may ask for, and what a run
without one of them refuses. In this process; real tiny models.
"""

import copy
import importlib
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist import library, train
from jaxdist.checkpoint.folders import list_steps, read_step
from jaxdist.config import ConfigError, schema
from jaxdist.telemetry.metrics import read_events, read_rows
from jaxdist.trainer import callbacks as callbacks_module
from jaxdist.trainer import run_config, training
from jaxdist.trainer.callbacks import (
    Callback,
    CallbackList,
    StepView,
    TrainResult,
    every,
)
from jaxdist.trainer.health import Diverged
from jaxdist.trainer.step_log import STEPS_IN_FLIGHT
from support.checkpoints import DAMAGE
from support.runs import SMALL_MODEL

pytestmark = pytest.mark.usefixtures("shared_steps")

STEPS = 4
SMALL = {
    **SMALL_MODEL,
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "batch.global_size": 4,
    "batch.sequence_length": 16,
    "data.validation_tokens": 64,  # one batch
    "checkpoint.every_steps": 2,
    "checkpoint.asynchronous": False,  # a save ends where it begins
    "optimizer.warmup_steps": 1,
}


def config_of(**changes) -> run_config.RunConfig:
    config = run_config.default_config()
    config.update_from_flattened_dict(
        SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    )
    return run_config.from_config(config)


def run(folder, *callbacks, **changes) -> TrainResult:
    """Trains with the core alone and these callbacks."""
    return training.train(
        config_of(**changes),
        folder,
        devices=jax.devices()[:1],
        callbacks=list(callbacks),
    )


class Recorder(Callback):
    """Writes down every call, as words; equal ones in a row once.

    Raises an error in a method on order, once.
    """

    def __init__(self, calls: list[str], name: str = "r", **errors: Exception):
        """Takes the list of the calls.

        Args:
          name: begins each call, and keeps the state.
          errors: by method.
        """
        self.calls = calls
        self.name = name
        self.errors = errors
        self.kept = 0  # how often `state` was called

    def _add(self, method: str, *words: object) -> None:
        text = " ".join(str(word) for word in (self.name, method, *words))
        if self.calls[-1:] != [text]:
            self.calls.append(text)
        if method in self.errors:
            raise self.errors.pop(method)

    def __enter__(self):
        self._add("enter")
        return self

    def __exit__(self, kind, error, trace):
        self._add("exit", *([kind.__name__] if kind else []))

    def on_check(self, config):
        self._add("check")

    def on_open(self, run):
        self._add("open")

    def on_start(self, run):
        self._add("start")

    def on_phase(self, phase, step):
        self._add("phase", phase, step)

    def on_progress(self, text):
        self._add("progress")

    def on_step(self, view):
        self._add("step", view.step)

    def on_record(self, step, metrics):
        self._add("record", step)

    def on_row(self, row):
        self._add("row", row.step)

    def on_evaluate(self, view, row):
        self._add("evaluate", view.step)

    def on_save(self, step):
        self._add("save", step)

    def on_fault(self, error):
        self._add("fault", type(error).__name__)

    def on_end(self, end):
        self._add("end")

    def state(self):
        self._add("state")
        self.kept += 1
        return {"kept": self.kept}

    def load(self, state):
        self._add("load", state)
        self.kept = (state or {"kept": 0})["kept"]


WHOLE_RUN = [
    "",
    "check",
    "enter",
    "phase start 0",
    "open",
    "start",
    "progress",
    "phase compile 0",
    "load None",
    "phase data 1",
    "phase step 1",
    "step 1",
    "phase vote 1",
    "phase data 2",
    "phase step 2",
    "step 2",
    "phase vote 2",
    "record 1",
    "row 1",
    "record 2",
    "row 2",
    "phase save 2",
    "state",
    "save 2",
    "phase data 3",
    "phase step 3",
    "step 3",
    "phase vote 3",
    "phase data 4",
    "phase step 4",
    "step 4",
    "record 3",
    "row 3",
    "record 4",
    "row 4",
    "phase evaluate 4",
    "evaluate 4",
    "phase vote 4",
    "phase save 4",
    "state",
    "save 4",
    "phase vote 4",
    "phase save 4",
    "phase end 4",
    "end",
    "exit",
    "",
][1:-1]


def test_the_recorder_records_every_method_of_a_callback():
    methods = {name for name, x in vars(Callback).items() if inspect.isfunction(x)}
    assert methods <= vars(Recorder).keys()
    # a whole run calls all but one
    words = {line.split()[0] for line in WHOLE_RUN} | {"fault"}
    assert words == {name.removeprefix("on_").strip("_") for name in methods}


def test_the_calls_of_a_whole_run_are_in_order(tmp_path):
    calls: list[str] = []
    run(tmp_path / "run", Recorder(calls), train__eval_every=4)
    assert [call.removeprefix("r ") for call in calls] == WHOLE_RUN


def test_calls_go_in_the_order_of_the_list_and_back_at_the_end(tmp_path):
    calls: list[str] = []
    first = Recorder(calls, "first")
    second = Recorder(calls, "second")
    run(tmp_path / "run", first, second, train__steps=1)
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    assert len(pairs) > 10
    for one, other in pairs:
        assert one.split()[1:] == other.split()[1:]
        backwards = one.split()[1] in ("end", "exit")
        assert one.split()[0] == ("second" if backwards else "first"), one


@pytest.mark.parametrize("method", ["check", "enter", "open", "start", "load"])
def test_a_failed_start_leaves_in_reverse_what_was_entered(tmp_path, method):
    calls: list[str] = []
    error = OSError(f"a fault in {method}")
    recorders = [
        Recorder(calls, "first"),
        Recorder(calls, "second", **{method: error}),
        Recorder(calls, "third"),
    ]
    with pytest.raises(OSError, match=f"a fault in {method}"):
        run(tmp_path / "run", *recorders)
    assert f"third {method}" not in " ".join(calls)
    left = [call for call in calls if " exit" in call]
    if method == "check":
        assert left == []
        assert not (tmp_path / "run").exists()
    elif method == "enter":
        assert left == ["first exit OSError"]
    else:
        assert left == [f"{name} exit OSError" for name in ("third", "second", "first")]
    # what has not started hears of no fault
    faults = [call for call in calls if " fault" in call]
    started = {"start": ["first"], "load": ["first", "second", "third"]}
    assert faults == [f"{name} fault OSError" for name in started.get(method, [])]


def test_all_are_left_where_one_raises_as_it_is_left(tmp_path):
    calls: list[str] = []
    recorders = [
        Recorder(calls, "first"),
        Recorder(calls, "second", exit=OSError("cannot be left")),
    ]
    with pytest.raises(OSError, match="cannot be left"):
        run(tmp_path / "run", *recorders)
    assert calls[-2:] == ["second exit", "first exit OSError"]
    assert list_steps(tmp_path / "run" / "checkpoints") == [2, 4]


def test_a_resumed_run_loads_the_state_that_was_saved(tmp_path):
    calls: list[str] = []
    stop = every(2, lambda view: view.stop("half way"))
    run(tmp_path / "run", Recorder(calls, "kept"), stop)
    assert "kept load None" in calls
    assert "kept state" in calls
    metadata = read_step(tmp_path / "run" / "checkpoints", 2).metadata
    assert metadata["callbacks"] == {"kept": {"kept": 1}}
    calls.clear()
    run(tmp_path / "run", Recorder(calls, "kept"))
    starting = calls[: calls.index("kept phase data 3")]
    order = ["start", "phase restore", "phase compile", "load"]
    places = [
        next(n for n, call in enumerate(starting) if call.startswith(f"kept {word}"))
        for word in order
    ]
    assert places == sorted(places)
    assert starting[places[-1]] == "kept load {'kept': 1}"
    metadata = read_step(tmp_path / "run" / "checkpoints", 4).metadata
    assert metadata["callbacks"] == {"kept": {"kept": 2}}


class Diverging(Callback):
    """Finds in step 3 that it went wrong, once for each kind of fault."""

    steps = 3

    def __init__(self, *kinds: str):
        self._kinds = list(kinds)

    def on_step(self, view):
        if not self._kinds:
            return
        kind = self._kinds.pop(0)
        raise Diverged(kind, f"a {kind} on order", first=3, last=3, policy="rollback")


def test_a_drift_goes_back_to_where_a_spike_went_back(tmp_path, capsys):
    """The checkpoints and the list of skipped batches stay readable."""
    run(tmp_path / "run", Diverging("spike", "drift"))
    restores = [e for e in read_events(tmp_path / "run") if e["event"] == "restore"]
    assert [(e["step"], e["left_out"]) for e in restores] == [(2, [2, 3]), (2, [3, 3])]
    printed = capsys.readouterr().out
    assert "a spike on order: back to step 2, batch 2 is skipped" in printed
    assert "a drift on order: back to step 2, no batch is skipped" in printed
    result = run(tmp_path / "run", train__steps=6)
    assert int(result.state.step) == 6
    starts = [e for e in read_events(tmp_path / "run") if e["event"] == "start"]
    assert [event["devices"] for event in starts] == [1, 1]  # of the eight that exist
    metadata = read_step(tmp_path / "run" / "checkpoints", 6).metadata
    assert metadata["skipped_data"] == [[2, 3], [3, 3]]


class DivergingAfterDamage(Callback):
    """Damages the checkpoint that the run would go back to, once."""

    steps = 5

    def __init__(self, folder: Path):
        self._folder = folder
        self._done = False

    def on_step(self, view):
        if not self._done:
            self._done = True
            damage, _ = DAMAGE["a bit of data"]
            damage(self._folder / "checkpoints" / "4")
            raise Diverged("drift", "", first=5, last=5, policy="rollback")


def test_a_rollback_tells_of_the_damaged_step_that_it_passes_over(tmp_path):
    workdir = tmp_path / "run"
    run(workdir, DivergingAfterDamage(workdir), train__steps=6)
    found = read_events(workdir)
    (back,) = [event for event in found if event["event"] == "restore"]
    assert back["step"] == 2
    (bad,) = [event for event in found if event["event"] == "bad_checkpoint"]
    assert bad["step"] == 4
    assert DAMAGE["a bit of data"][1] in bad["reason"]


def test_a_rollback_calls_on_fault_and_then_load(tmp_path):
    calls: list[str] = []
    run(tmp_path / "run", Recorder(calls, "kept"), Diverging("drift"))
    (event,) = [e for e in read_events(tmp_path / "run") if e["event"] == "restore"]
    assert event["step"] == 2
    assert event["reason"] == "a drift on order"
    fault = calls.index("kept fault Diverged")
    assert calls[fault - 1].startswith("kept r")  # the row or record of step 3
    assert calls[fault + 1 : fault + 4] == [
        "kept phase restore 3",
        "kept load {'kept': 1}",
        "kept phase data 3",
    ]
    assert calls[-2:] == ["kept end", "kept exit"]


# --- what a callback may ask for ------------------------------------------------------


class Asking(Callback):
    """Asks for something after a step that the loop does not pause for."""

    def __init__(self, step: int, ask):
        self._step = step
        self._ask = ask

    def on_step(self, view):
        assert self.steps == 0
        if view.step == self._step:
            self._ask(view)


def test_a_save_that_is_requested_between_votes_is_done_at_the_next(tmp_path):
    changes = {
        "train__steps": 8,
        "train__log_every": 3,
        "checkpoint__every_steps": 0,
        "checkpoint__save_at_end": False,
    }
    run(tmp_path / "run", Asking(4, StepView.request_save), **changes)
    assert list_steps(tmp_path / "run" / "checkpoints") == [6]


def test_a_stop_between_votes_stops_at_the_next(tmp_path):
    changes = {"train__steps": 8, "train__log_every": 3, "checkpoint__every_steps": 0}
    stop = Asking(4, lambda view: view.stop("enough"))
    result = run(tmp_path / "run", stop, **changes)
    assert int(result.state.step) == 6
    assert result.reason == "enough"
    assert list_steps(tmp_path / "run" / "checkpoints") == [6]
    assert read_events(tmp_path / "run")[-1]["reason"] == "enough"


class Stopped(Callback):
    """Ends a run before its first step, as it has no more to do."""

    name = "stopped"

    def load(self, state):
        self.run.stop("nothing is left to learn")

    def on_start(self, run):
        self.run = run


def test_a_run_that_ends_before_its_first_step_is_given_no_cure_of_another(
    tmp_path, capsys
):
    result = run(tmp_path / "run", Stopped())
    assert result.reason == "nothing is left to learn"
    text = f"{tmp_path / 'run'} stopped at step 0: nothing is left to learn."
    assert f"{text}\n" in capsys.readouterr().out
    assert int(result.state.step) == 0


class Paused(Callback):
    """Notes what it sees after each second step."""

    steps = 2

    def __init__(self):
        self.seen = []

    def on_step(self, view):
        self.seen.append((view.step, view.progress.step, view.last))


def test_a_callback_with_steps_follows_each_nth_once_all_are_recorded(tmp_path):
    """And once more the last, as the run then ends."""
    paused = Paused()
    run(tmp_path / "run", paused, train__steps=5)
    assert paused.seen == [(2, 2, False), (4, 4, False), (5, 5, True)]


def test_a_callback_without_steps_follows_steps_that_are_still_under_way(tmp_path):
    calls: list[str] = []
    changes = {"train__steps": 9, "checkpoint__every_steps": 0}
    run(tmp_path / "run", Recorder(calls), **changes)
    # `on_record` comes as soon as anything has waited for the step
    assert calls.index("r step 5") < calls.index("r record 2")
    assert calls.index("r step 9") < calls.index("r record 6")


def test_a_recorded_step_has_the_metrics_of_its_row(tmp_path):
    class Losses(Callback):
        def __init__(self):
            self.found = []

        def on_record(self, step, metrics):
            assert metrics["loss"].is_ready()
            self.found.append((step, float(metrics["loss"])))

    losses = Losses()
    run(tmp_path / "run", losses)
    rows = read_rows(tmp_path / "run").train
    assert losses.found == [(row["step"], row["loss"]) for row in rows]
    assert len(rows) == STEPS


def test_what_a_row_is_given_is_in_metrics_jsonl(tmp_path):
    class Adding(Callback):
        def on_row(self, row):
            row.values["twice_the_step"] = 2 * row.step

    run(tmp_path / "run", Adding())
    rows = read_rows(tmp_path / "run").train
    assert [row["twice_the_step"] for row in rows] == [2, 4, 6, 8]


class Unasked:
    """Stands where an array of the devices would: no callback may ask for it."""

    def __getattr__(self, name):
        raise AssertionError(
            f"a callback that the loop does not pause for asked: {name}"
        )

    def __getitem__(self, name):
        raise AssertionError(
            f"a callback that the loop does not pause for asked: {name}"
        )


def test_no_callback_of_ours_waits_for_the_devices_between_steps(tmp_path, monkeypatch):
    """A profile's window does, at its two ends: it has none here."""
    honest = CallbackList.step
    seen = []

    def step(self, view):
        without = copy.copy(view)
        without.metrics = Unasked()
        without.state = Unasked()
        without.weights = Unasked()
        honest(self, without)
        seen.append(view.step)

    monkeypatch.setattr(CallbackList, "step", step)
    config = config_of()
    everyone = library.run_callbacks(config, tmp_path / "run")
    assert sum("on_step" in vars(type(item)) for item in everyone) >= 3
    with pytest.raises(AssertionError, match="the loop does not pause for"):
        run(tmp_path / "asks", Asking(1, lambda view: float(view.metrics["loss"])))
    run(tmp_path / "run", *everyone)
    assert seen == [1, 2, 3, 4]


# --- which are called -----------------------------------------------------------------


def empty_view() -> StepView:
    """Makes a view of a step that nothing is known of."""
    fields = inspect.signature(StepView).parameters.values()
    needed = [item.name for item in fields if item.default is inspect.Parameter.empty]
    view: StepView = StepView(**dict.fromkeys(needed))
    return view


@pytest.mark.parametrize(
    "ask", [StepView.request_save, lambda view: view.stop("enough")]
)
def test_a_request_without_may_request_is_an_error(ask):
    """No vote would come: the run would save or stop at its end alone."""

    def step(asking: Callback) -> StepView:
        view = empty_view()
        view.step = 2
        CallbackList([], [asking]).step(view)
        return view

    asking = Asking(2, ask)
    view = step(asking)
    assert view.save_requested or view.stop_reason == "enough"
    silent = Asking(2, lambda view: None)
    silent.may_request = False
    step(silent)
    asking.may_request = False
    with pytest.raises(RuntimeError, match=r"Asking requests .* Set may_request = T"):
        step(asking)


def test_a_callback_of_the_first_process_is_called_there_alone(monkeypatch):
    def called(process: int) -> list[str]:
        monkeypatch.setattr(callbacks_module.jax, "process_index", lambda: process)
        calls: list[str] = []
        lead = Recorder(calls, "lead")
        lead.lead_only = True
        lead.steps = 2
        lead.keys = ("train.patience",)
        everyone = CallbackList([], [lead, Recorder(calls, "all")])
        # the loop pauses on all, so that all vote
        assert everyone.due(2) == [lead]
        assert everyone.keys == {"train.patience"}
        with everyone.enter_others():
            everyone.check(config_of())
            everyone.start(None)
            everyone.paused_step(lead, empty_view())
            everyone.end(None)
        return calls

    assert called(1) == ["all enter", "all check", "all start", "all end", "all exit"]
    assert [call.split()[0] for call in called(0)].count("lead") == 6


# --- keys -----------------------------------------------------------------------------

# each key that needs a callback, set to something
SET = {
    "checkpoint.copy_to": "memory://copies",
    "checkpoint.keep_best": "eval_loss",
    "checkpoint.memory_folder": "memory",
    "health.compare_every": 7,
    "health.probe_every": 7,
    "profile.start_step": 2,
    "resilience.preemption_notice": "aws",
    "telemetry.port": 9_999,
    "train.loggers": ("support.loggers:Recording",),
    "train.patience": 3,
    "train.sample_tokens": 8,
    "watchdog.data_s": 5.0,
}


def callback_at(path: str) -> type[Callback]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def keys_of(callbacks) -> set[str]:
    return {key for callback in callbacks for key in callback.keys}


def refused_keys(keys: set[str]) -> dict[str, str]:
    """Returns the line for each key of SET that is refused to a run that serves others.

    Args:
      keys: that the run's callbacks serve.
    """
    with pytest.raises(ConfigError) as refused:
        callbacks_module.check_served(config_of(**SET), keys)
    return {fault.partition("=")[0]: fault for fault in refused.value.faults}


def test_each_key_in_vain_is_refused_with_the_callback_that_it_needs():
    assert refused_keys(set()).keys() == SET.keys()
    needs = {
        field.callback
        for field in schema.schema_of(run_config.RunConfig).values()
        if field.callback
    }
    callbacks = {path: callback_at(path) for path in needs}
    assert len(callbacks) == len(SET) - 1  # KeepBest serves two
    for path in callbacks:
        others = keys_of(kind for name, kind in callbacks.items() if name != path)
        lines = refused_keys(others)
        assert lines
        assert all(f"needs the callback {path}. " in x for x in lines.values())
        # what the callback says of itself
        for key in lines:
            own = callbacks[path].keys
            assert key in own or key.partition(".")[0] in own


def test_defaults_need_no_callback_and_those_of_fit_serve_every_key(tmp_path):
    callbacks_module.check_served(config_of(), set())
    # what is turned off needs none either
    assert config_of().train.sample_tokens == 0
    assert run_config.TrainConfig().sample_tokens == "auto"
    everyone = library.run_callbacks(config_of(), tmp_path)
    callbacks_module.check_served(config_of(**SET), keys_of(everyone))
    # a run without one that declares keys refuses at least one of them
    for callback in everyone:
        if callback.keys:
            others = [item for item in everyone if item is not callback]
            assert refused_keys(keys_of(others)), callback


def test_a_run_refuses_such_a_key_before_it_writes_anything(tmp_path):
    with pytest.raises(ConfigError, match="train.patience=3: nothing in this run does"):
        run(tmp_path / "run", train__patience=3, train__eval_every=2)
    assert not (tmp_path / "run").exists()


def test_what_is_no_callback_is_refused_one_line_each(tmp_path):
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "run", Callback(), print, 3, Callback)
    assert [fault.split(" is no callback")[0] for fault in refused.value.faults] == [
        "callbacks: <built-in function print>",
        "callbacks: 3",
        "callbacks: <class 'jaxdist.trainer.callbacks.Callback'>",
    ]
    assert not (tmp_path / "run").exists()


class Observer(Callback):
    """Stores the states of other callbacks, and compares them after a restore."""

    name = "observer"

    def __init__(self, others: list[Callback]):
        self.others = others
        self.handed = None  # the states that `load` got
        self.loaded = None  # the states of the others after their `load`

    def states(self):
        found = {other.name: other.state() for other in self.others}
        return json.loads(json.dumps(found))

    def state(self):
        return self.states()

    def load(self, state):
        self.handed = state
        self.loaded = self.states() if state else None


def test_a_callback_that_a_run_hands_its_state_has_the_same_state_again(tmp_path):
    def named() -> list[Callback]:
        everyone = library.run_callbacks(config_of(), tmp_path)
        return [callback for callback in everyone if callback.name]

    keys = keys_of(named())
    options = {key: value for key, value in SET.items() if key in keys}
    options |= {"train.eval_every": 2, "train.patience": 9}
    first = Observer(named())
    run(tmp_path / "run", *first.others, first, **options)
    second = Observer(named())
    run(
        tmp_path / "run", *second.others, second, **options | {"train.steps": STEPS + 1}
    )
    assert second.handed.keys() == {callback.name for callback in named()}
    assert second.handed["best"]["step"] > 0
    assert second.loaded == second.handed


def test_an_author_reads_how_many_steps_a_record_is_late():
    assert f"This is {STEPS_IN_FLIGHT} steps after" in Callback.on_record.__doc__


# --- the roots ------------------------------------------------------------------------


class Line(nnx.Module):
    """The smallest model of a caller."""

    def __init__(self, rngs: nnx.Rngs):
        self.slope = nnx.Param(jnp.ones(()))

    def loss(self, batch):
        return jnp.mean((self.slope[...] * batch["x"]) ** 2), {}


class Captured(Exception):
    """Ends a root where it hands over its callbacks."""


def captured(monkeypatch, module, name: str, call) -> list[type[Callback]]:
    """Returns the types of the callbacks with which a root calls the trainer."""
    found: list[Callback] = []

    def take(*arguments, process_callbacks=(), callbacks=(), **options):
        found.extend([*process_callbacks, *callbacks])
        raise Captured

    monkeypatch.setattr(module, name, take)
    with pytest.raises(Captured):
        call()
    monkeypatch.undo()
    assert len(found) > 5
    return [type(item) for item in found]


def test_fit_has_the_callbacks_of_train_but_for_those_that_it_names(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "quickstart", "--workdir", str(tmp_path / "run")]
    flags = [*arguments, "--config.watchdog.start_s=0"]
    of_train = captured(monkeypatch, library.training, "run", lambda: train.main(flags))
    of_fit = captured(
        monkeypatch,
        library.training,
        "train",
        lambda: library.fit(
            Line,
            optax.sgd(0.01),
            {"x": np.zeros((32, 1), np.float32)},
            steps=1,
            folder=tmp_path / "fit",
        ),
    )
    of_run = captured(
        monkeypatch,
        library.training,
        "run",
        lambda: library.run(config_of(), tmp_path / "run"),
    )
    assert of_fit == of_run
    assert of_run == [
        type(item) for item in library.run_callbacks(config_of(), tmp_path)
    ]
    said = re.search(
        r"has all callbacks of the command `train`(?: but ([\w`, ]+))?\.",
        " ".join((library.fit.__doc__ or "").split()),
    )
    assert said is not None, "fit's docstring says which callbacks it has"
    without = set(re.findall(r"`(\w+)`", said[1] or ""))
    assert [x for x in of_train if x.__name__ not in without] == of_fit
    assert without <= {kind.__name__ for kind in of_train}


def test_callbacks_without_a_method_are_not_called_at_each_step():
    class Still(Callback):
        pass

    class Steps(Callback):
        def on_step(self, view):
            """Does nothing."""

    class Watcher(Steps):
        def on_phase(self, phase, step):
            """Does nothing."""

    by_hand = Still()
    by_hand.on_record = lambda step, metrics: None
    still, steps, watcher = Still(), Steps(), Watcher()
    listed = CallbackList([still, steps], [watcher, by_hand])
    assert listed._of_steps == [steps, watcher]
    assert listed._of_phases == [watcher]
    assert listed._of_records == [by_hand]
