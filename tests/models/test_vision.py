"""Images: the sources of arrays, the vision transformer, and that it learns real
digits.
"""

import re
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist import train
from jaxdist.config import ConfigError, files
from jaxdist.config.schema import faults
from jaxdist.data import DataConfig, open_dataset
from jaxdist.data.loader import Loader
from jaxdist.evaluation import loading
from jaxdist.models.vision import VisionConfig, VisionTransformer
from jaxdist.protocols.model_spec import describe
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import cli, compose, run_config, training, validation
from jaxdist.trainer.callbacks import every

pytestmark = pytest.mark.usefixtures("shared_steps")

DIGITS = DataConfig(source="digits")
COUNT = 1797


def opened(config: DataConfig, seed: int = 0):
    return open_dataset(config, sequence_length=0, seed=seed, log=lambda _: None)


def saved(path, **arrays) -> DataConfig:
    np.savez(path, **arrays)
    return DataConfig(source="arrays", path=str(path))


# --- the sources ----------------------------------------------------------------------


def test_digits_are_real_scans_in_unit_range():
    batch = opened(DIGITS).train_batch(0, 64)
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
        "image": ((64, 8, 8, 1), np.float32),
        "label": ((64,), np.int32),
        "sample": ((64,), np.int32),
    }
    assert batch["image"].min() == 0
    assert 0.9 < batch["image"].max() <= 1
    assert set(batch["label"]) == set(range(10))


