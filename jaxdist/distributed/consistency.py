"""Whether all processes of a run run the same: code, versions, config, data."""

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import jaxdist
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.storage.digest import digest, digest_file


def code(model: type) -> dict[str, str]:
    """Computes hashes of this package's and of the model's source, and lists the
    versions that matter.
    """
    root = Path(jaxdist.__file__).parent
    ours = (
        f"{path.relative_to(root)} {digest_file(path)}"
        for path in sorted(root.rglob("*.py"))
    )
    source = getattr(sys.modules.get(model.__module__), "__file__", None)
    versions = {
        f"version of {name}": version(name)
        for name in ("jax", "jaxlib", "flax", "optax")
    }
    model_digest = digest_file(Path(source))[:16] if source else "(none)"
    return versions | {
        "source of jaxdist": digest(*ours)[:16],
        f"source of {model.__module__}": model_digest,
        "version of Python": ".".join(map(str, sys.version_info[:3])),
    }


def agree(facts: Callable[[], Mapping[str, object]]) -> None:
    """Compares facts over all processes; a lone one does not compute them.

    Raises:
      ConfigError: on all of them, naming the process and the fact that differ.
    """
    if coordination.kv_client() is None:
        return
    faults = coordination.all_equal(facts())
    if faults:
        raise ConfigError(faults)
