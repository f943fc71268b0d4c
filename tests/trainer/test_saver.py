"""What only saves need is made beside the steps, and never before the first of them."""

import threading
from types import SimpleNamespace

import pytest

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import SaveResult
from jaxdist.trainer import saver
from jaxdist.trainer.saver import PREPARED_AFTER, Saver


class _Store:
    """A store that prepares when it may, and notes what it is asked for."""

    def __init__(self, **config):
        self.config, self.calls = CheckpointConfig(**config), []
        self.may_prepare = threading.Event()

    def prepare(self, abstract):
        assert self.may_prepare.wait(10)
        self.calls.append(
            ("prepare", abstract, threading.current_thread() is threading.main_thread())
        )

    def decide_save(self, step, now, **_):
        return True

    def save(self, step, state, metadata, **_):
        self.calls.append(("save", step))

    def poll(self):
        return []


def _saver(store) -> Saver:
    views = SimpleNamespace(abstract="shapes", flat=lambda state: state)
    run = SimpleNamespace(store=store, built=SimpleNamespace(views=views))
    return Saver(run, None, None)


@pytest.fixture(autouse=True)
def _without_metadata(monkeypatch):
    monkeypatch.setattr(saver, "checkpoint_metadata", lambda *_: {})


def _view(step):
    return SimpleNamespace(
        step=step,
        state=None,
        progress=None,
        last=False,
        interrupted=False,
        save_requested=False,
    )


def test_the_first_save_is_prepared_beside_the_steps_and_waited_for():
    store = _Store()
    saver = _saver(store)
    for count in range(1, PREPARED_AFTER):
        saver.after_step(count)
    assert saver._prepared is None
    saver.after_step(PREPARED_AFTER)
    saver.after_step(PREPARED_AFTER + 1)  # steps go on while it is at it
    assert not saver._prepared.done()
    threading.Timer(0.05, store.may_prepare.set).start()
    saver(_view(PREPARED_AFTER + 1))
    assert store.calls == [("prepare", "shapes", False), ("save", PREPARED_AFTER + 1)]


@pytest.mark.parametrize(
    "rule", [{}, {"every_minutes": 1.0}, {"every_steps": 3}, {"keep_best": "eval_loss"}]
)
def test_nothing_is_prepared_where_no_rule_saves(rule):
    store = _Store(**{"every_steps": 0, "save_at_end": False} | rule)
    store.may_prepare.set()
    saver = _saver(store)
    saver.after_step(PREPARED_AFTER)
    assert store.config.saves == bool(rule) == (saver._prepared is not None)


def test_a_save_before_that_is_not_held_up():
    store = _Store(every_steps=1)
    saver = _saver(store)
    saver(_view(1))
    assert store.calls == [("save", 1)]


def test_a_sealed_save_that_could_not_delete_old_steps_prints_a_note():
    notes = []
    events = []
    store = _Store(every_steps=1)
    error = CheckpointError("old checkpoints were not deleted: read-only")
    result = SaveResult(step=4, ok=True, error=error, seconds=0.1, bytes=8)
    store.poll = lambda: [result]
    saver = _saver(store)
    saver.run.event = lambda name, step, **fields: events.append((name, step, fields))
    saver.run.note = notes.append
    saver.callbacks = SimpleNamespace(save=lambda step: None)
    saver.report()
    assert notes == ["checkpoint 4: old checkpoints were not deleted: read-only"]
    assert [(name, step, event["ok"]) for name, step, event in events] == [
        ("save", 4, True)
    ]
    assert not saver.failure