def test_an_epoch_has_every_training_sample_once_and_the_next_another_order():
    dataset = opened(DIGITS)
    count, held = dataset.num_train_samples, dataset.num_validation_tokens
    assert count + held == COUNT
    assert held == -(-COUNT * 13 // 256)
    first, second = (
        dataset.read("train", np.arange(count) + n * count)["image"].reshape(count, -1)
        for n in (0, 1)
    )
    assert not np.array_equal(first, second)
    rows = [np.unique(images, axis=0) for images in (first, second)]
    assert len(rows[0]) > 1500
    np.testing.assert_array_equal(*rows)
    others = dataset.read("validation", np.arange(held))["image"].reshape(held, -1)
    everything = np.concatenate([first, others])
    digits = opened(DataConfig(source="digits", validation_share=0)).read(
        "train", np.arange(COUNT)
    )
    ordered = [
        x[np.lexsort(x.T)] for x in (everything, digits["image"].reshape(COUNT, -1))
    ]
    np.testing.assert_array_equal(*ordered)


def test_the_order_is_a_function_of_seed_and_index_and_the_split_of_neither():
    one, same, other = (opened(DIGITS, seed) for seed in (0, 0, 1))
    whole, halves = one.train_batch(3, 32), [same.train_batch(n, 16) for n in (6, 7)]
    for name in whole:
        np.testing.assert_array_equal(
            whole[name], np.concatenate([half[name] for half in halves])
        )
    assert not np.array_equal(whole["image"], other.train_batch(3, 32)["image"])
    held = [
        x.read("validation", np.arange(x.num_validation_tokens))["image"]
        for x in (one, other)
    ]
    np.testing.assert_array_equal(*held)
    assert one.fingerprint == other.fingerprint
    assert (
        one.fingerprint
        != opened(DataConfig(source="digits", validation_share=50)).fingerprint
    )
    assert one.bytes_per_token is None
    assert one.validation_bytes_per_token is None


def test_only_whole_batches_are_evaluated():
    dataset = opened(DIGITS)
    assert dataset.num_validation_tokens == 92
    assert dataset.num_validation_batches(40) == 2
    seen = np.concatenate([dataset.validation_batch(n, 40)["label"] for n in range(2)])
    np.testing.assert_array_equal(
        seen, dataset.read("validation", np.arange(80))["label"]
    )
    with pytest.raises(
        ConfigError, match="the 92 samples held out are no whole batch of 128"
    ):
        dataset.num_validation_batches(128)
    with pytest.raises(ConfigError, match="nothing is held out"):
        opened(DataConfig(source="digits", validation_share=0)).num_validation_batches(
            8
        )


def test_batches_reach_the_devices_that_want_them():
    run = run_config.from_config(
        files.load("vit_digits", folders=files.packaged_folders())
    )
    run = compose.with_overrides(run, {"mesh.fsdp": 4, "mesh.data": 2})
    composition = validation.validate(run, jax.devices())
    built = composition.build_step(jax.devices())
    dataset, size = opened(run.data), run.batch.global_size
    shapes = compose.batch_shapes(run, size)
    assert {n: (x.shape, x.dtype) for n, x in shapes.items()} == {
        n: (x.shape, x.dtype) for n, x in dataset.train_batch(0, size).items()
    }
    with Loader(
        dataset, global_size=size, start=5, shardings=built.batch_shardings(shapes)
    ) as loader:
        batch = next(loader)
    assert len(batch["image"].addressable_shards) == 8
    assert {shard.data.shape for shard in batch["image"].addressable_shards} == {
        (size // 8, 8, 8, 1)
    }
    for name, values in dataset.train_batch(5, size).items():
        np.testing.assert_array_equal(batch[name], values)


def test_arrays_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(0, 256, (50, 4, 4, 3), np.uint8),
        "target": rng.normal(size=(50, 2)),
        "kind": np.arange(50),
        "flag": np.arange(50) % 2 == 0,
    }
    config = saved(tmp_path / "some.npz", **arrays)
    dataset = opened(config)
    batch = dataset.read("train", np.arange(dataset.num_train_samples))
    kinds = batch["kind"]
    assert {n: str(x.dtype) for n, x in batch.items()} == {
        "image": "float32",
        "target": "float32",
        "kind": "int32",
        "flag": "int32",
        "sample": "int32",
    }
    np.testing.assert_array_equal(
        batch["image"], arrays["image"][kinds].astype(np.float32) / 255
    )
    np.testing.assert_array_equal(
        batch["target"], arrays["target"][kinds].astype(np.float32)
    )
    held = dataset.read("validation", np.arange(dataset.num_validation_tokens))["kind"]
    assert sorted([*kinds, *held]) == list(range(50))
    assert len(held) == 3
    other = saved(
        tmp_path / "other.npz", **{name: x[::-1][:7] for name, x in arrays.items()}
    )
    both = opened(
        DataConfig(source="arrays", path=config.path, validation_path=other.path)
    )
    assert both.num_train_samples == 50
    assert list(both.read("validation", np.arange(7))["kind"]) == list(
        range(49, 42, -1)
    )
    assert len({dataset.fingerprint, both.fingerprint, opened(other).fingerprint}) == 3


def refused(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as error:
        opened(config)
    return str(error.value)


def test_files_that_are_none(tmp_path):
    x = np.zeros((5, 2), np.float32)
    assert "no such file" in refused(
        DataConfig(source="arrays", path=str(tmp_path / "no.npz"))
    )
    assert "data.source=arrays needs data.path" in refused(DataConfig(source="arrays"))
    (tmp_path / "text.npz").write_text("no archive")
    assert "not a file of arrays" in refused(
        DataConfig(source="arrays", path=str(tmp_path / "text.npz"))
    )
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as file:
        file.writestr("x.npy", "no array")
    assert "not a file of arrays" in refused(
        DataConfig(source="arrays", path=str(tmp_path / "zip.npz"))
    )
    several = refused(
        saved(
            tmp_path / "a.npz",
            x=x,
            y=np.zeros(4),
            sample=np.zeros(5),
            name=np.array(["a"] * 5),
        )
    )
    assert "there are {'x': 5, 'y': 4, 'sample': 5, 'name': 5}" in several
    assert "'sample' is the global sample index" in several
    assert "name has dtype <U1" in several
    danger = refused(saved(tmp_path / "b.npz", x=np.array([{}, {}], object)))
    assert "x has dtype object; give numbers" in danger
    assert "x has values beyond int32" in refused(
        saved(tmp_path / "c.npz", x=np.array([0, 2**31]))
    )
    train_file = saved(tmp_path / "d.npz", x=x)
    other = saved(tmp_path / "e.npz", x=np.zeros((5, 3), np.float32))
    assert "a sample has {'x': [3]}" in refused(
        DataConfig(source="arrays", path=train_file.path, validation_path=other.path)
    )
    assert "has none" in refused(DataConfig(source="digits", packing="documents"))
    assert "data.mixture entry" in refused(
        DataConfig(source="mixture", mixture=("1:digits:",))
    )


# --- the model ------------------------------------------------------------------------


def numbers(config: VisionConfig, seed: int = 0):
    """Returns a model whose parameters are all far from zero, and its parameters by
    name, float64.
    """
    spec = describe(lambda rngs: VisionTransformer(config, rngs=rngs))
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), spec.trainable
    )
    return spec.assemble(tree, spec.model_state), jax.tree.map(np.float64, tree)


