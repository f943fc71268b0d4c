"""The protocol of a source of initial weights, such as a file format.

A source serves one key of the config. Before validation, it gives the config that its
weights imply. Before the first step, it gives the weights.
"""

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxdist.config import trees
from jaxdist.models import lora, registry
from jaxdist.protocols.model_spec import Tree, describe, stored_dtype
from jaxdist.step.state import OptState, State
from jaxdist.trainer import compose
from jaxdist.trainer.run_config import Build, RunConfig


class ImpliedConfig(NamedTuple):
    """The part of a config that the weights determine."""

    model: dict[str, Any]  # values of model.*; {} = the source has none
    tokenizer: str  # value of data.tokenizer
    # config of the run that trained the weights, by key; {} = unknown
    trained_with: Mapping[str, Any] = {}


class LoadedWeights(NamedTuple):
    """Weights on the devices, each array with the sharding of the run."""

    # parameters and model state by path, as the run stores them (`Target.store`)
    values: dict[str, Any]
    note: str = ""  # lines to print; "" = none
    # Hugging Face folder whose config and tokenizer the run keeps for exports
    small_files: Path | None = None
    # optimizer's state to continue with; None = a new one
    opt_state: OptState | None = None
    ema: Tree | None = None  # moving average to continue with; None = a new one
    # metadata of the checkpoint; {} = the weights are of no run
    metadata: Mapping[str, Any] = {}


class OpenedWeights(NamedTuple):
    """Weights that exist and fit the run, not read yet."""

    facts: object  # description of the weights, which must be equal on all processes
    load: Callable[[], LoadedWeights]  # reads the weights; every process calls it


class Target:
    """The arrays that weights are loaded into."""

    def __init__(
        self, config: RunConfig, abstract: State, build: Build | None = None
    ) -> None:
        """Takes the config and the abstract state of a run.

        Args:
          config: the run's config.
          abstract: the run's state with flat layers, as ShapeDtypeStructs with
            shardings.
          build: makes the caller's model; default: the config names the model.
        """
        self.config = config
        self.abstract = abstract
        self._build = build
        self._conversions: dict[str, Callable[[jax.Array], Any]] = {}

    @functools.cached_property
    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes the parameters of the model without adapters, by path.

        They have the shardings of the run.
        """
        build = self._build or registry.build_function(
            self.config.model_class, self.config.model_options
        )
        stored = trees.flatten_names(self.abstract.trainable)
        stored |= trees.flatten_names(self.abstract.frozen)
        parameters = {}
        for path, x in trees.flatten_names(describe(build).trainable).items():
            # A kernel with an adapter has one of the longer names.
            names = (path, f"{path}/base", f"{path}/codes")
            sharding = next(stored[name].sharding for name in names if name in stored)
            dtype = stored_dtype(x, self.config.precision.params)
            parameters[path] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
        return parameters

    @functools.cached_property
    def trained_with_adapters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes what a run with LoRA trains by path.

        This is A and B, and the parameters that are trained in full beside them.
        """
        trainable: dict[str, jax.ShapeDtypeStruct]
        trainable = trees.flatten_names(self.abstract.trainable)
        return trainable

    @functools.cached_property
    def _kernels(self) -> dict[str, lora.LoraKernel]:
        if not self.config.lora.rank:
            return {}
        spec = compose.model_spec(self.config, self._build)
        return lora.kernels(spec.abstract_model)

    @functools.cached_property
    def stored_by_layer(self) -> frozenset[str]:
        """The paths of kernels that `store` takes one layer at a time, to save memory.

        They are quantised, and no mesh axis splits their layers.
        """

        def is_split(path: str) -> bool:
            sharding = self.parameters[path].sharding
            assert isinstance(sharding, NamedSharding)
            return bool(sharding.spec) and sharding.spec[0] is not None

        quantised = (path for path, kernel in self._kernels.items() if kernel.form)
        return frozenset(path for path in quantised if not is_split(path))

    def store(self, path: str, kernel: jax.Array) -> Any:
        """Converts a parameter to the form that the run stores.

        Only kernels of a quantized base change. Call it before you read the next
        parameter, so that only one kernel is in memory before its conversion.

        Args:
          path: path of the parameter.
          kernel: its value, with the sharding of the run; or some of its layers.
        """
        adapted = self._kernels.get(path)
        if adapted is None or adapted.form is None:
            return kernel
        if path not in self._conversions:
            self._conversions[path] = self._conversion(path, adapted)
        return jax.block_until_ready(self._conversions[path](kernel))

    def _conversion(
        self, path: str, adapted: lora.LoraKernel
    ) -> Callable[[jax.Array], Any]:
        """Compiles the conversion of a kernel, once for all its layers."""
        assert adapted.form is not None
        stored = trees.flatten_names(self.abstract.frozen)
        shardings = tuple(stored[f"{path}/{part}"].sharding for part in adapted.parts)
        return jax.jit(adapted.form.store, out_shardings=shardings)


class WeightSource(Protocol):
    """A source of initial weights, which serves one key of the config."""

    key: ClassVar[str]  # the key, whose value names the place of the weights
    # whether the weights are those of a whole model, and so imply its config
    implies_config: ClassVar[bool]

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Reads the config that the weights imply, but not the weights.

        Args:
          config: the run's config, not validated yet.
          set_keys: keys that the user has set.

        Raises:
          ConfigError: the weights are missing, are not supported, or have no tokenizer.
        """
        ...

    def open(self, target: Target) -> OpenedWeights:
        """Finds the weights and checks that they fit. Every process makes the call.

        Raises:
          ConfigError: the weights cannot be read, or belong to another model.
          CheckpointError: no checkpoint can be used.
        """
        ...


def named_place(config: RunConfig | ConfigDict, key: str) -> str:
    """Reads the value of a source's key; "" if it is not set."""
    try:
        place: str = operator.attrgetter(key)(config)
    except AttributeError:  # a config file may lack the group
        return ""
    return place
