"""Sharding rules: PartitionSpecs of parameters and activations from logical names.

A model names its dims. `Rules` turns the names into PartitionSpecs for a mesh of given
sizes. A parameter has four specs: as it is stored, as it is computed with (gathered
over fsdp), of its gradient, and of its optimizer state. `mesh.zero` selects those that
the fsdp axis shards (ZeRO, arXiv:1910.02054).

While a step is traced inside `execution.activate(mesh, rules)`, `execution.shard`
constrains activations by their names. Outside it does nothing, so a model stays
single-device code.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, suggest
from jaxdist.parallel.axes import (
    AXES,
    BATCH_AXES,
    PARAMETER_SHARDS,
    SEQUENCE_AXES,
    STEP_AXES,
)
from jaxdist.parallel.context import AttentionForm
from jaxdist.parallel.mesh import MeshConfig, MeshShape
from jaxdist.protocols.dim_names import (
    DIM_NAMES,
    FSDP_NAME,
    PARAMETER_AXES,
    STACKS,
    Names,
)


@dataclass(frozen=True)
class Rules:
    """The sharding rules of a mesh; methods take logical names of an array's dims.

    Names of parameters may lack the leading stack dims.
    """

    shape: MeshShape
    zero: int = 3  # what fsdp shards, see `MeshConfig`
    sequence_parallel: bool = False
    vocab_over_stages: bool = True  # the stages of a pipeline split the vocabulary
    attention: AttentionForm = "auto"  # form of attention over a split sequence
    shards: tuple[str, ...] = PARAMETER_SHARDS  # axes that split stored parameters

    def inside(self, axes: Sequence[str]) -> Rules:
        """Adapts the rules to a region that is manual over mesh axes.

        Every array is a device's part there, so these axes have size 1.
        """
        ones = dict.fromkeys(axes, 1)
        sizes = {**self.shape.sizes, **ones}
        dcn = {**self.shape.dcn, **ones}
        return dataclasses.replace(self, shape=MeshShape(sizes, dcn))

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes in use that split samples, but neither parameters nor gradients.

        They are `data`, and `fsdp` at ZeRO 0 and 1. Sums over them can wait for the end
        of a step.
        """
        replicas = STEP_AXES
        if self.zero < 2:
            replicas = (*replicas, "fsdp")
        return self._in_use([axis for axis in BATCH_AXES if axis in replicas])

    def stored(self, names: Names, dims: Sequence[int]) -> P:
        """Computes the spec of a stored parameter."""
        return self._parameter(names, dims, fsdp=self.zero >= 3)

    def computed(self, names: Names, dims: Sequence[int]) -> P:
        """Computes the spec of a parameter in use: gathered over fsdp, not tensor."""
        return self._parameter(names, dims, fsdp=False)

    def gradient(self, names: Names, dims: Sequence[int]) -> P:
        """Computes the spec of a parameter's gradient."""
        return self._parameter(names, dims, fsdp=self.zero >= 2)

    def state(self, names: Names, dims: Sequence[int]) -> P:
        """Computes the spec of a parameter's optimizer state and moving average."""
        return self._parameter(names, dims, fsdp=self.zero >= 1)

    def way_to_whole_matrices(
        self, names: Names, dims: Sequence[int], matrix_dims: int
    ) -> list[P]:
        """Computes specs on the way to whole matrices, divided among the devices.

        The first spec is that of the optimizer's state. From one to the next, the axes
        of a matrix dim move to a stack dim, which XLA does by one all-to-all. Finally,
        axes that replicate split a stack dim, too. Those that cross slices do not: each
        slice computes the same matrices.

        A stack dim that no axis splits at first may be split unevenly, and is padded
        then. A device with a single matrix splits it no further: axes stay in the
        matrix dims.

        Args:
          names: logical names.
          dims: of the stack, with the dims of a matrix last.
          matrix_dims: number of dims of one matrix.
        """
        entries = [axes_in(entry) for entry in self.state(names, dims)]
        stack_dims = range(len(dims) - matrix_dims)
        # Padding a dim that an axis splits would move data between devices.
        may_grow = [not entries[dim] for dim in stack_dims]
        taken = {axis for entry in entries for axis in entry}

        def dim_for(axes: Sequence[str]) -> int | None:
            """Selects the stack dim of which a device has most, if one can be split."""
            held = [-(-dims[dim] // self._size(entries[dim])) for dim in stack_dims]
            even = [dim for dim in stack_dims if held[dim] % self._size(axes) == 0]
            uneven = [dim for dim in stack_dims if held[dim] > 1 and may_grow[dim]]
            return max(even or uneven, key=held.__getitem__, default=None)

        way = [P(*map(as_entry, entries))]
        for dim in range(len(stack_dims), len(dims)):
            axes = entries[dim]
            target = dim_for(axes)
            if axes and target is not None:
                entries[dim] = ()
                entries[target] = (*entries[target], *axes)
                way.append(P(*map(as_entry, entries)))
        for axis in self._in_use(AXES):
            target = dim_for([axis])
            if axis in taken or self.shape.dcn[axis] > 1 or target is None:
                continue
            held = -(-dims[target] // self._size(entries[target]))
            if held < self.shape.sizes[axis]:
                # Each device of the axis holds the whole stack at first. Most of it
                # would be padding.
                continue
            entries[target] = (*entries[target], axis)
        return [*way, P(*map(as_entry, entries))]

    def parts(self, spec: P) -> tuple[int, ...]:
        """Counts the parts of each dim of an array with a spec."""
        return tuple(self._size(axes_in(entry)) for entry in spec)

    def shard_dims(self, spec: P, dims: Sequence[int]) -> tuple[int, ...]:
        """Computes the dims of a device's shard.

        Args:
          spec: of the array; entries of trailing dims may be missing.
          dims: of the whole array.
        """
        sizes = self.parts(spec)
        return tuple(
            dim // size for dim, size in itertools.zip_longest(dims, sizes, fillvalue=1)
        )

    def activation(self, names: Names, dims: Sequence[int]) -> P:
        """Computes the spec of an activation.

        Axes that do not divide a dim are dropped, the last ones first.

        Raises:
          ConfigError: a name is unknown.
        """
        axes: dict[str | None, tuple[str, ...]] = {
            name: (axis,) for name, axis in PARAMETER_AXES.items()
        }
        axes |= {
            "batch": BATCH_AXES,
            "sequence": SEQUENCE_AXES,
            "tokens": (*BATCH_AXES, *SEQUENCE_AXES),
        }
        # If a table is split by width, so are the rows that are looked up: a device
        # holds a part of each row, for all samples of its fsdp group.
        axes["batch_of_group"] = tuple(a for a in BATCH_AXES if a not in self.shards)
        axes["width"] = self.shards
        axes["width_of_part"] = tuple(a for a in self.shards if a not in SEQUENCE_AXES)
        axes["vocab_of_part"] = ("tensor", *SEQUENCE_AXES)
        axes["residual"] = SEQUENCE_AXES
        if self.sequence_parallel:
            axes["residual"] = (*SEQUENCE_AXES, "tensor")
        known = list(dict.fromkeys([*map(str, axes), *DIM_NAMES]))
        for name in names:
            if name is not None and name not in known:
                raise ConfigError(
                    f"shard: no dim of an activation is called {name!r}."
                    f"{suggest(name, known)} There are: {', '.join(known)}"
                )
        entries = [
            self._entry(axes.get(name, ()), dim, partly=True)
            for name, dim in zip(names, dims, strict=True)
        ]
        return P(*entries)

    def _entry(
        self, axes: Sequence[str], dim: int, *, partly: bool = False
    ) -> str | tuple[str, ...] | None:
        """Selects the axes that split a dim: all, or none if they do not divide it.

        Args:
          axes: candidates, of any size.
          dim: size of the dim.
          partly: drop the last axes until the others divide the dim.

        Returns:
          An entry of a PartitionSpec.
        """
        used = self._in_use(axes)
        while dim % self._size(used):
            used = used[:-1] if partly else ()
        return as_entry(used)

    def _in_use(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Selects the axes of more than one device."""
        return tuple(axis for axis in axes if self.shape.sizes[axis] > 1)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.shape.sizes[axis] for axis in axes)

    def _parameter(self, names: Names, dims: Sequence[int], *, fsdp: bool) -> P:
        """Computes the spec of a parameter.

        Args:
          names: logical names.
          dims: of the parameter.
          fsdp: whether `shard_axes` split it, too.
        """
        names = _with_stack_names(names, dims)
        spec: list[Any] = [
            self._entry(self._axes_of(name), dim)
            for name, dim in zip(names, dims, strict=True)
        ]
        axes = self.shard_axes(names)
        if fsdp and axes:
            dim = self._fsdp_dim(names, dims, spec, self._size(axes))
            if dim is not None:
                spec[dim] = as_entry(axes)
        return P(*spec)

    def shard_axes(self, names: Names) -> tuple[str, ...]:
        """Lists the axes in use that split a stored parameter.

        They are fsdp, expert and context, because devices of expert and context compute
        with the same parameters. Kernels of experts are split by fsdp alone.
        """
        axes = ("fsdp",) if "experts" in names else self.shards
        return self._in_use(axes)

    def _axes_of(self, name: str | None) -> tuple[str, ...]:
        """Lists the axes that split a dim of this name wherever a parameter is used."""
        axes = []
        if name == "stages" or (name == "vocab" and self.vocab_over_stages):
            axes.append("pipeline")
        if name in PARAMETER_AXES:
            axes.append(PARAMETER_AXES[name])
        return tuple(axes)

    def _fsdp_dim(
        self, names: Names, dims: Sequence[int], spec: Sequence[Any], shards: int
    ) -> int | None:
        """Selects the dim that is stored in shards.

        It is d_model. Without that name it is the largest free dim that `shards`
        divides.
        """
        if is_vector(names, dims):  # gathering it costs more than keeping it
            return None
        if FSDP_NAME in names:
            dim = names.index(FSDP_NAME)
            return dim if dims[dim] % shards == 0 else None
        free = [
            dim
            for dim in _layer_dims(names, dims)
            if spec[dim] is None and dims[dim] % shards == 0
        ]
        return max(free, key=lambda dim: dims[dim], default=None)

    def faults(self, path: str, names: Names, dims: Sequence[int]) -> list[str]:
        """Lists the dims of a parameter that mesh axes do not divide.

        Args:
          path: of the parameter, for the messages.
          names: logical names.
          dims: of the parameter.

        Returns:
          Messages that name the dim, the axes and legal sizes.
        """
        names = _with_stack_names(names, dims)
        faults = []
        for name, dim in zip(names, dims, strict=True):
            axes = self._in_use(self._axes_of(name))
            size = self._size(axes)
            if dim % size == 0:
                continue
            is_copied = name == "kv_heads" and size % dim == 0
            if not is_copied:
                faults.append(_divisibility_fault(path, str(name), dim, axes, size))
        if not self.zero or FSDP_NAME not in names or is_vector(names, dims):
            return faults
        axes = self.shard_axes(names)
        shards = self._size(axes)
        dim = dims[names.index(FSDP_NAME)]
        if dim % shards:
            faults.append(_divisibility_fault(path, FSDP_NAME, dim, axes, shards))
        return faults

    def why(self, names: Names, dims: Sequence[int]) -> str:
        """Explains why a parameter is not split further; "" if all axes split it."""
        sizes = self.shape.sizes
        tensor = sizes["tensor"]
        has_names = any(names)
        names = _with_stack_names(names, dims)
        axes = self.shard_axes(names)
        vector = is_vector(names, dims)
        reasons = []
        if (axes or tensor > 1) and not vector and not has_names:
            reasons.append(
                "no names: fsdp takes the largest dim that divides, tensor none"
            )
        for name, dim in zip(names, dims, strict=True):
            if name == "kv_heads" and tensor > 1 and dim % tensor:
                reasons.append(f"{dim} kv heads < tensor {tensor}: copied")
        if axes:
            if vector:
                reasons.append("a vector: gathering costs more than keeping")
            elif self.zero < 3:
                reasons.append(f"zero {self.zero} keeps parameters whole")
            elif not self._is_split_by(axes, names, dims):
                product = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
                reasons.append(f"no dim divides by {product}")
        if sizes["data"] > 1:
            reasons.append(f"data {sizes['data']} replicates")
        return "; ".join(reasons)

    def _is_split_by(
        self, axes: Sequence[str], names: Names, dims: Sequence[int]
    ) -> bool:
        """Checks whether all of these axes split one dim of a stored parameter."""
        spec = self.stored(names, dims)
        return any(set(axes) <= set(axes_in(entry)) for entry in spec)


def as_entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Writes axes as an entry of a PartitionSpec: a single axis without a tuple."""
    if not axes:
        return None
    return axes if len(axes) > 1 else axes[0]


def _with_stack_names(names: Names, dims: Sequence[int]) -> Names:
    """Names all dims: missing leading dims are stack dims; without names all are None.

    Raises:
      ValueError: there are more names than dims.
    """
    if not names:
        return (None,) * len(dims)
    if len(names) > len(dims):
        raise ValueError(
            f"{len(names)} logical names {names} for {len(dims)} dims {tuple(dims)}"
        )
    return ("",) * (len(dims) - len(names)) + tuple(names)


def is_vector(names: Names, dims: Sequence[int]) -> bool:
    """Checks whether each layer's part is a vector, as of a norm's scale or a bias."""
    return len(_layer_dims(_with_stack_names(names, dims), dims)) < 2


def _layer_dims(names: Names, dims: Sequence[int]) -> list[int]:
    """Lists the dims that are no stack dims.

    head_dim is left out: it counts with its heads, so that a bias of heads is a vector.
    """
    return [i for i in range(len(dims)) if names[i] not in (*STACKS, "head_dim")]


def _divisibility_fault(
    path: str, name: str, dim: int, axes: Sequence[str], size: int
) -> str:
    lower = dim // size * size
    upper = -(-dim // size) * size
    legal = f"{lower} or {upper}" if lower else f"{upper}"
    # A size that divides this one still divides the number of devices.
    fitting = math.gcd(dim, size)
    key = "mesh." + " x mesh.".join(axes)
    return (
        f"{path}: dim {name}={dim} is not divisible by {key}={size}; "
        f"nearest legal sizes of this dim: {legal}; or set {key} to {fitting}"
    )


def build_rules(
    config: MeshConfig,
    shape: MeshShape,
    *,
    vocab_over_stages: bool = True,
    attention: AttentionForm = "auto",
) -> Rules:
    """Creates the rules of a resolved mesh.

    Args:
      config: options of the mesh.
      shape: its resolved sizes.
      vocab_over_stages: whether the stages of a pipeline split the vocabulary.
      attention: form of attention over a split sequence.
    """
    return Rules(
        shape,
        zero=config.zero,
        sequence_parallel=config.sequence_parallel,
        vocab_over_stages=vocab_over_stages,
        attention=attention,
    )


def axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Lists the axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
