"""Training of single-device JAX models on any layout of devices.

`import jaxdist` loads no other module, sets no flag and touches no device. Each name in
`_EXPORTS` is imported from its module on first use.
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
    globals()[name] = value  # Python finds it there on the next use
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
