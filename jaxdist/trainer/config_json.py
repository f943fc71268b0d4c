"""A run's config.json, or its copy in a checkpoint: data, and maybe somebody else's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema
from jaxdist.models import registry
from jaxdist.storage import run_format, untrusted
from jaxdist.trainer.run_config import RunConfig, from_config


def read(file: Path) -> dict[str, Any]:
    """Reads a config.json; executes nothing.

    Raises:
      ConfigError: it cannot be read, is no config, or is another version's.
    """
    try:
        stored = untrusted.read_json(file, dict)
    except FileNotFoundError:
        raise ConfigError(
            f"{file.parent}: no run there (no {file.name}); give a run's folder"
        ) from None
    except untrusted.Malformed as error:
        raise ConfigError(
            f"{file} is damaged ({error}); put it back, or delete it if --config is what it was"
        ) from error
    return tupled(run_format.unmarked(stored, file.parent))


def target_of(stored: Mapping[str, Any]) -> str:
    """Returns the model.target of a stored config, as `from_config` will look for it.

    Raises:
      ConfigError: it is no text.
    """
    target = schema.flatten(stored).get("model.target", registry.DEFAULT_TARGET)
    if not isinstance(target, str):
        raise ConfigError(f"model.target: got {target!r}, required str.")
    return target


def resolve(
    stored: Mapping[str, Any],
    folder: Path,
    *,
    named: str | None = None,
    trust_code: bool | None = False,
) -> RunConfig:
    """Returns the run that a config stored in `folder` describes; all stored configs
    come through here.

    Args: as `registry.check_stored_target`.

    Raises:
      ConfigError: unknown keys, wrong types, or a model whose code is not trusted.
    """
    registry.check_stored_target(
        target_of(stored), folder, named=named, trust_code=trust_code
    )
    return from_config(stored)


def tupled(value: Any) -> Any:
    """Returns JSON with its lists as tuples, which is what configs hold."""
    if isinstance(value, dict):
        return {key: tupled(item) for key, item in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value
