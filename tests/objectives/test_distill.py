"""Distillation: the loss by hand and by torch, layouts, runs with a teacher's folder."""

import json
import shutil
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import library
from jaxdist.config import ConfigError
from jaxdist.data import tokenizer
from jaxdist.evaluation.loading import load_run
from jaxdist.models.transformer import Transformer
from jaxdist.objectives.distill import BUCKETS, IDS, Distillation, divergence
from jaxdist.ops.cross_entropy import bucket_scores, top_scores
from jaxdist.protocols.model_spec import describe
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import compose, run_config, teacher_model, validation
from jaxdist.verification import cases
from support.models import worst
from support.objectives import MODEL, B, S, batch_of_pairs, case, run, spec_for
from support.paths import DATA
from support.weight_sources import apply_weight_source, parsed

V = MODEL.vocab_size
STORED = json.loads((DATA / "trl/distill.json").read_text())


def random_buckets(seed, k=5):
    """Returns log-probabilities of float64."""
    logits = np.random.default_rng(seed).normal(size=(3, k)) * 3
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def weighted_batch():
    batch = batch_of_pairs()
    weights = np.random.default_rng(4).choice([0, 0.5, 1, 2], (B, S))
    return batch | {"weights": weights.astype(np.float32) * batch["weights"]}


# --- the loss -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_the_divergence_is_that_of_the_definition(scale):
    log_p = random_buckets(0)
    log_q = log_p + scale * (random_buckets(1) - log_p)
    log_q -= np.logaddexp.reduce(log_q, -1, keepdims=True)
    wanted = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    found, gradient = jax.value_and_grad(lambda q: divergence(log_p, q).sum())(
        jnp.float32(log_q)
    )
    assert found == pytest.approx(wanted.sum(), rel=1e-4, abs=1e-12)
    assert np.isfinite(gradient).all()


def test_the_divergence_of_far_distributions_is_finite():
    log_p = jnp.array([[0.0, -87.0], [-87.0, 0.0], [-0.5, -0.9327522]])
    log_q = jnp.array([[-87.0, 0.0], [0.0, -87.0], [-0.5, -0.9327522]])
    value, gradient = jax.value_and_grad(lambda q: divergence(log_p, q).sum())(log_q)
    assert value == pytest.approx(174, rel=1e-5)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("number", range(len(STORED["runs"])))
def test_loss_and_gradient_are_those_of_torch(number):
    wanted = STORED["runs"][number]
    student, teacher, weights = (
        jnp.asarray(STORED[name], jnp.float32)
        for name in ("student", "teacher", "weights")
    )
    targets = jnp.asarray(STORED["targets"], jnp.int32)
    size = student.shape[-1]
    objective = Distillation(wanted["alpha"], wanted["temperature"], size)
    # logits are hidden states under this head
    head = nnx.Param(jnp.eye(size))
    options = {"temperature": objective.temperature, "chunk_tokens": 3}
    ids, buckets = top_scores(teacher, head, size, **options)

    def total(logits):
        scores = bucket_scores(logits, head, targets, ids, **options)
        terms = {
            "log_probability": scores.log_probability_BS,
            "buckets": scores.buckets_BSk,
        }
        losses = jax.vmap(objective.sample_loss)(
            terms, {"weights": weights, BUCKETS: buckets, IDS: ids}
        )
        return losses.sum.sum(), losses

    with jax.default_matmul_precision("float32"):
        (mixed, losses), gradient = jax.value_and_grad(total, has_aux=True)(student)
    kl = wanted["temperature"] ** 2 * losses.metrics["kl"].sum()
    assert kl == pytest.approx(wanted["kl"], rel=1e-5)
    nats = losses.metrics["cross_entropy"].sum()
    assert nats == pytest.approx(wanted["cross_entropy"], rel=1e-5)
    assert mixed == pytest.approx(wanted["mixed"], rel=1e-5)
    np.testing.assert_allclose(gradient, np.array(wanted["gradient"]), atol=2e-6)


