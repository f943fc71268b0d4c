"""Reward models for tests: folders as transformers writes them, and runs on pairs."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxdist import library
from jaxdist.data import open_dataset
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import run_config
from support.paths import DATA
from support.weight_sources import apply_weight_source

CAUSAL = DATA / "trl/model"  # a llama with a tokenizer and a chat template
SEQUENCE_LENGTH = 512  # of rows: no half is truncated
WEIGHTS = "model.safetensors"


def stored(name):
    return json.loads((DATA / "trl" / name).read_text())


def classifier(folder: Path, score: list[float], **fields) -> Path:
    """Writes CAUSAL as a model for sequence classification with this head."""
    shutil.copytree(CAUSAL, folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["score.weight"] = np.array([score], np.float32)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows_file(folder: Path, name: str = "messages") -> str:
    """Writes pairs of tests/data/trl/tokens.json and returns the path."""
    path = folder / "rows.jsonl"
    rows = stored("tokens.json")["rows"][name]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def values_of(model: Path | str, folder: Path, **more) -> dict:
    """Returns the config of a run on the pairs, as flat values."""
    values = {
        "objective.name": "reward",
        "init.from_huggingface": str(model),
        "train.steps": 20,
        "train.log_every": 1,
        "train.eval_every": 0,
        "batch.sequence_length": SEQUENCE_LENGTH,
        "data.source": "jsonl",
        "data.path": rows_file(folder),
        "data.format": "preferences",
        "data.packing": "documents",
        "data.validation_share": 0,
        "data.cache_dir": str(folder / "cache"),
        "optimizer.schedule": "constant",
        "optimizer.learning_rate": 1e-3,
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": 0.0,
        "optimizer.b2": 0.999,
    }
    return values | more


def config_of(values: dict):
    """Returns the config as the train command makes it; the values are the user's."""
    config = run_config.default_config()
    config.update_from_flattened_dict(values)
    apply_weight_source(config, tuple(values))
    return config


def opened(config, **more):
    return open_dataset(
        run_config.from_config(config).data,
        sequence_length=config.batch.sequence_length,
        log=lambda _: None,
        scored=True,
        **more,
    )


def train(values: dict, folder: Path) -> list[dict]:
    """Trains with all pairs in each step; returns the rows of metrics."""
    config = config_of(values)
    config.batch.global_size = opened(config).num_train_samples
    with jax.default_matmul_precision("highest"):
        library.run(run_config.from_config(config), folder, devices=jax.devices()[:1])
    return read_rows(folder).train
