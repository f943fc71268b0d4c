"""Iterators of a caller: one with a state goes on by it, without replay; others say
what they replay.
"""

import json

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data.dataset import SourceError
from jaxdist.data.iterator_state import decode, encode
from jaxdist.data.user_batches import Iterated, NoBatch, open_user_batches
from jaxdist.storage.untrusted import Malformed
from jaxdist.trainer.health import SkippingDataset


class Shuffled:
    """An iterator in an order of its own, without end: as grain's it has get_state and
    set_state.
    """

    def __init__(self):
        self.random, self.read = np.random.default_rng(3), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.read += 1
        return {"x": self.random.integers(0, 1000, 4)}

    def get_state(self):
        return json.dumps(self.random.bit_generator.state).encode()

    def set_state(self, state):
        self.random.bit_generator.state = json.loads(state)


class Stream:
    """Five batches an epoch, in an order of the epoch, whose state counts in its epoch
    alone.
    """

    def __init__(self):
        self.read, self.epoch, self._at, self._start = 0, 0, None, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        going_on = self._start and self._start["epoch"] == self.epoch
        self._at = {
            "epoch": self.epoch,
            "examples": self._start["examples"] if going_on else 0,
        }
        for number in range(self._at["examples"], 5):
            self._at["examples"] = number + 1
            self.read += 1
            yield {"x": np.full(4, 7 * self.epoch + number)}

    def state_dict(self):
        return dict(self._at)

    def load_state_dict(self, state):
        self._start = state


def values(batches: Iterated, steps: range) -> list[list[int]]:
    return [batches(step)["x"].tolist() for step in steps]


@pytest.mark.parametrize("kind", [Shuffled, Stream])
@pytest.mark.parametrize("at", [1, 4, 5, 7])
def test_a_state_goes_on_exactly_and_reads_nothing_again(kind, at):
    whole = values(Iterated(kind()), range(12))
    first = Iterated(kind())
    values(first, range(at + 3))  # the reader is ahead of training
    stored = json.loads(json.dumps(first.state(at), allow_nan=False))
    source = kind()
    again = Iterated(source)
    again(0)  # for its shapes
    assert "continues from its own state at the batch after" in again.go_to(at, stored)
    assert values(again, range(at, 12)) == whole[at:]
    assert source.read == 1 + 12 - at


def test_an_iterator_without_a_state_says_how_many_it_passes_over():
    batches = Iterated([{"x": np.full(4, n)} for n in range(5)])
    assert batches(0)
    assert batches.state(1) is None
    assert "its first 6 batches are passed over" in batches.go_to(7, None)
    assert batches(7)["x"][0] == 2
    unstorable = Stream()
    unstorable.state_dict = lambda: {"generator": object()}
    assert Iterated(unstorable)(0)
    assert Iterated(unstorable).state(1) is None
    with pytest.raises(NoBatch, match="cannot go back"):
        one_way = Iterated(iter([{"x": np.zeros(4)}] * 3))
        one_way(1)
        one_way(0)


@pytest.mark.parametrize("kind", [Shuffled, Stream])
@pytest.mark.parametrize("to", [3, 4, 5, 10])
def test_a_state_leads_to_a_later_batch(kind, to):
    whole = values(Iterated(kind()), range(14))
    first = Iterated(kind())
    values(first, range(5))
    again = Iterated(kind())
    again(0)  # for its shapes
    again.go_to(to, json.loads(json.dumps(first.state(3))))
    # a save before the next batch is read
    saved = Iterated(kind())
    saved.go_to(to, again.state(to))
    assert values(again, range(to, 14)) == whole[to:]
    assert values(saved, range(to, 14)) == whole[to:]


def test_a_rollback_of_a_stateful_iterator_leaves_its_window_out():
    whole = values(Iterated(Shuffled()), range(12))
    batches, size = open_user_batches(Shuffled())
    dataset = SkippingDataset(batches)
    for step in range(10):
        dataset.train_batch(step, size)
    state = dataset.reader_state(3)
    skipping = dataset.without(4, 10)
    assert skipping.windows == [[3, 10]]
    skipping.go_to(3, state)
    read = [skipping.train_batch(step, size)["x"].tolist() for step in (3, 4)]
    assert read == whole[10:]


def test_a_state_leads_to_no_earlier_batch_and_not_beyond_the_end(monkeypatch):
    dataset, size = open_user_batches(Shuffled())
    dataset.train_batch(3, size)
    state = dataset.reader_state(3)
    with pytest.raises(ConfigError, match="it is that before batch 3, not 2"):
        dataset.go_to(2, state)
    dataset, _ = open_user_batches(Shuffled())
    monkeypatch.setattr(Shuffled, "__next__", lambda _: next(iter(())))
    with pytest.raises(ConfigError, match="the iterator ended after 3 batches"):
        dataset.go_to(10, state)


def test_a_state_without_the_number_of_its_batch_is_that_of_the_position():
    whole = values(Iterated(Shuffled()), range(6))
    first = Iterated(Shuffled())
    first(2)
    epoch, value, number = decode(first.state(3))
    assert number == 3
    again = Iterated(Shuffled())
    again.go_to(3, encode((epoch, value)))
    assert values(again, range(3, 6)) == whole[3:]


