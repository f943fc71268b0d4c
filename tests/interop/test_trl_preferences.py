"""Preferences against TRL: equal ids and masks, and equal losses while training.

The files of tests/data/trl hold what TRL computes; make.py beside them writes them.
"""

import json
from functools import lru_cache

import jax
import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="extra `text` is not installed")
pytest.importorskip("jinja2", reason="extra `chat` is not installed")

from jaxdist import library
from jaxdist.config import ConfigError
from jaxdist.data import DataConfig, open_dataset
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import run_config
from support.chats import write_tokenizer
from support.paths import DATA
from support.weight_sources import apply_weight_source

FOLDER = DATA / "trl"
LONGEST = 256  # tokens, more than any half has


@lru_cache
def stored(name):
    return json.loads((FOLDER / name).read_text())


def case_name(case):
    begins = "begins" if case["begins"] else ""
    cut = f"{case['truncation_mode']} {case['max_length']}"
    return f"{case['rows']} {case['template']} {begins} {cut}"


CASES = [case for case in stored("tokens.json")["cases"] if "odd" not in case["rows"]]


def halves_of(dataset):
    """Returns the ids and masks of all pairs as (chosen, rejected), in any order."""
    rows = np.arange(dataset.num_train_samples)
    batch = dataset.rows_of("train")[0].read(rows)
    pairs = []
    for row, segments in enumerate(batch["segment_ids"]):
        found = []
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            tokens = [x[row][at].tolist() for x in (batch["tokens"], batch["targets"])]
            ids = (*tokens[0], tokens[1][-1])
            found.append((ids, tuple(batch["weights"][row][at].astype(int).tolist())))
        pairs += zip(found[0::2], found[1::2], strict=True)
    return pairs


def has_prompt(row):
    """Tells whether a row has a prompt; TRL takes an empty one, jaxdist refuses it."""
    return "prompt" in row or row["chosen"][0] == row["rejected"][0]


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_ids_masks_and_truncation_are_those_of_trl(case, tmp_path):
    document = stored("tokens.json")
    template = document["templates"].get(case["template"])
    folder = write_tokenizer(tmp_path / "model", template, begins=case["begins"])
    path = tmp_path / "rows.jsonl"
    rows, pairs = zip(
        *(
            (row, pair)
            for row, pair in zip(
                document["rows"][case["rows"]], case["pairs"], strict=True
            )
            if has_prompt(row)
        ),
        strict=True,
    )
    assert len(rows) >= 7
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_dataset(
        DataConfig(
            source="jsonl",
            path=str(path),
            format="preferences",
            packing="documents",
            truncation=case["truncation_mode"],
            tokenizer=str(folder),
            validation_share=0,
            cache_dir=str(tmp_path / "cache"),
        ),
        sequence_length=2 * ((case["max_length"] or LONGEST) - 1),
        log=lambda _: None,
    )
    # Nothing predicts a first token, which a mask of TRL may still have.
    wanted = [
        tuple(
            (tuple(half["ids"]), tuple(map(int, half["mask"][1:])))
            for half in (pair["chosen"], pair["rejected"])
        )
        for pair in pairs
        if pair is not None
    ]
    assert sorted(halves_of(dataset)) == sorted(wanted)


def config_of(name, path, cache):
    """Returns the config of a run of losses.json, as flat values."""
    run = stored("losses.json")["runs"][name]
    values = {
        "init.from_huggingface": str(FOLDER / "model"),
        "train.steps": len(run["losses"]),
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "batch.sequence_length": 2 * LONGEST,
        "data.source": "jsonl",
        "data.path": path,
        "data.format": "preferences",
        "data.packing": "documents",
        "data.validation_share": 0,
        "data.cache_dir": cache,
        "optimizer.schedule": "constant",
        "optimizer.learning_rate": 1e-3,
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": 0.0,
        "optimizer.b2": 0.999,
        "checkpoint.save_at_end": False,
        "objective.beta": run["beta"],
    }
    if run["trainer"] == "ORPOTrainer":
        return values | {"objective.name": "orpo"}
    if name == "simpo":
        return values | {"objective.name": "simpo", "objective.margin": 1.0}
    values["objective.name"] = "dpo"
    values["objective.loss"] = run["loss_type"][0]
    if "sft" in run["loss_type"]:
        values["objective.sft_weight"] = 0.5
    if values["objective.loss"] == "robust":
        values["objective.label_smoothing"] = 0.1
    return values


def train(values, folder, **more):
    config = run_config.default_config()
    config.update_from_flattened_dict({**values, **more})
    apply_weight_source(config)
    # each step has all pairs, as in TRL's runs
    dataset = open_dataset(
        run_config.from_config(config).data,
        sequence_length=config.batch.sequence_length,
        log=lambda _: None,
    )
    config.batch.global_size = dataset.num_train_samples
    run = run_config.from_config(config)
    with jax.default_matmul_precision("highest"):
        library.run(run, folder, devices=jax.devices()[:1])
    return read_rows(folder).train


