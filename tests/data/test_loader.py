"""Batches on devices: what arrives, where, in which order, and what happens when
reading fails.
"""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, SourceError, open_dataset
from jaxdist.data import loader as loader_module
from jaxdist.data.loader import Loader, Placer
from jaxdist.data.user_batches import open_user_batches
from jaxdist.trainer.health import SkippingDataset

LENGTH_S, GLOBAL_G = 16, 8


@pytest.fixture
def dataset(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 20)
    config = DataConfig(
        source="text",
        path=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        packing="documents",
    )
    return open_dataset(config, sequence_length=LENGTH_S, log=print)


def shardings(name: str, ndim: int) -> NamedSharding:
    """Returns rows over `data`, sequence over `context`, on all eight devices."""
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*("data", "context")[:ndim]))


def by_name() -> dict[str, NamedSharding]:
    """Returns the shardings of all entries."""
    names = ("tokens", "targets", "weights", "positions", "segment_ids")
    return {name: shardings(name, 2) for name in names} | {
        "sample": shardings("sample", 1)
    }


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "jaxdist" in thread.name]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_loader_delivers_the_steps_in_order_from_any_start(dataset, prefetch):
    with Loader(
        dataset, global_size=GLOBAL_G, shardings=by_name(), start=7, prefetch=prefetch
    ) as loader:
        for step in range(7, 12):
            assert loader.step == step
            batch, expected = next(loader), dataset.train_batch(step, GLOBAL_G)
            assert batch.keys() == expected.keys()
            for name, array in batch.items():
                assert array.sharding == shardings(name, array.ndim)
                assert array.dtype == expected[name].dtype
                np.testing.assert_array_equal(np.asarray(array), expected[name])
        assert loader.data_wait_s > 0


def test_constant_entries_stay_on_the_device(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 1000)
    config = DataConfig(
        source="text", path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "c")
    )
    dataset = open_dataset(config, sequence_length=LENGTH_S, log=print)
    with Loader(dataset, global_size=GLOBAL_G, shardings=by_name()) as loader:
        one, two = next(loader), next(loader)
    assert one["weights"] is two["weights"]
    assert one["positions"] is two["positions"]
    assert one["tokens"] is not two["tokens"]


def test_a_process_reads_only_the_rows_of_its_devices(dataset):
    class Half(NamedSharding):
        """Seen from a process that holds the last four devices: rows 4 to 7."""

        def addressable_devices_indices_map(self, global_shape):
            whole = super().addressable_devices_indices_map(global_shape)
            mine = set(self.mesh.devices.flat[4:])
            return {device: index for device, index in whole.items() if device in mine}

    full = shardings("tokens", 2)
    placer = Placer({"tokens": Half(full.mesh, full.spec)}, GLOBAL_G)
    assert placer.rows.tolist() == [4, 5, 6, 7]
    read = dataset.train_batch(3, GLOBAL_G, placer.rows)
    whole = dataset.train_batch(3, GLOBAL_G)
    assert all(np.array_equal(read[name], whole[name][4:]) for name in whole)


def test_validation_ends_after_every_held_out_token(dataset):
    with Loader(
        dataset, global_size=GLOBAL_G, shardings=by_name(), split="validation"
    ) as loader:
        batches = list(loader)
    assert len(batches) == dataset.num_validation_batches(GLOBAL_G) > 1
    total = sum(float(batch["weights"].sum()) for batch in batches)
    assert total == dataset.num_validation_tokens
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dying_source_is_reported_after_the_good_batches(
    dataset, tmp_path, monkeypatch, prefetch
):
    read, (cache,) = (
        dataset.train_batch,
        (tmp_path / "cache").glob("tokens-*/tokens.bin"),
    )

    def until_step_3(step, *others):
        if step == 3:
            cache.write_bytes(b"")
        return read(step, *others)

    monkeypatch.setattr(dataset, "train_batch", until_step_3)
    loader = Loader(
        dataset, global_size=GLOBAL_G, shardings=by_name(), start=1, prefetch=prefetch
    )
    next(loader), next(loader)
    with pytest.raises(
        SourceError, match="train sample 24: .*shrank to 0 bytes"
    ) as caught:
        next(loader)
    assert isinstance(caught.value.__cause__, OSError)
    assert not threads()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_close_ends_the_thread(dataset):
    loader = Loader(dataset, global_size=GLOBAL_G, shardings=by_name())
    assert len(threads()) == 1
    assert threads()[0].startswith("jaxdist-train-data")
    next(loader)
    loader.close()
    loader.close()
    assert not threads()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_validation_of_nothing_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    config = DataConfig(
        source="text",
        path=str(tmp_path),
        validation_share=0,
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = open_dataset(config, sequence_length=LENGTH_S, log=print)
    with pytest.raises(ConfigError, match="nothing is held out"):
        Loader(dataset, global_size=GLOBAL_G, shardings=by_name(), split="validation")
    assert not threads()


# ---- groups of small batches


def test_small_batches_are_made_in_groups_and_handed_over_one_by_one(
    dataset, monkeypatch
):
    groups = []
    make = Loader._make_group
    monkeypatch.setattr(
        Loader,
        "_make_group",
        lambda self, steps: groups.append(steps) or make(self, steps),
    )
    with Loader(dataset, global_size=GLOBAL_G, shardings=by_name(), start=3) as loader:
        for step in range(3, 60):
            batch = next(loader)
            expected = dataset.read("train", step * GLOBAL_G + np.arange(GLOBAL_G))
            for name, array in batch.items():
                np.testing.assert_array_equal(np.asarray(array), expected[name])
    assert [steps.start for steps in groups[1:]] == [s.stop for s in groups[:-1]]
    assert max(map(len, groups)) == loader_module._GROUP


def test_batches_of_many_bytes_are_made_one_by_one(dataset, monkeypatch):
    monkeypatch.setattr(loader_module, "_GROUP_BYTES", 1000)
    with Loader(dataset, global_size=GLOBAL_G, shardings=by_name()) as loader:
        for _ in range(9):
            next(loader)
        assert loader._group == 1


def test_an_error_in_a_group_is_of_its_step(dataset, monkeypatch):
    read = dataset.train_batch

    def until_step_12(step, *others):
        if step == 12:
            raise SourceError("the disk is gone")
        return read(step, *others)

    monkeypatch.setattr(dataset, "train_batch", until_step_12)
    loader = Loader(dataset, global_size=GLOBAL_G, shardings=by_name())
    for _ in range(12):
        next(loader)
    assert loader.step == 12
    with pytest.raises(SourceError, match="disk is gone"):
        next(loader)
    assert not threads()


def test_steps_of_a_user_are_asked_for_only_as_far_ahead_as_prefetch():
    asked = []

    def batches(step):
        asked.append(step)
        return {"x": np.full((GLOBAL_G, 2), step, np.float32)}

    dataset, size = open_user_batches(batches)
    places = {"x": shardings("x", 1), "sample": shardings("sample", 1)}
    with Loader(
        SkippingDataset(dataset), global_size=size, shardings=places, prefetch=2
    ) as loader:
        for step in range(40):
            assert float(next(loader)["x"][0, 0]) == step
            assert max(asked) <= step + 2
