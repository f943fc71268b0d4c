"""A run's config.json, or its copy in a checkpoint. Somebody else may have written it."""

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
      ConfigError: the file is missing, damaged, or of another version.
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
    """Reads the model.target of a stored config.

    Raises:
      ConfigError: the value is no text.
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
    """Makes the RunConfig of a stored config. All stored configs come through here.

    Args:
      stored: the config.
      folder: where it is stored.
      named: as of `registry.check_stored_target`.
      trust_code: as of `registry.check_stored_target`.

    Raises:
      ConfigError: unknown keys, wrong types, or a model whose code is not trusted.
    """
    registry.check_stored_target(
        target_of(stored), folder, named=named, trust_code=trust_code
    )
    return from_config(stored)


def tupled(value: Any) -> Any:
    """Converts the lists of a JSON document to tuples, as configs hold them."""
    if isinstance(value, dict):
        return {key: tupled(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(tupled(item) for item in value)
    return value