def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = stored("tokens.json")["rows"]["messages"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# runs against the first weights, or without a reference; cpo is no objective here
RUNS = [
    name
    for name, run in stored("losses.json")["runs"].items()
    if "other reference" not in name and name != "cpo"
]


# tests/objectives/test_pairs.py has all losses by hand
QUICK = ("sigmoid",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in RUNS
    ],
)
def test_losses_of_twenty_steps_are_those_of_trl(name, tmp_path):
    wanted = stored("losses.json")["runs"][name]
    values = config_of(name, rows_file(tmp_path), str(tmp_path / "cache"))
    rows = train(values, tmp_path / "run")
    losses = [row["loss"] + row.get("aux/sft", 0) for row in rows]
    assert len(losses) == 20
    assert abs(wanted["losses"][0] - wanted["losses"][-1]) > 0.05
    np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-5, atol=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)
    for step, row in ((0, rows[0]), (19, rows[19])):
        for metric, value in wanted["metrics"][str(step)].items():
            if metric in row and (step or "accuracies" not in metric):
                assert row[metric] == pytest.approx(value, rel=1e-4, abs=1e-4), metric
        if "kl" in row:
            kl = kl_of(wanted, step)
            assert row["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
            assert step == 0 or abs(kl) > 0.01


def kl_of(run, step):
    """Computes the mean log-ratio of TRL's completion tokens from TRL's rewards."""
    rewards = run["metrics"][str(step)]
    (case,) = [
        case
        for case in stored("tokens.json")["cases"]
        if (case["rows"], case["template"]) == ("messages", "headers")
        and case["begins"]
        and case["max_length"] is None
    ]
    halves = [pair[half] for pair in case["pairs"] for half in ("chosen", "rejected")]
    # nothing predicts a first token
    tokens = sum(half["mask"][1:].count("1") for half in halves)
    total = rewards["rewards/chosen"] + rewards["rewards/rejected"]
    return len(case["pairs"]) * total / run["beta"] / tokens


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["computed", "module"])
def test_a_reference_in_the_data_is_one_in_the_step(reference, tmp_path):
    wanted = stored("losses.json")["runs"]["sigmoid"]["losses"]
    values = config_of("sigmoid", rows_file(tmp_path), str(tmp_path / "cache"))
    rows = train(
        values, tmp_path / "run", **{"objective.reference": reference, "train.steps": 3}
    )
    losses = [row["loss"] for row in rows]
    np.testing.assert_allclose(losses, wanted[:3], rtol=1e-5, atol=1e-6)
    assert (tmp_path / "run/reference.npz").exists() == (reference == "computed")


@pytest.mark.slow
def test_the_base_of_adapters_starts_at_a_margin_of_zero(tmp_path):
    values = config_of("sigmoid", rows_file(tmp_path), str(tmp_path / "cache"))
    rows = train(
        values,
        tmp_path / "run",
        **{"lora.rank": 4, "train.steps": 5, "optimizer.learning_rate": 1e-2},
    )
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[-1] < 0.6
    assert not (tmp_path / "run/reference.npz").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"objective.name": "next_token"}, "data.format=preferences has pairs"),
        ({"objective.reference": "base"}, "set lora.rank"),
        (
            {"objective.reference": "module", "lora.rank": 4},
            "set objective.reference=base",
        ),
        ({"objective.beta": 0.0}, "objective.beta"),
        ({"data.format": "chat"}, "set data.format=preferences"),
    ],
)
def test_contradictions_are_refused_before_anything_compiles(more, message, tmp_path):
    values = config_of("sigmoid", rows_file(tmp_path), str(tmp_path / "cache"))
    config = run_config.default_config()
    config.update_from_flattened_dict({**values, **more})
    apply_weight_source(config)
    config.batch.global_size = 8
    with pytest.raises(ConfigError, match=message):
        library.run(run_config.from_config(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["computed", "module"])
@pytest.mark.parametrize(
    "loss", [pytest.param("sigmoid", marks=pytest.mark.slow), "ipo"]
)
def test_another_model_is_the_reference(loss, reference, tmp_path):
    name = f"{loss}, other reference"
    wanted = stored("losses.json")["runs"][name]
    more = {
        "objective.reference": reference,
        "objective.reference_from": str(FOLDER / "reference"),
        "train.steps": 6,
    }
    values = config_of(name, rows_file(tmp_path), str(tmp_path / "cache"))
    rows = train(values, tmp_path / "run", **more)
    losses = [row["loss"] for row in rows]
    assert abs(losses[0] - wanted["losses"][0]) < 1e-4
    np.testing.assert_allclose(losses, wanted["losses"][:6], rtol=1e-5, atol=1e-5)


def test_a_reference_of_another_model_or_tokenizer_is_refused(tmp_path):
    values = config_of("sigmoid", rows_file(tmp_path), str(tmp_path / "cache"))
    other = DATA / "huggingface/llama"
    with pytest.raises(ConfigError) as caught:
        train(values, tmp_path / "run", **{"objective.reference_from": str(other)})
    text = str(caught.value)
    assert "model.d_model=32" in text
    assert "answers are compared token by token" in text
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="set objective.reference=computed"):
        train(
            values,
            tmp_path / "run",
            **{
                "objective.reference": "base",
                "lora.rank": 2,
                "objective.reference_from": str(FOLDER / "reference"),
            },
        )