def by_hand(objective, values, batch):
    """Computes loss, divergence and cross-entropy in numpy."""
    logits = []
    for seed in (0, 1):
        model = Transformer(MODEL, rngs=nnx.Rngs(0))
        for path, value in values[seed].items():
            target = model
            for name in path.split("/"):
                target = getattr(target, name)
            target.set_value(jnp.asarray(value))
        with jax.default_matmul_precision("float32"):
            logits.append(np.asarray(model.forward(batch), np.float64))

    def log_softmax(x):
        return x - np.logaddexp.reduce(x, -1, keepdims=True)

    student, teacher = (log_softmax(x / objective.temperature) for x in logits)
    order = np.argsort(-teacher, -1)

    def bucketed(log_p):
        p = np.take_along_axis(np.exp(log_p), order, -1)
        rest = p[..., objective.top_k :].sum(-1, keepdims=True)
        return np.concatenate([p[..., : objective.top_k], rest], -1)

    p, q = bucketed(teacher), bucketed(student)
    kl = (p * np.log(p / q)).sum(-1)
    log_p = log_softmax(logits[0])
    nats = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    weights = batch["weights"] / batch["weights"].sum()
    kl, nats = (kl * weights).sum(), (nats * weights).sum()
    warmed = objective.temperature**2 * kl
    return objective.alpha * warmed + (1 - objective.alpha) * nats, kl, nats


@lru_cache
def random_values(seed):
    spec = describe(lambda rngs: Transformer(MODEL, rngs=rngs))
    random = np.random.default_rng(seed)
    return {
        path: 0.2 * random.standard_normal(x.shape, np.float32)
        for path, (x, _) in spec.named_parameters().items()
    }


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 8), (2.5, 3)])
def test_the_loss_of_buckets_is_that_of_numpy(temperature, top_k):
    objective = Distillation(0.7, temperature, top_k)
    values = [random_values(0), random_values(1)]
    given = {**values[0], **{f"modules/teacher/{n}": x for n, x in values[1].items()}}
    batch = weighted_batch()
    found = run(spec_for(objective, reference=MODEL), case(), batch, given=given)
    loss, kl, nats = by_hand(objective, values, batch)
    assert found.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert found.metrics["kl"] == pytest.approx(kl, rel=1e-5)
    assert found.metrics["cross_entropy"] == pytest.approx(nats, rel=1e-5)
    total, count, _ = found.evaluated
    assert count == pytest.approx(batch["weights"].sum())
    assert total / count == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 8, V])
def test_a_student_equal_to_its_teacher_has_no_divergence(top_k):
    objective = Distillation(alpha=1.0, temperature=2.0, top_k=top_k)
    spec = spec_for(objective, reference=MODEL)
    found = run(spec, case(), weighted_batch(), evaluates=False)
    assert 0 <= found.metrics["kl"] < 1e-7
    assert 0 <= found.metrics["loss"] < 1e-7
    assert found.metrics["grad_norm"] < 1e-5
    assert found.metrics["cross_entropy"] > 1


# --- layouts --------------------------------------------------------------------------

LAYOUTS = {
    "accumulation": case({"data": 2, "fsdp": 2}, accumulation=2),
    "once": case({"data": 2, "tensor": 2}, accumulation=2, reduce="once"),
    "tensor": case({"tensor": 2}),
    "pipeline": case({"pipeline": 2, "fsdp": 2}, accumulation=2),
    "pipeline, tensor": case({"pipeline": 2, "tensor": 2}),
    "context": case({"context": 2, "fsdp": 2}, attention="ring"),
    "context, tensor": case({"context": 2, "tensor": 2}, attention="gather"),
}


@lru_cache
def on_one_device():
    return run(spec_for(Distillation(0.7, 2.0, 8)), case(), weighted_batch())


