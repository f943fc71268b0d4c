"""A trained run, from its workdir onto the devices at hand: writes text, scores held-out text.

Of a checkpoint only the weights are read (the moving average, where there is one), straight into
the shardings of any legal mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist import evaluation, machine, recipe, workdir
from jaxdist.checkpoint.folder import CheckpointError
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import ConfigError
from jaxdist.data import Tokenizer, load_tokenizer, open_dataset
from jaxdist.data.loader import DeviceBatch, Loader
from jaxdist.decoding import Generate, SamplingConfig, build_generator
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.recipe import RunConfig
from jaxdist.sharding import Rules
from jaxdist.training.state import ModelSpec, State
from jaxdist.training.step import TrainStep

Watch = Callable[[int, int], None]  # batches begun, batches in all


class Sample(NamedTuple):
    """A text that starts with a prompt."""

    text: str  # the prompt and what was generated
    tokens: np.ndarray  # [new tokens] int32, without the end token
    ended: bool  # by the end token, not by the length


class HeldOut(NamedTuple):
    """How well a checkpoint predicts held-out text."""

    step: int  # updates finished
    loss: float  # nats per token
    tokens: int | float  # targets scored
    perplexity: float  # exp(loss)
    bits_per_byte: float | None  # comparable across tokenizers; None: the text's bytes are unknown
    bytes_per_token: float | None  # UTF-8 bytes a token stands for, in the held-out text


def load_run(
    folder: Path | str,
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    devices: Sequence[jax.Device] | None = None,
    log: Callable[[str], None] = print,
) -> TrainedRun:
    """Returns the run of a workdir with the weights of `step`, or of the newest usable checkpoint.

    Args:
      mesh: default: the run's own where it fits the devices, else all as fsdp, else all as data.
      devices: default: all.
      log: receives a line per event.

    Raises:
      ConfigError: no run there, or a mesh that is not legal.
      CheckpointError: no usable checkpoint.
    """
    folder = Path(folder)
    config = workdir.read_config(folder)
    devices = list(jax.devices() if devices is None else devices)
    config, rules, spec = _fitted(config, devices, mesh)
    placed = build_mesh(config.mesh, devices)
    built = recipe.build_step(config, spec, placed, rules)
    checkpoints = workdir.checkpoints_folder(folder, config)
    with CheckpointStore(checkpoints, config.checkpoint, mode="read") as store:
        restored = store.restore(_weights_alone(built.abstract_state), step, partial=True).state
        for bad, reason in store.bad_steps.items():
            log(f"checkpoint {bad} cannot be used: {reason}")
    weights = restored.trainable if restored.ema is None else restored.ema
    state = restored._replace(trainable=weights, ema=None)
    log(f"{folder}: step {int(state.step)}, {spec.parameter_count:,} parameters, {rules.shape}")
    return TrainedRun(folder, config, spec, placed, rules, built, state, log)


def _fitted(
    config: RunConfig, devices: list[jax.Device], mesh: MeshConfig | None
) -> tuple[RunConfig, Rules, ModelSpec]:
    """Returns the run's config with a mesh and a batch that fit these devices.

    Raises:
      ConfigError: none does; the faults are those of the last mesh tried.
    """
    own = [config.mesh] if config.mesh.pipeline == 1 else []  # one text at a time fills no pipeline
    meshes = [mesh] if mesh else [*own, MeshConfig(data=1, fsdp=len(devices)), MeshConfig()]
    part = config.batch.global_size // config.batch.accumulation
    rows = -(-part // len(devices)) * len(devices)  # any number of batch shards divides it
    batch = dataclasses.replace(config.batch, global_size=rows, accumulation=1)
    for number, choice in enumerate(meshes, 1):
        fitted = dataclasses.replace(config, mesh=choice, batch=batch)
        try:
            _, rules, spec = recipe.validate(fitted, devices, with_data=False)
            return fitted, rules, spec
        except ConfigError:
            if number == len(meshes):
                raise
    raise AssertionError("there is at least one mesh to try")


def _weights_alone(state: State) -> State:
    """Returns of an abstract state what the forward pass needs, laid out like the parameters."""
    if state.ema is None:
        return state._replace(opt_state=None)
    average = jax.tree.map(
        lambda e, p: jax.ShapeDtypeStruct(e.shape, e.dtype, sharding=p.sharding),
        state.ema,
        state.trainable,
    )
    return state._replace(trainable=None, opt_state=None, ema=average)


@dataclass(frozen=True)
class TrainedRun:
    """A run's model on devices, ready for use; made by `load_run`."""

    folder: Path
    config: RunConfig  # mesh and batch as they are here
    spec: ModelSpec
    mesh: Mesh
    rules: Rules
    built: TrainStep
    state: State  # without optimizer state; trainable holds the average, where there is one
    log: Callable[[str], None]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.

        Raises:
          ConfigError: its tokens were made elsewhere, or the tokenizer is not the model's.
        """
        data = self.config.data
        if data.source in ("bin", "megatron") and data.tokenizer == "bytes":
            raise ConfigError(
                f"data.source={data.source}: these tokens were made elsewhere; set data.tokenizer "
                f"in {self.folder / workdir.CONFIG} to the path of their tokenizer.json"
            )
        found = load_tokenizer(data.tokenizer, folder=self.folder)
        vocab_size = self.config.vocab_size
        if vocab_size is not None and found.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer {data.tokenizer} has {found.vocab_size} ids, model.vocab_size is "
                f"{vocab_size}; put the model's tokenizer.json into {self.folder}"
            )
        return found

    @functools.cached_property
    def _generate(self) -> Generate:
        compute = self.config.precision.compute
        return build_generator(self.spec, self.mesh, self.rules, compute=compute)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        num_samples: int = 1,
    ) -> list[list[Sample]]:
        """Returns `num_samples` continuations of each prompt.

        They depend on the weights, the prompt, its number, the settings and the seed alone. Where
        `sampling` has no end token, the tokenizer's end of a document is used, if it has one.

        Raises:
          ConfigError: illegal settings, an empty prompt, a text longer than the model can hold.
        """
        if not hasattr(self.config.model_class, "decode"):
            raise ConfigError(f"model.target={self.config.model['target']} has no decode method")
        if num_samples < 1:
            raise ConfigError(f"num_samples={num_samples}: must be >= 1")
        sampling = sampling or SamplingConfig()
        if sampling.end_token is None:
            sampling = dataclasses.replace(sampling, end_token=self.tokenizer.end_of_document)
        encoded = [self._encode(prompt) for prompt in prompts]
        rows = [ids for ids in encoded for _ in range(num_samples)]
        size, found = self.config.batch.global_size, []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            found += self._generate(
                self.state.trainable,
                self.state.model_state,
                part,
                max_tokens=max_tokens,
                sampling=sampling,
                seed=seed,
                samples=range(start, start + len(part)),
            )
        samples = [
            Sample(self._decode(ids, new.tokens), new.tokens, new.ended)
            for ids, new in zip(rows, found, strict=True)
        ]
        return [samples[i : i + num_samples] for i in range(0, len(samples), num_samples)]

    def _encode(self, prompt: str) -> np.ndarray:
        """Returns a prompt's ids; an empty one starts a document, if the tokenizer can say so."""
        end = self.tokenizer.end_of_document
        if not prompt and end is not None:
            return np.array([end], np.int32)
        return self.tokenizer.encode(prompt)

    def _decode(self, prompt: np.ndarray, new: np.ndarray) -> str:
        """Returns the whole text: a character may begin in the prompt and end behind it."""
        end = self.tokenizer.end_of_document
        return self.tokenizer.decode([t for t in (*prompt.tolist(), *new.tolist()) if t != end])

    def evaluate(self, *, validation_tokens: int | None = None, watch: Watch | None = None) -> HeldOut:
        """Returns the exact loss over the run's held-out set.

        Args:
          validation_tokens: targets at most, 0 = all; default: the run's data.validation_tokens.
          watch: told of every batch.

        Raises:
          ConfigError: nothing is held out.
        """
        data = self.config.data
        if validation_tokens is not None:
            data = dataclasses.replace(data, validation_tokens=validation_tokens)
        dataset = open_dataset(
            data,
            sequence_length=self.config.batch.sequence_length,
            vocab_size=self.config.vocab_size,
            seed=self.config.seed,
            folder=self.folder,
            log=self.log,
        )
        size = self.config.batch.global_size
        total = dataset.num_validation_batches(size)
        loader = Loader(
            dataset,
            global_size=size,
            shardings=self.built.batch_shardings(dataset.validation_batch(0, size)),
            split="validation",
            prefetch=data.prefetch,
        )
        with loader:
            found = evaluation.evaluate(self.built.evaluate, self.state, _watched(loader, total, watch))
        per_token = dataset.validation_bytes_per_token
        return HeldOut(
            step=int(self.state.step),
            loss=found.loss,
            tokens=found.tokens,
            perplexity=found.perplexity,
            bits_per_byte=None if per_token is None else found.bits_per_byte(per_token),
            bytes_per_token=per_token,
        )


def _watched(batches: Loader, total: int, watch: Watch | None) -> Iterator[DeviceBatch]:
    for number, batch in enumerate(batches, 1):
        if watch:
            watch(number, total)
        yield batch


# --- what the commands share ----------------------------------------------------------------------


class CommandFlags(argparse.ArgumentParser):
    """A parser with --workdir and --step, whose errors are ConfigErrors."""

    def __init__(self, name: str, description: str | None):
        super().__init__(prog=f"jaxdist {name}", description=description)
        self.add_argument("--workdir", required=True, type=Path, help="folder of the run")
        self.add_argument("--step", type=int, help="checkpoint to read (default: the newest)")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def opened(flags: argparse.Namespace) -> TrainedRun | None:
    """Returns the run that a command's flags name; None, with the reason printed: no checkpoint.

    Standard output is for results: all else goes to standard error.
    """
    _log(machine.prepare())
    try:
        return load_run(flags.workdir, step=flags.step, log=_log)
    except CheckpointError as error:
        _log(f"error: {error}")
        return None


def _log(line: str | None) -> None:
    if line and jax.process_index() == 0:
        print(line, file=sys.stderr)
