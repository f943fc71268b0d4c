"""Errors of configurations, and the exit codes of all commands. It imports no jax."""

import difflib
from collections.abc import Iterable

EXIT_PEER_LOST = 70  # another process failed; this one did nothing wrong
EXIT_PREEMPTED = 75  # a signal asked to stop; all is saved
EXIT_HANG = 76  # killed by the watchdog
EXIT_NO_CHECKPOINT = 77  # a checkpoint is required, and none can be used
EXIT_CONFIG = 78  # a ConfigError; sysexits.h calls it EX_CONFIG
EXIT_INTERRUPTED = 130  # Ctrl-C, without a save; 128 + SIGINT
EXIT_CLOSED_PIPE = 141  # the reader of the output has gone (`| head`); 128 + SIGPIPE


class ConfigError(ValueError):
    """Faults of a configuration: one line for each, with value, rule and fix."""

    exit_code = EXIT_CONFIG

    def __init__(self, faults: str | Iterable[str]) -> None:
        if isinstance(faults, str):
            faults = [faults]
        self.faults: tuple[str, ...] = tuple(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)


def exit_code_of(error: BaseException) -> int:
    """Reads the exit code of a process that ends with an error."""
    code = getattr(error, "exit_code", 1)
    # A user's class may use the name for something else.
    return code if isinstance(code, int) else 1


def is_text(value: str) -> bool:
    """Tests whether a text can be encoded as UTF-8.

    Python decodes bytes that are not UTF-8, such as names of files, to lone surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


# names that other trainers use, by the key that they mean
_ELSEWHERE = {
    "max_iters": "train.steps",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "block_size": "batch.sequence_length",
    "eval_interval": "train.eval_every",
    "log_interval": "train.log_every",
    "gradient_accumulation_steps": "batch.accumulation",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.d_model",
}


def suggest(name: str, choices: Iterable[str]) -> str:
    """Suggests the choice nearest to a name: " Did you mean X?", or ""."""
    leaf = name.rpartition(".")[2]
    leaves = {choice: choice.rpartition(".")[2] for choice in choices}
    if _ELSEWHERE.get(leaf) in leaves:
        return f" Did you mean {_ELSEWHERE[leaf]}?"
    # `lr` and `wd` are the initials of `learning_rate` and `weight_decay`.
    near = [
        choice
        for choice, word in leaves.items()
        if "_" in word and _initials(word) == leaf
    ]
    if not near:
        # The leaves must be alike, too: `optimizer.wd` is not `optimizer.b2`.
        near = [
            choice
            for choice in difflib.get_close_matches(name, leaves, n=3, cutoff=0.6)
            if difflib.SequenceMatcher(None, leaf, leaves[choice]).ratio() >= 0.4
        ]
    if not near:
        # The right leaf in a wrong group: `lr.warmup_steps`, `global_size`.
        near = [choice for choice, word in leaves.items() if word == leaf]
    return f" Did you mean {near[0]}?" if near else ""
