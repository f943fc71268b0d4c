"""From logical names to shardings: one rule table, for parameters and for activations.

A model names its dims; `Rules` turns names into PartitionSpecs for a mesh of given
sizes. Four uses of a parameter have a spec each: stored, computed with (fsdp gathered),
its gradient, its optimizer state; `mesh.zero` says which of them the fsdp axis shards
(ZeRO, arXiv:1910.02054). While a step is traced inside `activate(mesh, rules)`, `shard`
constrains activations by name. Outside it does nothing, so a model stays single-device
code.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxdist.parallel.axes import BATCH_AXES, PARAMETER_SHARDS, SEQUENCE_AXES, STEP_AXES
from jaxdist.parallel.context import AttentionForm
from jaxdist.parallel.mesh import MeshConfig, MeshShape
from jaxdist.protocols.param_names import FSDP_NAME, PARAMETER_AXES, STACKS, Names


@dataclass(frozen=True)
class Rules:
    """The rule table for one mesh; all methods take logical names of the
    trailing dims.
    """

    shape: MeshShape
    zero: int = 3
    sequence_parallel: bool = False
    vocab_over_stages: bool = True  # a pipeline's stages share out the vocabulary
    attention: AttentionForm = "auto"  # over a split sequence
    shards: tuple[str, ...] = PARAMETER_SHARDS  # axes that share out stored parameters

    def inside(self, axes: Sequence[str]) -> Rules:
        """Returns the rules in a region manual over mesh axes, where every array is a
        device's part.
        """
        ones = dict.fromkeys(axes, 1)
        return dataclasses.replace(
            self,
            shape=MeshShape({**self.shape.sizes, **ones}, {**self.shape.dcn, **ones}),
        )

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Returns the axes in use that split samples, and neither parameters nor
        gradients.

        They are `data`, and `fsdp` at ZeRO 0 and 1: what is summed over them can be
        summed once a step.
        """
        whole = STEP_AXES
        if self.zero < 2:
            whole = (*whole, "fsdp")
        return tuple(
            axis for axis in BATCH_AXES if axis in whole and self.shape.sizes[axis] > 1
        )

    def stored(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter at rest."""
        return self._parameter(names, dims, fsdp=self.zero >= 3)

    def computed(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter in use: fsdp gathered, tensor still split."""
        return self._parameter(names, dims, fsdp=False)

    def gradient(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter's gradient."""
        return self._parameter(names, dims, fsdp=self.zero >= 2)

    def state(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of a parameter's optimizer state and moving average."""
        return self._parameter(names, dims, fsdp=self.zero >= 1)

    def shard_dims(self, spec: P, dims: Sequence[int]) -> tuple[int, ...]:
        """Returns the dims of one device's shard of an array; the spec may leave out
        trailing ones.
        """
        sizes = [self._size(axes_in(entry)) for entry in spec]
        return tuple(
            dim // size for dim, size in itertools.zip_longest(dims, sizes, fillvalue=1)
        )

    def activation(self, names: Names, dims: Sequence[int]) -> P:
        """Returns the spec of an activation; axes that don't divide a dim are
        left out.
        """
        axes: dict[str | None, tuple[str, ...]] = {
            n: (a,) for n, a in PARAMETER_AXES.items()
        }
        axes |= {
            "batch": BATCH_AXES,
            "sequence": SEQUENCE_AXES,
            "tokens": (*BATCH_AXES, *SEQUENCE_AXES),
        }
        # Where a table is split by width, so are its rows: a part of all samples of an
        # fsdp group.
        axes["batch_of_group"] = tuple(a for a in BATCH_AXES if a not in self.shards)
        axes["width"] = self.shards
        axes["width_of_part"] = tuple(a for a in self.shards if a not in SEQUENCE_AXES)
        axes["vocab_of_part"] = ("tensor", *SEQUENCE_AXES)
        axes["residual"] = SEQUENCE_AXES
        if self.sequence_parallel:
            axes["residual"] = (*SEQUENCE_AXES, "tensor")
        return P(
            *(
                self._entry(axes.get(n, ()), d, partly=True)
                for n, d in zip(names, dims, strict=True)
            )
        )

    def _entry(
        self, axes: Sequence[str], dim: int, *, partly: bool = False
    ) -> str | tuple[str, ...] | None:
        """Returns the axes that split a dim: all of them or none; partly: as many as
        divide it.
        """
        used = tuple(axis for axis in axes if self.shape.sizes[axis] > 1)
        while dim % self._size(used):
            used = used[:-1] if partly else ()
        return used if len(used) > 1 else next(iter(used), None)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.shape.sizes[axis] for axis in axes)

    def _parameter(self, names: Names, dims: Sequence[int], *, fsdp: bool) -> P:
        names = _padded(names, dims)
        spec: list[Any] = [
            self._entry(self._axes_of(n), d) for n, d in zip(names, dims, strict=True)
        ]
        over = self.shard_axes(names)
        if fsdp and over:
            dim = self._fsdp_dim(names, dims, spec, self._size(over))
            if dim is not None:
                spec[dim] = over if len(over) > 1 else over[0]
        return P(*spec)

    def shard_axes(self, names: Names) -> tuple[str, ...]:
        """Returns the axes in use that share out a stored parameter; that of experts
        fsdp alone.

        So what all devices of `expert` and `context` compute with is held once among
        them, not once on each.
        """
        axes = ("fsdp",) if "experts" in names else self.shards
        return tuple(axis for axis in axes if self.shape.sizes[axis] > 1)

    def _axes_of(self, name: str | None) -> tuple[str, ...]:
        axes = []
        if name == "stages" or (name == "vocab" and self.vocab_over_stages):
            axes.append("pipeline")
        if name in PARAMETER_AXES:
            axes.append(PARAMETER_AXES[name])
        return tuple(axes)

    def _fsdp_dim(
        self, names: Names, dims: Sequence[int], spec: Sequence, shards: int
    ) -> int | None:
        """Returns the dim that is stored in shards: d_model, or else the largest that
        divides.
        """
        if is_vector(names, dims):  # gathering it costs more than keeping it
            return None
        if FSDP_NAME in names:
            dim = names.index(FSDP_NAME)
            return dim if dims[dim] % shards == 0 else None
        free = [
            i
            for i in _own_dims(names, dims)
            if spec[i] is None and dims[i] % shards == 0
        ]
        return max(free, key=lambda i: dims[i], default=None)

    def faults(self, path: str, names: Names, dims: Sequence[int]) -> list[str]:
        """Explains why this parameter can't be laid out, naming the dim, axis and legal
        sizes.
        """
        names = _padded(names, dims)
        faults = []
        for name, dim in zip(names, dims, strict=True):
            axes = tuple(
                axis for axis in self._axes_of(name) if self.shape.sizes[axis] > 1
            )
            size = self._size(axes)
            if dim % size and not (name == "kv_heads" and size % dim == 0):
                faults.append(
                    _divisibility(path, str(name), dim, " x mesh.".join(axes), size)
                )
        over = self.shard_axes(names)
        vector = is_vector(names, dims)
        shards = self._size(over)
        if (
            self.zero
            and FSDP_NAME in names
            and not vector
            and (dim := dims[names.index(FSDP_NAME)]) % shards
        ):
            faults.append(
                _divisibility(path, FSDP_NAME, dim, " x mesh.".join(over), shards)
            )
        return faults

    def why(self, names: Names, dims: Sequence[int]) -> str:
        """Explains why a parameter is not split further ("" if it is split by all it
        can).
        """
        sizes = self.shape.sizes
        named = any(names)
        names = _padded(names, dims)
        over = self.shard_axes(names)
        reasons = []
        if (over or sizes["tensor"] > 1) and not is_vector(names, dims) and not named:
            reasons.append(
                "no names: fsdp takes the largest dim that divides, tensor none"
            )
        for name, dim in zip(names, dims, strict=True):
            if name == "kv_heads" and sizes["tensor"] > 1 and dim % sizes["tensor"]:
                reasons.append(f"{dim} kv heads < tensor {sizes['tensor']}: copied")
        if over:
            if is_vector(names, dims):
                reasons.append("a vector: gathering costs more than keeping")
            elif self.zero < 3:
                reasons.append(f"zero {self.zero} keeps parameters whole")
            elif not any(
                set(over) <= {*axes_in(entry)} for entry in self.stored(names, dims)
            ):
                reasons.append(
                    f"no dim divides by {' x '.join(f'{axis} {sizes[axis]}' for axis in over)}"
                )
        if sizes["data"] > 1:
            reasons.append(f"data {sizes['data']} replicates")
        return "; ".join(reasons)


def _padded(names: Names, dims: Sequence[int]) -> Names:
    """Returns names for all dims: missing leading ones are stack dims, none at all are
    unknown.
    """
    if not names:
        return (None,) * len(dims)
    if len(names) > len(dims):
        raise ValueError(
            f"{len(names)} logical names {names} for {len(dims)} dims {tuple(dims)}"
        )
    return ("",) * (len(dims) - len(names)) + tuple(names)


def is_vector(names: Names, dims: Sequence[int]) -> bool:
    """Checks whether a parameter is a norm's scale, a bias or the like, each layer's
    by itself.
    """
    return len(_own_dims(_padded(names, dims), dims)) < 2


def _own_dims(names: Names, dims: Sequence[int]) -> list[int]:
    """Returns the dims but stack dims; head_dim counts with its heads (their bias is a
    vector).
    """
    return [i for i in range(len(dims)) if names[i] not in (*STACKS, "head_dim")]


def _divisibility(path: str, name: str | None, dim: int, axis: str, size: int) -> str:
    lower = dim // size * size
    upper = -(-dim // size) * size
    legal = f"{lower} or {upper}" if lower else f"{upper}"
    divisors = [n for n in range(1, size + 1) if dim % n == 0]
    return (
        f"{path}: dim {name}={dim} is not divisible by mesh.{axis}={size}; "
        f"nearest legal {name}: {legal}; or set mesh.{axis} to {divisors[-1]}"
    )


def build_rules(
    config: MeshConfig,
    shape: MeshShape,
    *,
    vocab_over_stages: bool = True,
    attention: AttentionForm = "auto",
) -> Rules:
    """Returns the rule table for a resolved mesh."""
    return Rules(
        shape, config.zero, config.sequence_parallel, vocab_over_stages, attention
    )


def axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
