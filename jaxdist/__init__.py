"""jaxdist: single-device JAX models, trained on any layout of devices.

Importing the package is free: it loads nothing, sets no flag and touches no device. A
name below is imported from its module when it is first used.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "Callback": "jaxdist.trainer.callbacks",
    "ConfigError": "jaxdist.config",
    "MeshConfig": "jaxdist.parallel.mesh",
    "OptimizerConfig": "jaxdist.optim.config",
    "RunConfig": "jaxdist.trainer.run_config",
    "build_mesh": "jaxdist.parallel.mesh",
    "build_train_step": "jaxdist.step.train_step",
    "default_config": "jaxdist.trainer.run_config",
    "every": "jaxdist.trainer.callbacks",
    "fit": "jaxdist.library",
    "join": "jaxdist.trainer.preemption",
    "load_run": "jaxdist.evaluation.loading",
    "run": "jaxdist.library",
    "shard": "jaxdist.parallel.execution",
    "sized": "jaxdist.trainer.config_sizes",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next use is a plain look-up
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
