"""One spec for all configs of a session that describe the same model of ours: it is
traced once.
"""

from __future__ import annotations

import json
from typing import Any

from jaxdist.config import schema
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import compose
from jaxdist.trainer.run_config import RunConfig

_honest = compose.model_spec
_known: dict[tuple[type, str], ModelSpec] = {}


def _model_spec(config: RunConfig, build: Any = None) -> ModelSpec:
    model = config.model_class
    if build or not model.__module__.startswith("jaxdist."):
        return _honest(config, build)
    values = schema.to_config_dict(config).to_dict()
    read = [
        values["model"],
        values["lora"],
        values["objective"],
        # of which follows what the objective's reference is
        values["init"]["from_run"],
        values["optimizer"]["frozen"],
        values["sharding"]["rules"],
    ]
    key = (model, json.dumps(read, default=str, sort_keys=True))
    if key not in _known:
        _known[key] = _honest(config)
    return _known[key]


def share() -> None:
    """Lets configs that describe the same model have the same spec from now on."""
    compose.model_spec = _model_spec
