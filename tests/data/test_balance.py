"""Even attention work: what a row needs, where rows go, that a batch stays
what it is.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.data.balance import Balancer, StepGrid, balanced_order, imbalance
from jaxdist.data.loader import Loader, Placer
from jaxdist.step.batch_parts import split
from jaxdist.step.step_config import StepConfig
from jaxdist.trainer.health import SkippingDataset
from support.models import FAST_COMPILE, TINY, Layout, init_of, step_of, worst
from support.packed_documents import dataset_of

G = 16
GRIDS = [
    StepGrid(1, 1, 4),
    StepGrid(2, 1, 4),
    StepGrid(2, 2, 2),
    StepGrid(4, 1, 4),
    StepGrid(1, 4, 1),
]


@pytest.fixture(name="dataset")
def dataset_fixture(tmp_path):
    lengths = np.random.default_rng(1).lognormal(np.log(8), 1.2, 300).astype(int) + 2
    return dataset_of(tmp_path, lengths.tolist(), 32)


# --- what rows need -------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_work_counts_pairs_within_documents(dataset, chunks):
    for step in (0, 7):
        segments = dataset.train_batch(step, G)["segment_ids"]
        seen = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
        seen &= np.tri(32, dtype=bool)
        expected = seen.sum(2).reshape(G, chunks, -1).sum(2)
        assert np.array_equal(dataset.attention_work(step, G, chunks), expected)


def test_a_long_document_is_even_over_a_zigzag_and_uneven_in_order(tmp_path):
    long = dataset_of(tmp_path, [4097] * G, 4096)
    for context in (2, 8):
        zigzag, order = (
            StepGrid(1, 1, 1, context, zigzag=kind) for kind in (True, False)
        )
        of = {
            grid: Balancer(long, G, grid, balanced=False).metrics(0)
            for grid in (zigzag, order)
        }
        assert of[zigzag]["attention_imbalance_context"] == 1
        expected = (2 * context - 1) / context
        assert of[order]["attention_imbalance_context"] == pytest.approx(
            expected, rel=1e-3
        )
        assert of[order]["attention_imbalance"] == 1


def test_batches_left_out_are_counted_by_those_that_are_trained_on(dataset):
    skipping = SkippingDataset(dataset, [[2, 5]])
    assert np.array_equal(skipping.attention_work(2, G), dataset.attention_work(5, G))
    assert not np.array_equal(
        skipping.attention_work(2, G), dataset.attention_work(2, G)
    )


# --- where rows go --------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS)
def test_cells_are_the_rows_that_a_step_gives_them(grid):
    parts = [
        # shards hold rows side by side
        np.asarray(microbatch).reshape(grid.batch_shards, -1)
        for part in split(jnp.arange(2 * G), grid.accumulation)
        for microbatch in split(part, grid.microbatches)
    ]
    assert np.array_equal(grid.cells(2 * G), parts)


@given(
    st.sampled_from(GRIDS),
    st.lists(st.integers(0, 2**40), min_size=2 * G, max_size=2 * G),
)
@settings(deadline=None)
def test_every_row_stays_in_the_batch(grid, work):
    order = balanced_order(np.array(work), grid)
    assert sorted(order.tolist()) == list(range(2 * G))
    assert np.array_equal(order, balanced_order(np.array(work), grid))


@pytest.mark.parametrize(
    ("grid", "rows", "before", "after"),
    [  # means of 16 steps: the fullest cell, and what waiting for shards costs
        (StepGrid(1, 1, 8), 64, (1.41, 1.41), (1.01, 1.01)),
        (StepGrid(4, 1, 16), 256, (1.98, 1.74), (1.03, 1.01)),
        # a row a cell: like rows at the same time
        (StepGrid(8, 1, 8), 64, (2.53, 2.22), (2.53, 1.15)),
    ],
)
def test_work_is_more_even_where_lengths_are_skewed(
    tmp_path, grid, rows, before, after
):
    lengths = np.random.default_rng(0).lognormal(np.log(600), 1.2, 6000).astype(int) + 2
    dataset = dataset_of(tmp_path, np.minimum(lengths, 32768).tolist(), 8192)
    names = ("attention_imbalance", "attention_slowdown")
    for balanced, expected in ((False, before), (True, after)):
        balancer = Balancer(dataset, rows, grid, balanced=balanced)
        found = [balancer.metrics(step) for step in range(16)]
        for name, value in zip(names, expected, strict=True):
            assert np.mean([row[name] for row in found]) == pytest.approx(
                value, rel=0.03
            )


# --- the same batch -------------------------------------------------------------------


def shardings(mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    names = ("tokens", "targets", "weights", "positions", "segment_ids", "sample")
    return {name: NamedSharding(mesh, PartitionSpec("data")) for name in names}


def test_a_loader_resumes_at_any_step_on_any_share_of_the_hosts(dataset):
    class Half(NamedSharding):
        """Seen from a process that holds the last two of four devices."""

        def addressable_devices_indices_map(self, global_shape):
            whole = super().addressable_devices_indices_map(global_shape)
            mine = set(self.mesh.devices.flat[2:])
            return {device: index for device, index in whole.items() if device in mine}

    grid = StepGrid(2, 1, 4)
    balancer = Balancer(dataset, G, grid, balanced=True)
    where = shardings(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]))
    with Loader(dataset, global_size=G, shardings=where, balancer=balancer) as loader:
        straight = [
            {name: np.asarray(x) for name, x in next(loader).items()} for _ in range(6)
        ]
    again = Balancer(dataset, G, grid, balanced=True)
    with Loader(
        dataset, global_size=G, shardings=where, start=4, prefetch=0, balancer=again
    ) as loader:
        resumed = next(loader)
    moved = 0
    for step, batch in enumerate(straight):
        plain, order = dataset.train_batch(step, G), balancer.order(step)
        moved += int((order != np.arange(G)).sum())
        for name, values in batch.items():
            assert np.array_equal(values, plain[name][order])
            assert step != 4 or np.array_equal(values, resumed[name])
    assert moved > 3 * G
    rows = Placer({"tokens": Half(where["tokens"].mesh, where["tokens"].spec)}, G).rows
    assert rows.tolist() == list(range(8, 16))
    part = dataset.train_batch(3, G, again.order(3)[rows])
    assert all(
        np.array_equal(values, straight[3][name][8:]) for name, values in part.items()
    )


@pytest.mark.slow
def test_loss_and_gradients_do_not_depend_on_the_places_of_rows(dataset):
    model = dataclasses.replace(TINY, num_layers=1, dropout=0.1)
    layout, grid = Layout(2, data=2), StepGrid(2, 1, 2)
    balancer = Balancer(dataset, G, grid, balanced=True)
    order = balancer.order(0)
    work = dataset.attention_work(0, G)
    assert (
        imbalance(work[order], grid)["attention_slowdown"]
        < imbalance(work, grid)["attention_slowdown"]
    )
    plain = dataset.train_batch(0, G)
    moved = {name: values[order] for name, values in plain.items()}
    built = step_of(layout, model, StepConfig(accumulation=2))
    where = built.batch_shardings(plain)
    state = init_of(layout, model, StepConfig(accumulation=2))()
    inspect = built.inspect.lower(state, jax.device_put(plain, where)).compile(
        FAST_COMPILE
    )
    one, two = (
        inspect(state, jax.device_put(batch, where))[1:] for batch in (plain, moved)
    )
    assert abs(two[0]["loss"] / one[0]["loss"] - 1) < 1e-6
    assert worst(two[1], one[1]) < 1e-6
