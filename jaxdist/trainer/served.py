"""The keys of a config that only a callback serves."""

from collections.abc import Collection
from operator import attrgetter

from jaxdist.config import ConfigError, schema
from jaxdist.trainer.run_config import RunConfig


def check_served(run: RunConfig, keys: Collection[str]) -> None:
    """Checks that no key of a config is set in vain.

    Args:
      run: the config.
      keys: that the run's callbacks serve; a group stands for its keys.

    Raises:
      ConfigError: one line for each key that needs a callback which the run lacks.
    """
    faults = []
    for key, field in schema.schema_of(RunConfig).items():
        value = attrgetter(key)(run)
        group = key.partition(".")[0]
        if not field.callback or key in keys or group in keys:
            continue
        if value != field.default:
            faults.append(
                f"{key}={value}: nothing in this run does that. The key needs the "
                f"callback {field.callback}. Pass it in callbacks=[...], or leave the "
                f"key out."
            )
    if faults:
        raise ConfigError(faults)