def by_hand(config: VisionConfig, p: dict, image: np.ndarray) -> np.ndarray:
    """Returns the logits of one image [height, width, channel] in float64 numpy, patch
    by patch.
    """

    def norm(x, scale, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + config.norm_eps
        ) * scale + bias

    def gelu(x):
        return np.array(jax.scipy.special.erf(x / 2**0.5) + 1) * x / 2

    step = config.patch_size
    corners = range(0, config.image_size, step)
    patches = [
        image[r : r + step, c : c + step].reshape(-1) for r in corners for c in corners
    ]
    x = np.stack(patches) @ p["patch"] + p["patch_bias"]
    x = np.concatenate([p["class_token"][None], x]) if config.pooling == "token" else x
    x = x + p["position_embedding"]
    for n in range(config.num_layers):
        b = jax.tree.map(lambda leaf: leaf[n], p["blocks"])  # noqa: B023
        y = norm(x, **b["attention_norm"])
        mixed = []
        for h in range(config.num_heads):
            q, k, v = (
                y @ b[name][:, h] + b[f"{name}_bias"][h]
                for name in ("query", "key", "value")
            )
            logits = q @ k.T / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v @ b["out"][h])
        x = x + sum(mixed) + b["out_bias"]
        x = (
            x
            + gelu(norm(x, **b["mlp_norm"]) @ b["up"] + b["up_bias"]) @ b["down"]
            + b["down_bias"]
        )
    x = norm(x, **p["final_norm"])
    return (x[0] if config.pooling == "token" else x.mean(0)) @ p["output"] + p[
        "output_bias"
    ]


@pytest.mark.parametrize("pooling", ["mean", "token"])
def test_the_logits_are_those_computed_by_hand(pooling):
    config = VisionConfig(
        image_size=6,
        channels=2,
        patch_size=3,
        num_classes=5,
        num_layers=2,
        d_model=8,
        d_ff=12,
        num_heads=2,
        pooling=pooling,
    )
    model, parameters = numbers(config)
    image = np.random.default_rng(1).uniform(size=(3, 6, 6, 2)).astype(np.float32)
    batch = {
        "image": jnp.asarray(image),
        "label": jnp.zeros(3, jnp.int32),
        "sample": jnp.arange(3),
    }
    with jax.default_matmul_precision("highest"):
        found = np.asarray(jax.jit(model.forward)(batch))
    expected = np.stack(
        [by_hand(config, parameters, one) for one in image.astype(np.float64)]
    )
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_loss_smooths_labels_as_optax_does_and_drops_by_sample():
    config = VisionConfig(
        num_layers=1, d_model=16, d_ff=16, num_heads=2, label_smoothing=0.2, dropout=0.5
    )
    model, _ = numbers(config)
    batch = {
        name: jnp.asarray(x) for name, x in opened(DIGITS).train_batch(0, 8).items()
    }
    loss_of = jax.jit(lambda batch, key: model.loss(batch, key))
    loss = loss_of(batch, None)
    targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.2)
    expected = optax.softmax_cross_entropy(jax.jit(model.forward)(batch), targets).sum()
    np.testing.assert_allclose(loss.sum, expected, rtol=1e-6)
    assert loss.count == 8
    key = jax.random.key(0)
    dropped = loss_of(batch, key).sum
    halves = [
        loss_of({n: x[rows] for n, x in batch.items()}, key).sum
        for rows in (slice(0, 4), slice(4, 8))
    ]
    assert abs(dropped - loss.sum) > 0.1
    np.testing.assert_allclose(sum(halves), dropped, rtol=1e-6)


