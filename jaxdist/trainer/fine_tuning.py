"""Rules for runs that start from trained weights.

Most configs are for random weights: their learning rates destroy trained ones, and
their default corpus is nobody's own. Such a value is accepted if the user has set its
key, or if the weights were trained with the same value.

`check` is a rule of the command `train`. A RunConfig does not record which keys were
set, so a program that passes one has chosen its values itself. `fit` cannot break the
rules: it has no default data, and no default optimizer. An OptimizerConfig has a value
for random weights only if the caller set it, since its defaults suit trained weights.
`warnings` are for all runs.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data.config import DataConfig
from jaxdist.trainer.run_config import RunConfig

# The learning rates of fine-tuning are 1e-5 to 5e-5 for all weights, and 1e-4 to 5e-4
# for adapters (LoRA, arXiv:2106.09685, appendix D).
HIGH_RATE = 1e-3
LOW_RATE_OF_ADAPTERS = 5e-5
_OF_RANDOM_WEIGHTS = (
    "is for random weights, and would destroy {weights}. Use --config finetune, or add "
    "--config.optimizer.name=adamw --config.optimizer.learning_rate=2e-5; to keep the "
    "value, add --config.{key}={value}"
)


def check(
    config: RunConfig, set_keys: Collection[str], trained_with: Mapping[str, Any]
) -> None:
    """Checks that a run from trained weights has data and a rate for them.

    Args:
      config: the run's config.
      set_keys: keys that the user has set.
      trained_with: config of the run that trained the weights, by key; {} = unknown.

    Raises:
      ConfigError: a value is for random weights. It lists all of them.
    """
    weights = _weights(config)
    if not weights and not config.init.required:
        return
    if config.init.from_huggingface and config.init.from_run:
        return  # The validation refuses two sources.

    def is_meant(key: str, value: object) -> bool:
        return key in set_keys or trained_with.get(key) == value

    faults = []
    default = DataConfig().source
    takes_default = config.data.source == default and not config.data.path
    if takes_default and not is_meant("data.source", default):
        faults.append(_default_corpus(weights, default))
    if weights and not config.lora.rank:
        optimizer = config.optimizer
        if optimizer.name == "muon" and not is_meant("optimizer.name", optimizer.name):
            faults.append(_for_random_weights("optimizer.name", "muon", weights))
        rate = optimizer.learning_rate
        key = "optimizer.learning_rate"
        if rate >= HIGH_RATE and not is_meant(key, rate):
            faults.append(_for_random_weights(key, rate, weights))
    if faults:
        raise ConfigError([*config.init.faults(), *faults])


def warnings(config: RunConfig) -> Iterator[str]:
    """Warns of a learning rate that is high or low for adapters."""
    optimizer = config.optimizer
    if not config.lora.rank or optimizer.name == "given":
        return
    rate = optimizer.learning_rate
    if LOW_RATE_OF_ADAPTERS <= rate < HIGH_RATE:
        return
    size = "high" if rate >= HIGH_RATE else "low"
    yield (
        f"optimizer.learning_rate={rate:g} is {size} for adapters (lora.rank="
        f"{config.lora.rank}); usual are 1e-4 to 5e-4 with optimizer.name=adamw, as in "
        f"--config finetune:lora"
    )


def batch_warnings(config: RunConfig, trained_with: Mapping[str, Any]) -> Iterator[str]:
    """Warns of another global batch with the learning rate of the source.

    The rate of Adam's updates usually grows with the square root of the batch
    (arXiv:2205.10287), that of SGD's in proportion (arXiv:1706.02677).

    Args:
      config: the run's config.
      trained_with: config of the run that trained the weights, by key; {} = unknown.
    """
    optimizer = config.optimizer
    sequences = trained_with.get("batch.global_size")
    length = trained_with.get("batch.sequence_length")
    same_rate = trained_with.get("optimizer.learning_rate") == optimizer.learning_rate
    if optimizer.name == "given" or not same_rate:
        return
    if not (isinstance(sequences, int) and isinstance(length, int)):
        return
    before = sequences * length
    now = config.batch.global_size * config.batch.sequence_length
    if now == before or before <= 0:
        return
    root = optimizer.learning_rate * math.sqrt(now / before)
    yield (
        f"the global batch changed from {sequences} x {length} to "
        f"{config.batch.global_size} x {config.batch.sequence_length} tokens, the "
        f"learning rate did not ({optimizer.learning_rate:g}). With AdamW it usually "
        f"changes with the square root of the batch: optimizer.learning_rate={root:.3g}"
    )


def _weights(config: RunConfig) -> str:
    """Names the initial weights as KEY=PLACE; "" if they are random."""
    if config.init.from_huggingface:
        return f"init.from_huggingface={config.init.from_huggingface}"
    if config.init.from_run:
        return f"init.from_run={config.init.from_run}"
    return ""


def _default_corpus(weights: str, default: str) -> str:
    subject = weights or "init.required=true"
    return (
        f"{subject}: no data are named, and the default, data.source={default}, is the "
        f"source files of Python's library. Add your own, such as "
        f"--config.data.source=text --config.data.path='notes/**/*.md'; to train on "
        f"the default, add --config.data.source={default}"
    )


def _for_random_weights(key: str, value: object, weights: str) -> str:
    words = _OF_RANDOM_WEIGHTS.format(key=key, value=value, weights=weights)
    return f"{key}={value} {words}"
