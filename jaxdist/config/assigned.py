"""Keys of a config that its author has assigned, as opposed to those with a default.

Some values are fine as defaults of one config and harmful in another run, such as a
learning rate for random weights. A rule may then accept such a value if the user has
set the key, and refuse it if not.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxdist.config import schema


class RecordingConfig(ConfigDict):  # type: ignore[misc]  # ml_collections is untyped
    """A config that records the keys that are assigned after it was made."""

    def __init__(
        self, values: Mapping[str, Any] | ConfigDict | None = None, **options: Any
    ) -> None:
        """Copies nested values. `options` are those of ConfigDict.

        It takes values of any type, as `schema.to_config_dict` says.
        """
        # A ConfigDict takes attributes for keys.
        object.__setattr__(self, "_assigned", set())
        super().__init__(**{"type_safe": False, **options})
        for key, value in (values or {}).items():
            if isinstance(value, Mapping | ConfigDict):
                value = RecordingConfig(value)
            self[key] = value
        self._assigned.clear()

    def __setitem__(self, key: str, value: Any) -> None:
        """Assigns a key, as attributes and `update` do, too."""
        super().__setitem__(key, value)
        self._assigned.add(key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies the record, too, when the config is copied."""
        super().__setstate__(state)
        self._assigned.clear()
        self._assigned.update(state["_assigned"])

    def copy_and_resolve_references(self, visit_map: Any = None) -> "RecordingConfig":
        """Copies the config with its record."""
        copied: RecordingConfig = super().copy_and_resolve_references(visit_map)
        copied._assigned.clear()
        copied._assigned.update(self._assigned)
        return copied

    def keys_assigned(self) -> set[str]:
        """Lists the dotted keys that were assigned, alone or as a whole group."""
        keys = set()
        for key, value in self.items():
            if not isinstance(value, ConfigDict):
                inside = {key} & self._assigned
            elif key in self._assigned or not isinstance(value, RecordingConfig):
                inside = {f"{key}.{path}" for path in schema.flatten(value)}
            else:
                inside = {f"{key}.{path}" for path in value.keys_assigned()}
            keys |= inside
        return keys


def assigned_keys(config: ConfigDict) -> set[str]:
    """Lists the keys that the author of a config has assigned.

    They are all keys of a config that was not made by `default_config`.
    """
    if isinstance(config, RecordingConfig):
        return config.keys_assigned()
    return set(schema.flatten(config))


def of_dataclass(instance: Any) -> RecordingConfig:
    """Converts a dataclass instance. Values other than the defaults count as assigned."""
    values = schema.to_config_dict(instance)
    flat = schema.flatten(values)
    config = RecordingConfig(values)
    changed = {
        path: flat[path]
        for path, field in schema.schema_of(type(instance)).items()
        if path in flat and flat[path] != field.default
    }
    config.update_from_flattened_dict(changed)
    return config