def test_sizes_that_cannot_be():
    assert faults(VisionConfig(), "model.") == []
    (fault,) = faults(VisionConfig(num_layers=0), "model.")
    assert fault == "model.num_layers: got 0, required int >= 1. Meaning: blocks."
    wrong = faults(
        VisionConfig(patch_size=3, num_heads=5, dropout=1.0, label_smoothing=-0.1),
        "model.",
    )
    assert [re.match(r"[\w.]+", fault)[0] for fault in wrong] == [
        "model.dropout",
        "model.label_smoothing",
        "model.patch_size",
        "model.num_heads",
    ]
    assert "does not divide model.image_size=8" in wrong[2]


def test_it_starts_at_chance():
    config = VisionConfig(num_layers=1, d_model=16, d_ff=16, num_heads=2)
    batch = {
        name: jnp.asarray(x) for name, x in opened(DIGITS).train_batch(0, 16).items()
    }
    loss = jax.jit(
        lambda batch: VisionTransformer(config, rngs=nnx.Rngs(0)).loss(batch, None)
    )(batch)
    np.testing.assert_allclose(loss.sum / loss.count, np.log(10), rtol=1e-6)


# --- training -------------------------------------------------------------------------


def accuracy(folder) -> tuple[float, int]:
    """Returns the share of held-out scans that the run's last checkpoint gets right, of
    how many.
    """
    trained = loading.load_run(folder, log=lambda _: None)
    dataset = opened(trained.config.data)
    batch = dataset.read("validation", np.arange(dataset.num_validation_tokens))
    model = trained.spec.assemble(trained.state.trainable, trained.state.model_state)
    found = np.asarray(jax.jit(lambda batch: model.forward(batch))(batch)).argmax(-1)
    return float((found == batch["label"]).mean()), len(found)


def train_digits(folder, **overrides) -> None:
    arguments = [
        f"--config.{name.replace('__', '.')}={value}"
        for name, value in overrides.items()
    ]
    assert (
        train.main(["--config", "vit_digits", "--workdir", str(folder), *arguments])
        == 0
    )


def test_a_run_outlives_the_file_of_its_arrays(tmp_path):
    file, rng = tmp_path / "scans.npz", np.random.default_rng(0)
    np.savez(
        file, image=rng.random((64, 8, 8, 1), np.float32), label=rng.integers(0, 10, 64)
    )
    words = f"""--config vit_digits --config.data.source=arrays --config.data.path={file}
        --config.train.steps=2 --config.train.eval_every=1 --config.batch.global_size=8
        --config.data.validation_share=64 --config.optimizer.warmup_steps=0 --config.model.num_layers=1
        --config.checkpoint.every_steps=0"""
    _, run = cli.parse(cli.ConfigParser("test", None), words.split())
    # before the first evaluation
    gone = every(1, lambda view: file.unlink(missing_ok=True))
    training.train(run, tmp_path / "run", devices=jax.devices()[:1], callbacks=[gone])
    assert [row["step"] for row in read_rows(tmp_path / "run").evaluation] == [
        1,
        2,
    ]
    assert not file.exists()


@pytest.mark.slow
def test_a_small_one_learns(tmp_path):
    small = {
        "train__steps": 60,
        "train__eval_every": 60,
        "train__log_every": 20,
        "model__num_layers": 1,
        "model__d_model": 32,
        "model__d_ff": 32,
        "model__num_heads": 4,
        "optimizer__warmup_steps": 5,
        "optimizer__learning_rate": 5e-3,
    }
    train_digits(tmp_path, **small)
    share, count = accuracy(tmp_path)
    assert count == 366
    assert share > 0.5, share  # chance is 0.1


@pytest.mark.slow
def test_the_shipped_config_gets_19_of_20_scans_right(tmp_path):
    train_digits(tmp_path)
    share, count = accuracy(tmp_path)
    assert count == 366
    assert share > 0.95, share