@pytest.mark.parametrize(
    "state", [{"tuple": [0, "text"]}, {"tuple": [1]}, {"pickle": ""}, 3, [0, None]]
)
def test_a_state_of_another_iterator_is_one_line(state):
    dataset, _ = open_user_batches(Shuffled())
    with pytest.raises(
        ConfigError,
        match="batches: the iterator does not take the state that was saved",
    ):
        dataset.go_to(2, state)


def test_a_dataset_of_a_stateful_iterator_goes_back():
    dataset, size = open_user_batches(Shuffled())
    read = [dataset.train_batch(step, size)["x"].tolist() for step in range(5)]
    state = dataset.reader_state(3)
    assert dataset.go_to(3, state)
    assert dataset.train_batch(3, size)["x"].tolist() == read[3]
    plain, _ = open_user_batches({"x": np.zeros(8)})
    assert plain.reader_state(3) is None
    assert plain.go_to(3, None) == ""
    dataset, _ = open_user_batches(iter([{"x": np.zeros(4)}] * 2))
    with pytest.raises(SourceError, match="ended after 2 batches"):
        dataset.train_batch(2, 4)


STATES = [
    None,
    {"epoch": 1, 2: (True, -0.5), "inner": [b"\0\xff", "text", float("inf")]},
    {
        "random": np.random.default_rng(0).bit_generator.state,
        "mt": np.random.MT19937(1).state,
    },
    np.arange(6, dtype="<u2").reshape(2, 3),
    [np.float32(0.1), np.int64(-7), np.bool_(True)],
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_states_are_stored_as_json(state):
    again = decode(json.loads(json.dumps(encode(state), allow_nan=False)))
    assert (
        encode(again) == encode(state) and type(again) is type(state)
    ) or isinstance(state, np.generic)
    np.testing.assert_equal(again, state)


@pytest.mark.parametrize(
    "stored",
    [
        {"pickle": "x"},
        {"array": ["|O", [1], "AAAAAAAA"]},
        {"array": ["<f4", [9], ""]},
        {"dict": 3},
        {},
        {"a": 1, "b": 2},
    ],
)
def test_what_is_no_state_is_refused(stored):
    with pytest.raises(Malformed, match="no state of an iterator"):
        decode(stored)


# --- the libraries --------------------------------------------------------------------


def grain_loader():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    source = (
        grain.MapDataset.range(40)
        .shuffle(seed=1)
        .map(lambda n: {"x": np.int32(n)})
        .batch(4)
        .repeat()
    )
    return source.to_iter_dataset()


def huggingface_stream():
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    rows = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(
        num_shards=4
    )
    return rows.with_format("numpy").batch(4)


def stateful_loader():
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    rows = [{"x": n} for n in range(40)]
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(5)
    return torchdata.StatefulDataLoader(
        rows, batch_size=4, shuffle=True, generator=generator
    )


def test_rows_of_hugging_face_are_refused_with_what_works():
    datasets = pytest.importorskip("datasets", reason="extra `hf` is not installed")
    rows = datasets.Dataset.from_dict({"x": list(range(40)), "y": [[0.5, 1.0]] * 40})
    for given in (
        rows,
        rows.to_iterable_dataset(),
        datasets.DatasetDict({"train": rows}),
    ):
        with pytest.raises(ConfigError, match="Hugging Face"):
            open_user_batches(given)
    arrays, size = open_user_batches(rows.with_format("numpy")[:])
    assert (arrays.samples, size) == ("x=int32[] y=float32[2]", 32)
    stream, size = open_user_batches(
        rows.to_iterable_dataset().with_format("numpy").batch(8)
    )
    assert (stream.samples, size) == (arrays.samples, 8)


class Dataset:
    """A stand-in for that of Hugging Face, which the default tests do not have."""

    __module__ = "datasets.arrow_dataset"

    def __iter__(self):
        yield {"x": 1}


def test_a_dataset_of_rows_is_named():
    with pytest.raises(
        ConfigError, match=r"gives a row at a time; give .*with_format\('numpy'\)\[:\]"
    ):
        open_user_batches(Dataset())


@pytest.mark.parametrize("make", [grain_loader, huggingface_stream, stateful_loader])
@pytest.mark.parametrize("at", [1, 7, 10, 13])
def test_the_libraries_go_on_by_their_own_states(make, at):
    whole = values(Iterated(make()), range(24))
    first = Iterated(make())
    values(first, range(at + 3))
    stored = json.loads(json.dumps(first.state(at)))
    again = Iterated(make())
    again(0)  # for its shapes
    assert again.go_to(at, stored).startswith(
        "batches: the iterator continues from its own state"
    )
    # In the epochs after, torchdata's loader draws another order than without a
    # restart.
    end = -(-at // 10) * 10 if make is stateful_loader else 24
    assert values(again, range(at, end)) == whole[at:end]
