"""A run that begins with weights that are there: the model's values, the tokenizer, the
first state.

They come from a Hugging Face folder (here), or from another run (`from_run`).
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxdist import interop
from jaxdist.config import ConfigError, trees
from jaxdist.data import load_tokenizer
from jaxdist.data.sources import MADE_ELSEWHERE
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.distributed import consistency
from jaxdist.interop import peft
from jaxdist.interop.families import Family
from jaxdist.models import lora, registry
from jaxdist.protocols.model_spec import describe, stored_dtype
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import build, from_run
from jaxdist.trainer.run_config import Build, RunConfig, model_defaults


def apply_source(
    config: ConfigDict, chosen: Collection[str] = (), before: RunConfig | None = None
) -> None:
    """Sets model.* and data.tokenizer of a config to those of what it begins with: of
    init.*, if anything.

    Args:
      chosen: paths that the user has set; these stay, and must agree with what it
        begins with, unless they stretch its rotary positions.
      before: the config of a run that goes on; it knows all, and nothing else is read.

    Raises:
      ConfigError: there is nothing, or what is not built; what disagrees with it; no
        tokenizer.
    """
    key = "from_run" if config.init.from_run else "from_huggingface"
    source = config.init[key]
    # reported with all else
    if not source or config.init.from_run and config.init.from_huggingface:
        return
    if before is not None and getattr(before.init, key) == source:
        theirs = {n: v for n, v in before.model.items() if n not in interop.TRAINING}
        tokenizer = before.data.tokenizer
    elif key == "from_run":
        theirs, tokenizer = from_run.model_values(source, config, chosen)
    else:
        folder = Path(source).expanduser()
        theirs = {"target": registry.DEFAULT_TARGET} | interop.derive(
            interop.read_config(folder)
        )[1]
        tokenizer = _tokenizer_of(folder, config, theirs["vocab_size"], chosen)
    ours = {
        n: v for n, v in config.model.items() if f"model.{n}" in chosen and n in theirs
    }
    if before is None:  # with these a run may begin to learn longer sequences
        theirs |= {n: ours.pop(n) for n in interop.POSITIONS if n in ours}
    if faults := interop.different(ours, theirs):
        raise ConfigError(
            f"{fault} (init.{key}={source}); leave it out" for fault in faults
        )
    with config.unlocked(), config.ignore_type():
        if theirs.get("target", config.model.target) != config.model.target:
            config.model = model_defaults(theirs["target"])
        config.model.update(theirs)
        if (
            _leaves_balance(theirs)
            and config.model.balance == "bias"
            and "model.balance" not in chosen
        ):
            # there is no place for biases in the files that may be exported
            config.model.balance = "batch"
        if "data.tokenizer" not in chosen:
            config.data.tokenizer = tokenizer


def _leaves_balance(theirs: Mapping[str, Any]) -> bool:
    """Returns whether a model has experts, and nothing says how their load is kept
    even.
    """
    return bool(theirs.get("num_experts")) and "balance" not in theirs


def _tokenizer_of(
    folder: Path, config: ConfigDict, vocab_size: int, chosen: Collection[str]
) -> str:
    """Returns the data.tokenizer for the folder's model: its own, if anything needs
    one.
    """
    file = folder / TOKENIZER_FILE
    made_elsewhere = config.data.source in MADE_ELSEWHERE or "data.tokenizer" in chosen
    if (
        not file.is_file()
        and not made_elsewhere
        and vocab_size != load_tokenizer("bytes").vocab_size
    ):
        raise ConfigError(
            f"init.from_huggingface={folder}: no {TOKENIZER_FILE} there; let transformers write one "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...)), or set data.tokenizer"
        )
    return str(file) if file.is_file() else config.data.tokenizer


def init_state(
    config: RunConfig,
    built: TrainStep,
    folder: Path,
    phase: Callable[[str, int], None],
    made: Build | None = None,
) -> State:
    """Returns the first state of a run: fresh, or with the weights that init.* names.

    What goes with the weights (config, tokenizer) is copied into the workdir `folder`,
    for exports.

    Args:
      phase: told of "restore", if weights are read.
      made: builds the model, where a caller has given one.

    Raises:
      ConfigError: the weights cannot be read, or are another model's.
      CheckpointError: none of the checkpoints of init.from_run can be used.
    """
    if not (config.init.from_run or config.init.from_huggingface):
        return built.init()
    phase("restore", 0)
    quantise = _quantiser(config, built.views.abstract, made)
    if config.init.from_run:
        base = (
            base_parameters(config, built.views.abstract, made)
            if config.lora.rank
            else {}
        )
        return from_run.read_state(config, built, base, quantise, folder)
    source = Path(config.init.from_huggingface).expanduser()
    wanted = base_parameters(config, built.views.abstract)
    try:
        tensors = interop.open_weights(
            source, config.model_options, {p: x.shape for p, x in wanted.items()}
        )
        factors = _adapter(config, tensors.family, built.views.abstract)
    except ConfigError as error:
        fault = str(error)
        consistency.agree(lambda: {"init.from_huggingface": fault})
        raise
    consistency.agree(lambda: {"init.from_huggingface": tensors.sizes()})
    if jax.process_index() == 0:
        interop.copy_small_files(source, folder / interop.KEPT)
        if (
            kind := interop.read_config(source).get("model_type")
        ) not in interop.FAMILIES:
            print(
                f"{source}: {kind!r} is not known, and read as a llama: compare its logits"
            )
    return built.init(tensors.load(wanted, quantise) | factors)


def _adapter(config: RunConfig, family: Family, flat: State) -> dict[str, jax.Array]:
    """Returns A and B of lora.from_peft by path, laid out as the run has them; without
    it nothing.
    """
    if not config.lora.from_peft:
        return {}
    where = trees.flatten_names(flat.trainable)
    read = peft.read(
        config.lora.from_peft,
        family,
        config.lora,
        {p: x.shape for p, x in where.items()},
    )

    def placed(path: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        assert x.sharding is not None
        return jax.make_array_from_callback(
            x.shape, x.sharding, lambda at: read[path][at].astype(x.dtype)
        )

    return {path: placed(path, x) for path, x in where.items()}


def _quantiser(
    config: RunConfig, flat: State, made: Build | None
) -> Callable[[str, jax.Array], Any]:
    """Returns what makes of a kernel, in its shards, what a quantised base
    keeps of it.
    """
    kernels = lora.kernels(build.model_spec(config, made).abstract_model)
    stored = trees.flatten_names(flat.frozen)

    def quantise(path: str, kernel: jax.Array) -> Any:
        form = kernels[path].form if path in kernels else None
        if form is None:
            return kernel
        shards = tuple(
            stored[f"{path}/{part}"].sharding for part in kernels[path].parts
        )
        return jax.block_until_ready(jax.jit(form.store, out_shardings=shards)(kernel))

    return quantise


def base_parameters(
    config: RunConfig, flat: State, made: Build | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters of the model without adapters by path, each laid out as
    the run has it.

    Args:
      flat: the run's abstract state with flat layers.
      made: builds the model, where a caller has given one.
    """
    spec = describe(
        made or registry.build_function(config.model_class, config.model_options)
    )
    stored: Mapping[str, Any] = trees.flatten_names(
        flat.trainable
    ) | trees.flatten_names(flat.frozen)

    def placed(path: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # what an adapter keeps of it
        names = (path, *(f"{path}/{part}" for part in ("base", "codes")))
        where = next(stored[name].sharding for name in names if name in stored)
        return jax.ShapeDtypeStruct(
            x.shape, stored_dtype(x, config.precision.params), sharding=where
        )

    return {
        path: placed(path, x) for path, x in trees.flatten_names(spec.trainable).items()
    }
