"""Comparison of code, versions, config and data over all processes of a run."""

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import jaxdist
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.storage.digest import digest, digest_file


def code(model: type) -> dict[str, str]:
    """Describes the code of this process: digests of sources, and versions.

    Args:
      model: the model's class; its module's source is one of the digests.
    """
    root = Path(jaxdist.__file__).parent
    package_files = (
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
        "source of jaxdist": digest(*package_files)[:16],
        f"source of {model.__module__}": model_digest,
        "version of Python": ".".join(map(str, sys.version_info[:3])),
    }


def agree(facts: Callable[[], Mapping[str, object]]) -> None:
    """Checks that facts are the same on all processes.

    Args:
      facts: computes the facts by name. A lone process does not call it.

    Raises:
      ConfigError: on all processes; it names each process and fact that differ.
    """
    if coordination.kv_client() is None:
        return
    faults = coordination.all_equal(facts())
    if faults:
        raise ConfigError(faults)
