"""The shipped configs at a size that trains for a minute on a CPU: NAME:tiny."""

from typing import Any

from ml_collections import ConfigDict

from jaxdist.config import ConfigError


def sized(config: ConfigDict, size: str | None) -> ConfigDict:
    """Shrinks a shipped config to a model of the same family that trains in a minute.

    Args:
      config: the config to change.
      size: "tiny"; None changes nothing.

    Raises:
      ConfigError: the size is unknown.
    """
    if size is None:
        return config
    if size != "tiny":
        raise ConfigError(f"--config NAME:{size}: no such size; use NAME or NAME:tiny")
    tiny = dict(_TINY)
    if config.model.num_kv_heads < config.model.num_heads:
        tiny["model.num_kv_heads"] = 2
    if config.model.get("num_experts"):
        tiny |= _TINY_EXPERTS
        if config.model.get("expert_groups"):
            tiny |= {"model.expert_groups": 4, "model.expert_top_groups": 2}
    if "latent" in config.model.layer_pattern:
        tiny |= _TINY_LATENT
        if config.model.latent.query_rank:
            tiny["model.latent.query_rank"] = 48
    with config.ignore_type():
        config.update_from_flattened_dict(tiny)
    return config


_TINY: dict[str, Any] = {
    "train.steps": 200,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "batch.global_size": 16,
    "batch.sequence_length": 128,
    "batch.accumulation": 1,
    "mesh.expert": 1,
    "precision.compute": "float32",
    "remat.policy": "dots",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": None,
    "data.source": "stdlib",
    "model.vocab_size": 256,
    "model.num_layers": 4,
    "model.d_model": 128,
    "model.d_ff": 384,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
}
_TINY_EXPERTS: dict[str, Any] = {
    "model.num_experts": 8,
    "model.experts_per_token": 2,
    "model.expert_d_ff": 128,
}
_TINY_LATENT: dict[str, Any] = {
    "model.latent.kv_rank": 32,
    "model.latent.nope_dim": 32,
    "model.latent.rope_dim": 16,
    "model.latent.value_dim": 32,
}
