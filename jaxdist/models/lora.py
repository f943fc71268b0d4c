"""LoRA: low-rank adapters on a frozen model.

A kernel W acts as W + alpha / rank x A B. Only A and B are trained, and parameters that
no trained model has (`beside_adapters`), such as the head of a reward model. `adapted`
changes how a model is built: each matrix becomes a `LoraKernel` in the parameter's
place.

Layers that multiply with `ops.matmul.project` (all of jaxdist do) compute
x W + alpha / rank x (x A) B, without a changed copy of W. A quantised W (QLoRA) is
gathered from its shards as it is stored, and restored layer by layer.

Other layers, such as `ops.experts`, read `kernel[...]`. It is W + alpha / rank x A B
for the layers that are in use. Each expert has an A and a B, and the sum is computed in
the shards that W is stored in.

qwix can only adapt modules that it sees called, and not those in a scan. So A and B are
created here, in stacks like W, and qwix does the quantisation. Sources: LoRA
(arXiv:2106.09685), QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError, extras, trees
from jaxdist.config.annotations import (
    NamesWeights,
    NonNegativeInt,
    PositiveFloat,
    Share,
)
from jaxdist.config.patterns import is_found, pattern_faults
from jaxdist.models import layers
from jaxdist.ops.dense_matmul import FrozenKernel
from jaxdist.ops.matmul import project, project_lightly
from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names, in_stack
from jaxdist.protocols.model import BlockInfo, is_staged
from jaxdist.protocols.model_spec import as_stored

Base = Literal["none", "int8", "nf4"]
Build = Callable[[nnx.Rngs], Any]

_PATH_ENDS = "(^|/)({})$"  # pattern of paths whose end matches a pattern


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen model."""

    # columns of A and rows of B; 0 = no adapters: the whole model is trained
    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0  # kernels act as W + alpha / rank x A B
    # regexes that match the end of a kernel's path: query, mlp/.*
    targets: tuple[str, ...] = (".*",)
    # storage of the blocks' kernels; none = unchanged, nf4 = 0.56 bytes per weight
    base: Base = "none"
    dropout: Share = 0.0  # share of an adapter's inputs that is dropped in training
    # folder of a PEFT adapter with the initial values of A and B; "" = B is 0
    from_peft: Annotated[str, NamesWeights()] = ""

    def faults(self) -> Iterator[str]:
        """Yields a message for each conflict of values, with its fix."""
        yield from pattern_faults("lora.targets", self.targets, _PATH_ENDS)
        if self.rank and not self.targets:
            yield 'lora.targets is empty; name kernels, for example ("query", "value")'
        for name in ("base", "from_peft"):
            if getattr(self, name) not in ("none", "") and not self.rank:
                yield f"lora.{name}={getattr(self, name)}: needs adapters to train; set lora.rank"
        if self.dropout and not self.rank:
            yield f"lora.dropout={self.dropout}: needs adapters to train; set lora.rank"
        if self.base != "none" and find_spec("qwix") is None:
            yield f"lora.base={self.base} needs qwix: {extras.install_command('lora')}"


