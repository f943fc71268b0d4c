"""LoRA: a frozen model whose kernels W are read as W + alpha / rank x A B; only A and B
are trained.

`adapted` changes how a model is built: each matrix in it becomes a `LoraKernel`, which
stands where the parameter stood. Layers that multiply with `ops.matmul.project` (ours
do) get x W + (x A) B, and never a copy of W: a quantised one (QLoRA) is gathered from
its shards as it is stored, and restored layer by layer. Other layers read
`kernel[...]`, which is W + alpha / rank x A B of the layers at hand, as `ops.experts`
does: each expert has an A and a B, and they are added up in the shards that W is stored
in. qwix adapts the modules it sees called, so none in a scan; A and B are therefore
made here, in stacks like W's, and qwix does the quantising. Sources: LoRA
(arXiv:2106.09685), QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from jaxdist.models import layers
from jaxdist.ops.dense_matmul import FrozenKernel
from jaxdist.ops.matmul import project, project_lightly
from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model import BlockInfo, is_staged
from jaxdist.protocols.param_names import Names, in_stack

Base = Literal["none", "int8", "nf4"]
Build = Callable[[nnx.Rngs], Any]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen model."""

    rank: NonNegativeInt = 0  # columns of A, rows of B; 0 = no adapters, all is trained
    alpha: PositiveFloat = 16.0  # kernels act as W + alpha / rank x A B
    # regexes of how paths of kernels end: query, mlp/.*
    targets: tuple[str, ...] = (".*",)
    # how kernels of blocks are stored: none = as they are, int8, nf4 (half a byte)
    base: Base = "none"
    dropout: Share = 0.0  # share of an adapter's inputs that are dropped while training
    # folder of an adapter that PEFT wrote, to begin with; "" = B is 0
    from_peft: Annotated[str, NamesWeights()] = ""

    def faults(self) -> Iterator[str]:
        """Yields what is wrong between the values, each with its cure."""
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"lora.targets: {pattern!r} is no regex: {error}"
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
    """What stands for a kernel [*stack, *inputs, *outputs]: its frozen value, and
    perhaps A and B.

    Experts, [*stack, E, *inputs, *outputs], each have an A and a B of their own.
    """

    # of the block that runs: `protocols.model.run_blocks` sets it
    block_info: BlockInfo | None = None

    def __init__(self, kernel: nnx.Param, shape: Shape, config: LoraConfig) -> None:
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
            make = extras.load("jaxdist.models.lora_quantization").form_of
            self.form = make(
                config.base, shape.names, shape.dims, shape.contract, shape.path
            )
            names.append((*shape.lead, *self.form.scale_names(shape.names)))
        for part, name, value in zip(
            self.parts, names, self._stored(kernel[...]), strict=True
        ):
            setattr(self, part, nnx.Param(value, logical=name, trainable=False))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parameters that W is kept in."""
        return ("codes", "scales") if self.form else ("base",)

    @property
    def logical(self) -> Names:
        """The logical names of W's own dims: what W is kept in has them first."""
        return getattr(getattr(self, self.parts[0]), "logical", ())

    def _stored(self, kernel: jax.Array) -> tuple[jax.Array, ...]:
        return self.form.store(kernel) if self.form else (kernel,)

    def set_kernel(self, kernel: jax.Array | tuple[jax.Array, ...]) -> None:
        """Gives it another W: a kernel, or what `stored` gave of one."""
        values = kernel if isinstance(kernel, tuple) else self._stored(kernel)
        for part, value in zip(self.parts, values, strict=True):
            getattr(self, part).set_value(value)

    def add_low_rank(self, shape: Shape, rank: int, rngs: nnx.Rngs) -> None:
        """Gives it A ~ U(-1, 1) / sqrt(inputs), as PEFT does, and B = 0: at first
        nothing changes.
        """
        inputs = shape.dims[: shape.contract]
        outputs = shape.dims[shape.contract :]
        bound = math.prod(inputs) ** -0.5
        a = jax.random.uniform(
            rngs.params(), (*shape.stack, *inputs, rank), minval=-bound, maxval=bound
        )
        b = jnp.zeros((*shape.stack, rank, *outputs))
        before = shape.names[: shape.contract]
        after = shape.names[shape.contract :]
        self.lora_a = nnx.Param(
            a, logical=(*shape.lead, *before, None) if before else ()
        )
        self.lora_b = nnx.Param(b, logical=(*shape.lead, None, *after) if after else ())

    def frozen(self) -> FrozenKernel:
        """Returns W as `project` takes it."""
        parts = [getattr(self, part) for part in self.parts]
        restored = (self.form.restore,) if self.form else ()
        return FrozenKernel(
            tuple(p[...] for p in parts), tuple(p.logical for p in parts), *restored
        )

    def apply_adapter(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Returns x W + alpha / rank x (x A) B for y = x W; what A reads of x is
        dropped in part.
        """
        if not hasattr(self, "lora_a"):
            return y
        if self.dropout and self.block_info:
            x = layers.dropout(
                x, self.dropout, self.block_info, self.site, self.input_dims
            )
        (low,) = project(x, self.lora_a, contract=self.contract)
        return y + project_lightly(low * self.scaling, self.lora_b)

    def merged(self) -> jax.Array:
        """Returns W + alpha / rank x A B in float32, laid out as W is stored."""
        stored = self.frozen()
        kernel = stored.restored(*stored.parts).astype(jnp.float32)
        if hasattr(self, "lora_a"):
            product = jnp.tensordot
            for _ in range(self.lora_a.ndim - self.contract - 1):
                product = jax.vmap(product, in_axes=(0, 0, None))
            kernel = kernel + self.scaling * product(
                self.lora_a[...], self.lora_b[...], 1
            )
        return execution.current().lay_out(kernel, Rules.stored, self.logical)

    def __getitem__(self, index) -> jax.Array:
        """Reads the kernel for a layer that does not multiply with `project`.
        Raises ConfigError with lora.dropout: there is no input to drop from."""
        if self.dropout and hasattr(self, "lora_a"):
            raise ConfigError(
                "lora.dropout: a layer reads its whole kernel, instead of multiplying with "
                "jaxdist.ops.matmul.project; set lora.dropout=0, or name other lora.targets"
            )
        return self.merged()[index]


@dataclass(frozen=True)
class Shape:
    """The dims of a kernel, told apart."""

    path: str
    names: Names
    stack: tuple[int, ...]  # dims before the kernel's own: of layers, and of experts
    dims: tuple[int, ...]  # its own
    contract: int  # how many of its own dims are inputs
    lead: Names = ()  # names of stack dims that devices may share out: experts


def shape_of(path: str, kernel: nnx.Param) -> Shape | str:
    """Returns the dims of a parameter that is a matrix, or why it gets no adapter.

    Heads and head_dim are one dim. Without names a parameter under `blocks` has one
    stack dim.
    """
    names: Names = tuple(kernel.get_metadata().get("logical") or ())
    lead: Names = ("experts",) if names[:1] == ("experts",) else ()
    names = names[len(lead) :]
    rank = len(names) if names else kernel.ndim - in_stack(path)
    if (
        "vocab" in names
        or "positions" in names
        or (not names and "embed" in path.lower())
    ):
        return "rows of a table are looked up, not multiplied; train it in full, or leave it frozen"
    contract = 2 if names[1:2] == ("head_dim",) else 1
    if rank - contract - (names[-1:] == ("head_dim",)) != 1 or not jnp.issubdtype(
        kernel.dtype, jnp.floating
    ):
        return "it is no matrix"
    dims = tuple(kernel.shape)
    stacks = kernel.ndim - rank
    return Shape(path, names, dims[:stacks], dims[stacks:], contract, lead)


def adapted(build: Build, config: LoraConfig) -> Build:
    """Returns `build` of the model with adapters; unchanged with rank 0."""
    return (lambda rngs: adapt(build(rngs), config, rngs)) if config.rank else build


def adapt(model: Any, config: LoraConfig, rngs: nnx.Rngs) -> Any:
    """Returns the model, changed in place: kernels adapted, all that was a parameter
    frozen.

    Raises:
      ConfigError: a target that is no kernel; a kernel that cannot be quantised.
    """
    owners = {
        trees.SEPARATOR.join(map(str, (*path, name))): (module, name)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param)
    }
    shapes = {path: shape_of(path, getattr(*owner)) for path, owner in owners.items()}
    chosen = _chosen(shapes, config)
    outside = sorted(
        path for path in chosen if not (in_stack(path) and is_staged(model))
    )
    merged = sorted(
        path for path in chosen if isinstance(s := shapes[path], Shape) and s.lead
    )
    if config.dropout and merged:
        raise ConfigError(
            f"lora.dropout: {merged[0]} is of experts, to which A B is added before they read anything; set "
            "lora.dropout=0, or name other lora.targets"
        )
    if config.dropout and outside:
        raise ConfigError(
            f"lora.dropout: {outside[0]} is not in a stack of blocks, which drops the same on every layout; "
            "set lora.dropout=0, or name other lora.targets"
        )
    for _, leaf in nnx.iter_graph(model):
        if isinstance(leaf, nnx.Param):
            leaf.set_metadata(trainable=False)
    for path, (owner, name) in owners.items():
        shape = shapes[path]
        quantised = config.base != "none" and in_stack(path)
        if not isinstance(shape, Shape) or not (path in chosen or quantised):
            continue
        new = LoraKernel(getattr(owner, name), shape, config)
        setattr(owner, name, new)
        if path in chosen:
            new.add_low_rank(shape, config.rank, rngs)
    return model


def _chosen(shapes: dict[str, Shape | str], config: LoraConfig) -> set[str]:
    """Returns the paths of the kernels that the targets name; ConfigError for one that
    names none.
    """
    kernels = [path for path, shape in shapes.items() if isinstance(shape, Shape)]
    chosen: set[str] = set()
    faults = []
    for pattern in config.targets:
        hits = [path for path in shapes if re.search(rf"(^|/)({pattern})$", path)]
        fitting = set(hits) & set(kernels)
        chosen |= fitting
        if not fitting:
            why = f"{hits[0]}: {shapes[hits[0]]}" if hits else "finds no parameter"
            legal = ", ".join(kernels[:8]) or "none"
            faults.append(
                f"lora.targets: {pattern!r}: {why}; kernels that adapters fit: {legal}"
            )
    if faults:
        raise ConfigError(faults)
    return chosen


def kernels(model: Any) -> dict[str, LoraKernel]:
    """Finds the modules that stand for kernels in a (perhaps abstract) model, by the kernels'
    paths.
    """
    modules = {
        trees.SEPARATOR.join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
    }
    return {
        path: module
        for path, module in modules.items()
        if isinstance(module, LoraKernel)
    }


def unadapted(
    model: Any, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Any]
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Returns shapes and a reader of the model's parameters without adapters: these are
    merged in.

    Args:
      model: may be abstract.
      shapes: of the parameters with adapters by path, of which `read` gives each.
    """
    splits = {path: nnx.split(module) for path, module in kernels(model).items()}
    plain = {
        path: dims
        for path, dims in shapes.items()
        if path.rpartition("/")[0] not in splits
    }
    programs = {}
    for path, (graph, state) in splits.items():
        programs[path] = jax.jit(
            lambda state, graph=graph: nnx.merge(graph, state).merged()
        )
        plain[path] = jax.eval_shape(programs[path], state).shape

    def read_merged(path: str) -> Any:
        if path not in splits:
            return read(path)
        names = nnx.to_pure_dict(splits[path][1])
        return jax.device_get(
            programs[path](nnx.State({name: read(f"{path}/{name}") for name in names}))
        )

    return plain, read_merged


def weights(frozen: Any, config: LoraConfig) -> dict[str, int]:
    """Counts how many weights each frozen array stands for: a byte of nf4 for two,
    scales for none.
    """
    each = {"none": {}, "int8": {"scales": 0}, "nf4": {"scales": 0, "codes": 2}}[
        config.base
    ]
    return {
        path: each.get(path.rpartition(trees.SEPARATOR)[2], 1) * leaf.size
        for path, leaf in trees.flatten_names(frozen).items()
    }


def summary(trainable: Any, frozen: Any, config: LoraConfig) -> str:
    """Summarises how much is trained and how much is frozen, of (abstract)
    parameters.
    """
    adapters = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    base = sum(weights(frozen, config).values())
    share = 100 * adapters / (adapters + base)
    kind = "as it is" if config.base == "none" else config.base
    return (
        f"trainable {adapters:,} of {adapters + base:,} parameters ({share:.2g} %), adapters "
        f"{trees.tree_bytes(trainable):,} bytes, base {trees.tree_bytes(frozen):,} bytes ({kind})"
    )