@pytest.mark.parametrize(
    "name",
    [
        # the other layouts by default: those of other objectives
        name if name == "tensor" else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout_has_the_loss_of_one_device(name):
    found = run(spec_for(Distillation(0.7, 2.0, 8)), LAYOUTS[name], weighted_batch())
    wanted = on_one_device()
    assert wanted.metrics["kl"] > 0.01
    for metric in ("loss", "grad_norm", "kl", "cross_entropy"):
        assert found.metrics[metric] == pytest.approx(
            float(wanted.metrics[metric]), rel=2e-5
        )
    assert worst(found.gradients, wanted.gradients) < 1e-4
    np.testing.assert_allclose(found.evaluated[:2], wanted.evaluated[:2], rtol=1e-5)


# --- runs with a teacher's folder -----------------------------------------------------

TEACHER = DATA / "trl/model"
LEARNED_POSITIONS = '{"positions": "learned", "max_positions": 16, "vocab_size": 307}'
# half as wide as the teacher
STUDENT = {
    "model.vocab_size": 307,
    "model.d_model": 16,
    "model.d_ff": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.loss_chunk": 8,
}


def values_of(folder, **changes):
    corpus = folder / "corpus.txt"
    held_out = folder / "held_out.txt"
    random = np.random.default_rng(0)
    words = ["a", "list", "is", "no", "tuple", "of", "ten", "keys.", "It", "has"]
    corpus.write_text(" ".join(random.choice(words, 2_000)))
    held_out.write_text(" ".join(random.choice(words, 100)))
    return {
        **STUDENT,
        "objective.name": "distill",
        "objective.teacher": str(TEACHER),
        "objective.top_k": 16,
        "train.steps": 6,
        "train.log_every": 1,
        "train.eval_every": 3,
        "train.sample_tokens": 0,
        "batch.global_size": 4,
        "batch.sequence_length": 32,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-2,
        "checkpoint.every_steps": 3,
        "data.source": "text",
        "data.path": str(corpus),
        "data.tokenizer": str(TEACHER / "tokenizer.json"),
        "data.cache_dir": str(folder / "cache"),
        "data.validation_path": str(held_out),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def config_of(folder, **changes):
    config = run_config.default_config()
    config.update_from_flattened_dict(values_of(folder, **changes))
    apply_weight_source(config)
    return run_config.from_config(config)


def train(config, folder, devices=1):
    state = library.run(config, folder, devices=jax.devices()[:devices])
    return state, read_rows(folder)


@pytest.fixture
def needs_tokenizers():
    pytest.importorskip("tokenizers", reason="extra `text` is not installed")


@pytest.mark.slow
@pytest.mark.usefixtures("needs_tokenizers")
def test_a_run_learns_from_a_larger_teacher_and_resumes_without_it(tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(TEACHER, teacher)
    changes = {"objective__teacher": str(teacher), "objective__alpha": 1.0}
    config = config_of(tmp_path, **changes)
    whole, rows = train(config, tmp_path / "whole")
    divergences = [row["kl"] for row in rows.train]
    assert len(divergences) == 6
    assert divergences[-1] < 0.8 * divergences[0]
    assert rows.train[0]["loss"] == pytest.approx(divergences[0], rel=1e-5)
    assert rows.train[0]["cross_entropy"] > 5
    train(config_of(tmp_path, **changes, train__steps=3), tmp_path / "parts")

    teacher.rename(tmp_path / "gone")
    arguments = [
        f"--config.{name}={value}"
        for name, value in values_of(tmp_path, **changes).items()
    ]
    resumed = parsed(["--workdir", str(tmp_path / "parts"), *arguments])
    assert resumed.objective == config.objective
    parts, rows_of_parts = train(resumed, tmp_path / "parts")
    for name in ("loss", "kl", "cross_entropy", "grad_norm"):
        wanted = [row[name] for row in rows.train]
        assert [row[name] for row in rows_of_parts.train] == wanted
    jax.tree.map(np.testing.assert_array_equal, whole.trainable, parts.trainable)
    jax.tree.map(np.testing.assert_array_equal, whole.modules, parts.modules)
    last = rows.evaluation[-1]
    found = load_run(tmp_path / "whole").evaluate()
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-6)
    assert found.metrics["kl"] == pytest.approx(last["eval_kl"], rel=1e-6)
    with pytest.raises(ConfigError, match="objective.teacher="):
        new = ["--config", "quickstart", "--workdir", str(tmp_path / "new")]
        parsed([*new, *arguments])


@pytest.mark.slow
@pytest.mark.usefixtures("needs_tokenizers")
def test_a_run_is_the_teacher_of_itself_and_of_a_smaller_one(tmp_path):
    config = config_of(tmp_path, objective__name="next_token", objective__teacher="")
    train(config, tmp_path / "teacher")
    place = {"objective__teacher": str(tmp_path / "teacher")}
    same = config_of(
        tmp_path, **place, train__steps=1, init__from_run=place["objective__teacher"]
    )
    _, rows = train(same, tmp_path / "same")
    assert 0 <= rows.train[0]["kl"] < 1e-7
    changes = {"model__d_model": 8, "mesh__context": 2, "mesh__fsdp": 2}
    found = {}
    for devices in (1, 4):
        more = changes if devices == 4 else {"model__d_model": 8}
        smaller = config_of(tmp_path, **place, **more, train__steps=2)
        _, rows = train(smaller, tmp_path / f"on {devices}", devices)
        found[devices] = [row["kl"] for row in rows.train]
    assert found[1][0] > 0.01
    np.testing.assert_allclose(found[4], found[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_tokenizers")
def test_a_run_of_the_library_reads_the_options_of_its_teacher(tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(TEACHER, teacher)
    changes = {"objective__teacher": str(teacher), "checkpoint__every_steps": 1}
    config = config_of(tmp_path, **changes, train__steps=2)
    assert config.objective.teacher_model
    empty = {"objective.teacher_model": ""}
    first = compose.with_overrides(config, empty | {"train.steps": 1})
    train(first, tmp_path / "run")
    stored = json.loads((tmp_path / "run/config.json").read_text())
    found = stored["objective"]["teacher_model"]
    assert found == config.objective.teacher_model
    teacher.rename(tmp_path / "gone")
    _, rows = train(compose.with_overrides(config, empty), tmp_path / "run")
    assert [row["step"] for row in rows.train] == [1, 2]
    with pytest.raises(ConfigError, match="objective.teacher="):
        train(compose.with_overrides(config, empty), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("needs_tokenizers")
def test_verify_shrinks_the_teacher_of_a_run(tmp_path):
    config = config_of(tmp_path, objective__top_k=200)
    small, lines = cases.shrink_config(config, 8)
    teacher = teacher_model.teacher_config(small)
    assert teacher.vocab_size == small.vocab_size == small.objective.top_k == 128
    # a layer for each of four stages with two chunks
    assert teacher.model["num_layers"] == 8
    assert any(line.startswith("teacher: ") for line in lines)
    changes = {"mesh.pipeline": 2, "mesh.data": 4, "pipeline.microbatches": 2}
    layout = compose.with_overrides(small, changes)
    spec = validation.validate_on(layout, 8, with_data=False).spec
    assert spec.modules["teacher"].depth == 8
    # without a teacher, a tiny one is made
    without = config_of(tmp_path, objective__teacher="")
    small, _ = cases.shrink_config(without, 8)
    assert teacher_model.teacher_config(small).vocab_size == 128


@pytest.mark.usefixtures("needs_tokenizers")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective__teacher": ""}, "needs a teacher"),
        ({"objective__teacher": "nowhere"}, "objective.teacher=nowhere"),
        (
            {"objective__teacher": str(DATA / "huggingface/llama")},
            "the distributions need one vocabulary",
        ),
        ({"objective__top_k": 308}, "exceeds the vocabulary"),
        ({"model__z_loss": 0.1}, "model.z_loss=0.1 has no effect"),
        (
            {"objective__teacher_model": LEARNED_POSITIONS, "objective__teacher": ""},
            "exceeds the teacher's longest sequence, 16",
        ),
        ({"data__tokenizer": "OTHER"}, "other tokens"),
        ({"objective__teacher_model": "[1]", "objective__teacher": ""}, "is not valid"),
        (
            {
                "objective__teacher_model": '{"target": "os:Model"}',
                "objective__teacher": "",
            },
            "neither the run's nor one of jaxdist",
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused_in_one_line(changes, message, tmp_path):
    if changes.get("data__tokenizer"):
        document = json.loads((TEACHER / "tokenizer.json").read_text())
        first, second, *_ = document["model"]["vocab"]
        ids = document["model"]["vocab"]
        ids[first], ids[second] = ids[second], ids[first]
        other = tmp_path / tokenizer.TOKENIZER_FILE
        other.write_text(json.dumps(document))
        changes = {"data__tokenizer": str(other)}
    with pytest.raises(ConfigError, match=message) as caught:
        train(config_of(tmp_path, **changes), tmp_path / "run")
    assert len(caught.value.faults) == 1
    assert "\n" not in caught.value.faults[0]
    assert not (tmp_path / "run").exists()