class LoraKernel(nnx.Module):
    """A kernel [*stack, *inputs, *outputs]: its frozen value, and perhaps A and B.

    Kernels of experts are [*stack, E, *inputs, *outputs]. Each expert has an A and a B.

    Args:
      kernel: the parameter that this module replaces.
      shape: its dims.
      config: options of the adapter.
    """

    # of the block that runs; `protocols.model.apply_block` sets it
    block_info: BlockInfo | None = None
    block_length: int = 0  # sequence length of that block's input

    def __init__(
        self, kernel: nnx.Param[jax.Array], shape: Shape, config: LoraConfig
    ) -> None:
        self.contract = shape.contract
        self.scaling = config.alpha / config.rank
        self.dropout = config.dropout
        self.site = zlib.crc32(shape.path.encode()) >> 1
        split = (
            name if name in ("heads", "d_ff") else None
            for name in shape.names[: shape.contract]
        )
        self.input_dims = ("sequence", *split)
        self.form = None
        names = [(*shape.lead, *shape.names)]
        if config.base != "none":
            form_of = extras.load("jaxdist.models.lora_quantization").form_of
            self.form = form_of(
                config.base, shape.names, shape.dims, shape.contract, shape.path
            )
            names.append((*shape.lead, *self.form.scale_names(shape.names)))
        for part, name, value in zip(
            self.parts, names, self._store(kernel[...]), strict=True
        ):
            setattr(self, part, nnx.Param(value, logical=name, trainable=False))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parameters that store W."""
        return ("codes", "scales") if self.form else ("base",)

    @property
    def logical(self) -> Names:
        """The logical names of W's dims."""
        # the first parameter has the dims of W
        names: Names = getattr(getattr(self, self.parts[0]), "logical", ())
        return names

    def _store(self, kernel: jax.Array) -> tuple[jax.Array, ...]:
        """Splits W into the values of `parts`."""
        if self.form is None:
            return (kernel,)
        values: tuple[jax.Array, ...] = self.form.store(kernel)
        return values

    def set_kernel(self, kernel: jax.Array | tuple[jax.Array, ...]) -> None:
        """Sets another W.

        Args:
          kernel: the new W, or the values of `parts`.
        """
        values = kernel if isinstance(kernel, tuple) else self._store(kernel)
        for part, value in zip(self.parts, values, strict=True):
            getattr(self, part).set_value(value)

    def add_low_rank(self, shape: Shape, rank: int, rngs: nnx.Rngs) -> None:
        """Adds A ~ U(-1, 1) / sqrt(inputs), as PEFT does, and B = 0.

        With B = 0 the kernel acts as before.

        Args:
          shape: dims of the kernel.
          rank: columns of A and rows of B.
          rngs: random streams for A.
        """
        inputs = shape.dims[: shape.contract]
        outputs = shape.dims[shape.contract :]
        bound = math.prod(inputs) ** -0.5
        a = jax.random.uniform(
            rngs.params(), (*shape.stack, *inputs, rank), minval=-bound, maxval=bound
        )
        b = jnp.zeros((*shape.stack, rank, *outputs))
        input_names = shape.names[: shape.contract]
        output_names = shape.names[shape.contract :]
        a_names: Names = ()
        if input_names:
            a_names = (*shape.lead, *input_names, None)
        b_names: Names = ()
        if output_names:
            b_names = (*shape.lead, None, *output_names)
        self.lora_a = nnx.Param(a, logical=a_names)
        self.lora_b = nnx.Param(b, logical=b_names)

    def frozen(self) -> FrozenKernel:
        """Converts W to the form that `project` takes."""
        parameters = [getattr(self, part) for part in self.parts]
        values = tuple(parameter[...] for parameter in parameters)
        names = tuple(parameter.logical for parameter in parameters)
        if self.form is None:
            return FrozenKernel(values, names)
        return FrozenKernel(values, names, self.form.restore)

    def apply_adapter(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Adds alpha / rank x (x A) B to y = x W; dropout applies to the x of A."""
        if not hasattr(self, "lora_a"):
            return y
        if self.dropout and self.block_info:
            x = layers.dropout(
                x,
                self.dropout,
                self.block_info,
                self.site,
                self.input_dims,
                copies=self._copies(x),
            )
        (low,) = project(x, self.lora_a, contract=self.contract)
        return y + project_lightly(low * self.scaling, self.lora_b)

    def _copies(self, x: jax.Array) -> int:
        """Counts the copies of the sequence in x.

        Each device of `context` may have gathered the whole sequence. Any other input
        counts as one copy, as that of a kernel that reads a part of the sequence.
        """
        if x.shape[1] % self.block_length:
            return 1
        return x.shape[1] // self.block_length

    def merged(self) -> jax.Array:
        """Computes W + alpha / rank x A B in float32, laid out as W is stored."""
        stored = self.frozen()
        kernel: jax.Array = stored.restored(*stored.parts).astype(jnp.float32)
        if hasattr(self, "lora_a"):
            product: Callable[..., jax.Array] = jnp.tensordot
            for _ in range(self.lora_a.ndim - self.contract - 1):
                product = jax.vmap(product, in_axes=(0, 0, None))
            added = self.scaling * product(self.lora_a[...], self.lora_b[...], 1)
            kernel = kernel + added
        return execution.current().lay_out(kernel, Rules.stored, self.logical)

    def __getitem__(self, index: Any) -> jax.Array:
        """Reads the merged kernel, for a layer that does not multiply with `project`.

        Raises:
          ConfigError: lora.dropout is set, but there is no input to drop from.
        """
        if self.dropout and hasattr(self, "lora_a"):
            raise ConfigError(
                "lora.dropout: a layer reads its whole kernel, instead of multiplying with "
                "jaxdist.ops.matmul.project; set lora.dropout=0, or name other lora.targets"
            )
        return self.merged()[index]


@dataclass(frozen=True)
class Shape:
    """The dims of a kernel by their roles."""

    path: str
    names: Names  # of `dims`
    stack: tuple[int, ...]  # leading dims: of layers, and of experts
    dims: tuple[int, ...]  # dims of the matrix itself
    contract: int  # number of `dims` that are inputs
    lead: Names = ()  # names of stack dims that devices may split: experts


def shape_of(path: str, kernel: nnx.Param[jax.Array]) -> Shape | str:
    """Splits the dims of a parameter that is a matrix, or explains why it is none.

    Heads and head_dim count as one dim. A parameter without names has one stack dim if
    it is in a stack of blocks.

    Returns:
      The dims, or the reason why the parameter gets no adapter.
    """
    names: Names = tuple(kernel.get_metadata().get("logical") or ())
    lead: Names = ("experts",) if names[:1] == ("experts",) else ()
    names = names[len(lead) :]
    rank = len(names) if names else kernel.ndim - in_stack(path)
    is_table = "vocab" in names or "positions" in names
    if kernel.get_metadata().get("beside_adapters"):
        return "it is trained in full beside the adapters; leave it out"
    if is_table or (not names and "embed" in path.lower()):
        return "rows of a table are looked up, not multiplied; train it in full, or leave it frozen"
    contract = 2 if names[1:2] == ("head_dim",) else 1
    outputs = rank - contract
    if names[-1:] == ("head_dim",):
        outputs -= 1
    if outputs != 1 or not jnp.issubdtype(kernel.dtype, jnp.floating):
        return "it is no matrix"
    dims = tuple(kernel.shape)
    stacks = kernel.ndim - rank
    return Shape(path, names, dims[:stacks], dims[stacks:], contract, lead)


def adapted(build: Build, config: LoraConfig) -> Build:
    """Wraps `build` so that its model has adapters; with rank 0 it stays as it is."""
    if not config.rank:
        return build
    return lambda rngs: adapt(build(rngs), config, rngs)


def adapt(model: Any, config: LoraConfig, rngs: nnx.Rngs) -> Any:
    """Adapts the kernels of a model in place and freezes all its parameters.

    Parameters with the mark `beside_adapters` stay as they are: they are trained.

    Raises:
      ConfigError: a target is no kernel, a kernel cannot be quantised, or dropout
        cannot be applied.
    """
    owners = {
        trees.SEPARATOR.join(map(str, (*path, name))): (module, name)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param)
    }
    shapes = {path: shape_of(path, getattr(*owner)) for path, owner in owners.items()}
    targets = _find_targets(shapes, config)
    if config.dropout:
        _check_dropout(targets, is_staged(model))
    for _, leaf in nnx.iter_graph(model):
        if not isinstance(leaf, nnx.Param):
            continue
        if not leaf.get_metadata().get("beside_adapters"):
            leaf.set_metadata(trainable=False)
    for path, (owner, name) in owners.items():
        shape = shapes[path]
        is_quantised = config.base != "none" and in_stack(path)
        is_target = path in targets
        if not isinstance(shape, Shape) or not (is_target or is_quantised):
            continue
        kernel = LoraKernel(getattr(owner, name), shape, config)
        setattr(owner, name, kernel)
        if is_target:
            kernel.add_low_rank(shape, config.rank, rngs)
    return model


def _find_targets(
    shapes: dict[str, Shape | str], config: LoraConfig
) -> dict[str, Shape]:
    """Finds the kernels that lora.targets names, by path.

    Raises:
      ConfigError: a target is invalid, or matches no kernel.
    """
    kernels = {
        path: shape for path, shape in shapes.items() if isinstance(shape, Shape)
    }
    targets: dict[str, Shape] = {}
    faults = list(pattern_faults("lora.targets", config.targets, _PATH_ENDS))
    if faults:
        raise ConfigError(faults)
    for pattern in config.targets:
        matches = [
            path for path in shapes if is_found(_PATH_ENDS.format(pattern), path)
        ]
        found = {path: kernels[path] for path in matches if path in kernels}
        targets |= found
        if not found:
            why = "finds no parameter"
            if matches:
                why = f"{matches[0]}: {shapes[matches[0]]}"
            legal = ", ".join(list(kernels)[:8]) or "none"
            faults.append(
                f"lora.targets: {pattern!r}: {why}; kernels that adapters fit: {legal}"
            )
    if faults:
        raise ConfigError(faults)
    return targets


def _check_dropout(targets: Mapping[str, Shape], staged: bool) -> None:
    """Checks that the inputs of all adapters can be dropped.

    Raises:
      ConfigError: a target is of experts, or not in a stack of blocks.
    """
    for path in sorted(targets):
        if targets[path].lead:
            raise ConfigError(
                f"lora.dropout: {path} is of experts, to which A B is added before they read anything; set "
                "lora.dropout=0, or name other lora.targets"
            )
    for path in sorted(targets):
        if not (staged and in_stack(path)):
            raise ConfigError(
                f"lora.dropout: {path} is not in a stack of blocks, which drops the same on every layout; "
                "set lora.dropout=0, or name other lora.targets"
            )


def kernels(model: Any) -> dict[str, LoraKernel]:
    """Finds the `LoraKernel`s of a model, which may be abstract, by path."""
    return {
        trees.SEPARATOR.join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, LoraKernel)
    }


def is_factor(path: str) -> bool:
    """Checks whether a path is that of an adapter's A or B."""
    return path.rpartition(trees.SEPARATOR)[2] in ("lora_a", "lora_b")


def unadapted(
    model: Any, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Any]
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Views a model with adapters as one without: they are merged into the kernels.

    Args:
      model: the model with adapters; may be abstract.
      shapes: shapes of its parameters, by path.
      read: reads a parameter by its path.

    Returns:
      Shapes of the parameters without adapters, and a function that reads them.
    """
    splits = {path: nnx.split(module) for path, module in kernels(model).items()}
    plain = {
        path: dims
        for path, dims in shapes.items()
        if path.rpartition("/")[0] not in splits
    }
    programs = {}
    for path, (graph, state) in splits.items():
        programs[path] = jax.jit(partial(_merge_kernel, graph))
        plain[path] = jax.eval_shape(programs[path], state).shape

    def read_merged(path: str) -> Any:
        if path not in splits:
            return read(path)
        _, abstract = splits[path]
        values = {name: read(f"{path}/{name}") for name in nnx.to_pure_dict(abstract)}
        return jax.device_get(programs[path](nnx.State(values)))

    return plain, read_merged


def _merge_kernel(
    graph: nnx.GraphDef[LoraKernel], state: nnx.State[Any, Any]
) -> jax.Array:
    return nnx.merge(graph, state).merged()


# Number of weights that an element of an array stands for, by the array's name; 1 for
# others. A byte of nf4 holds two codes.
_WEIGHTS_PER_ELEMENT: dict[Base, dict[str, int]] = {
    "none": {},
    "int8": {"scales": 0},
    "nf4": {"scales": 0, "codes": 2},
}


def weights_in(path: str, size: int, config: LoraConfig) -> int:
    """Counts the weights that an array of `size` elements stands for.

    An element of a quantised kernel may hold several weights, or none.
    """
    per_element = _WEIGHTS_PER_ELEMENT[config.base]
    return per_element.get(path.rpartition(trees.SEPARATOR)[2], 1) * size


def weights(frozen: Any, config: LoraConfig) -> dict[str, int]:
    """Counts the weights that each frozen array stands for, by path."""
    return {
        path: weights_in(path, leaf.size, config)
        for path, leaf in trees.flatten_names(frozen).items()
    }


def summary(trainable: Any, frozen: Any, config: LoraConfig, params: str) -> str:
    """Summarises the trained and the frozen parameters.

    Args:
      trainable: abstract parameters.
      frozen: abstract parameters.
      config: settings of the adapters.
      params: `precision.params`, the dtype that they are stored in.
    """
    trainable = as_stored(trainable, params)
    frozen = as_stored(frozen, params)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    base = sum(weights(frozen, config).values())
    share = 100 * adapters / (adapters + base)
    kind = "as it is" if config.base == "none" else config.base
    return (
        f"trainable {adapters:,} of {adapters + base:,} parameters ({share:.2g} %), adapters "
        f"{trees.tree_bytes(trainable):,} bytes, base {trees.tree_bytes(frozen):,} bytes ({kind})"
    )
