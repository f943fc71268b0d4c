"""Tensors of a Hugging Face folder, read slice by slice into the shardings of our
parameters.

Each process reads the bytes of its own devices' shards, and each distinct shard once.
Beside the arrays themselves the host holds one shard of one parameter, and the piece of
one tensor in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdist.config import ConfigError
from jaxdist.interop.families import Family, Shapes, Stored, TensorPart
from jaxdist.interop.hf_config import canonical_values, derive, read_config
from jaxdist.models.model_values import differing_values, without_stretch
from jaxdist.storage.untrusted import Malformed, of_kind, open_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16")
_ALIGNED = 64  # bytes
_CHECKED = 1 << 16  # values at a time, which stay in the processor's cache
_SHOWN = 12  # faults of a kind that are spelt out
_Index = tuple[slice, ...]


def open_weights(
    folder: Path | str, values: Mapping[str, Any], shapes: Shapes
) -> Tensors:
    """Returns the tensors of a folder for a transformer of these values, with
    parameters of these shapes.

    Raises:
      ConfigError: the folder's model is another one, or its files are not complete.
    """
    family, theirs = derive(read_config(folder))
    ours = canonical_values(values)
    faults = differing_values(ours, without_stretch(theirs, ours))
    if faults:
        raise ConfigError(
            f"{folder} holds another model than the config: {fault}" for fault in faults
        )
    tensors = Tensors(folder, family)
    tensors.check(shapes)
    return tensors


def open_tensors(file: Path) -> Any:
    """Returns an opened safetensors file, whose header has been checked.

    Raises:
      Malformed: there is none, or its header, sizes or offsets are not what they must
        be.
    """
    try:
        open_regular(file).close()
        return safe_open(file, "np")
    except (OSError, SafetensorError) as error:
        raise Malformed(str(error)) from error


class Tensors:
    """The safetensors files of a folder, opened and checked; no tensor is read yet."""

    def __init__(self, folder: Path | str, family: Family) -> None:
        """Opens them.

        Raises:
          ConfigError: files that are missing, cut short or not what the index says.
        """
        self.folder = Path(folder)
        self.family = family
        self.bytes_read = 0
        self._handles: dict[str, Any] = {}  # the table's name -> a tensor's slices
        self._not_finite: set[str] = set()  # names of tensors, of what was read
        faults: list[str] = []
        for file, promised in self._files().items():
            try:
                opened = open_tensors(self.folder / file)
            except Malformed as error:
                faults.append(f"{self.folder / file}: {error}; copy it again")
                continue
            names = set(opened.keys())
            faults += _listed(f"{file} lacks what {INDEX} promises", promised - names)
            faults += _listed(
                f"{file} holds what {INDEX} does not list",
                promised and names - promised,
            )
            self._handles |= {
                family.canonical(name): opened.get_slice(name) for name in names
            }
        if faults:
            raise ConfigError(faults)
        self.family = family.form_of(self._handles)

    def _files(self) -> dict[str, set[str]]:
        """Returns the files, and the tensors that the index says each has."""
        if not (self.folder / INDEX).is_file():
            if (self.folder / SINGLE).is_file():
                return {SINGLE: set()}
            pickled = any(self.folder.glob("*.bin"))
            why = (
                "pickled weights, which are never read;"
                if pickled
                else f"no {SINGLE} or {INDEX};"
            )
            raise ConfigError(
                f"{self.folder}: {why} save it by save_pretrained of transformers"
            )
        try:
            names = of_kind(
                read_json(self.folder / INDEX, dict).get("weight_map"),
                dict,
                "weight_map",
            )
            files: dict[str, set[str]] = {}
            for name, file in names.items():
                files.setdefault(
                    of_kind(file, str, f"weight_map: the file of {name}"), set()
                ).add(name)
        except (FileNotFoundError, Malformed) as error:
            raise ConfigError(
                f"{self.folder / INDEX} cannot be read: {error}"
            ) from error
        away = [file for file in files if Path(file).name != file]
        if away:
            raise ConfigError(
                f"{self.folder / INDEX} names files outside the folder: {', '.join(away)}"
            )
        return files

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each file."""
        return {file: (self.folder / file).stat().st_size for file in self._files()}

    def check(self, shapes: Shapes) -> None:
        """Raises ConfigError unless the tensors are exactly those of parameters with
        these shapes.
        """
        wanted = stored_shapes(self.family, shapes)
        faults = unmapped(self.family, shapes)
        faults += _listed("missing tensors", wanted.keys() - self._handles.keys())
        extra = (
            n
            for n in self._handles.keys() - wanted.keys()
            if not re.search(self.family.ignored, n)
        )
        tied = "embedding" in shapes and "output" not in shapes
        faults += _listed(
            "unexpected tensors",
            (n for n in extra if not (tied and n == "lm_head.weight")),
        )
        for name in sorted(wanted.keys() & self._handles.keys()):
            handle = self._handles[name]
            shape = tuple(handle.get_shape())
            dtype = handle.get_dtype()
            if shape != wanted[name]:
                faults.append(
                    f"{name} has shape {shape}, config.json makes it {wanted[name]}"
                )
            elif dtype not in _DTYPES:
                faults.append(f"{name} is {dtype}; required {', '.join(_DTYPES)}")
        if faults:
            raise ConfigError(f"{self.folder}: {fault}" for fault in faults)

    def load(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        convert: Callable[[str, jax.Array], Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the parameters by path, each in its abstract array's dtype and
        sharding.

        Args:
          convert: makes what is kept of a parameter, given its path, before the next
            one is read.

        Raises:
          ConfigError: see `check`, nothing is read then; or values are not finite.
        """
        shapes = {path: x.shape for path, x in abstract.items()}
        self.check(shapes)
        parameters = {}
        self._not_finite.clear()
        for stored in self.family.present(shapes):
            for part in stored.parts:
                value = self._place(
                    stored, part, stored.offset(part, shapes), abstract[part.path]
                )
                parameters[part.path] = convert(part.path, value) if convert else value
        faults = _listed("tensors with NaN or infinite values", self._not_finite)
        if faults:
            raise ConfigError(
                f"{self.folder}: {fault}; copy or export it again" for fault in faults
            )
        return parameters

    def _place(
        self, stored: Stored, part: TensorPart, offset: int, x: jax.ShapeDtypeStruct
    ) -> jax.Array:
        assert x.sharding is not None, f"{part.path} needs a sharding"
        shards: dict[tuple, list[jax.Device]] = {}
        for device, index in x.sharding.addressable_devices_indices_map(
            x.shape
        ).items():
            ranges = tuple(
                s.indices(n)[:2] for s, n in zip(index or (), x.shape, strict=True)
            )
            shards.setdefault(ranges, []).append(device)
        arrays = []
        for ranges, devices in shards.items():
            block = self._read_shard(stored, part, offset, x, ranges)
            arrays += [jax.device_put(block, device) for device in devices]
            jax.block_until_ready(arrays)  # the block may go before the next is made
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)

    def _read_shard(self, stored, part, offset, x, ranges) -> np.ndarray:
        """Returns one shard, of all its layers and experts."""
        block = _empty([stop - start for start, stop in ranges], x.dtype)
        dims = part.dims(x.shape)
        inner = dict(zip(part.ours, ranges[part.stacked :], strict=True))
        runs = [_runs(group, dims, inner) for group in part.theirs]
        runs[stored.axis] = [
            slice(run.start + offset, run.stop + offset) for run in runs[stored.axis]
        ]
        order = "".join(part.theirs)
        for at, name in stored.names(ranges).items():
            merged = self._read_runs(self._handles[name], runs)
            if not all_finite(merged):
                self._not_finite.add(name)
            apart = merged.reshape(
                [inner[letter][1] - inner[letter][0] for letter in order]
            )
            block[at] = apart.transpose([order.index(letter) for letter in part.ours])
        return block

    def _read_runs(
        self, tensor: Any, runs: Sequence[Sequence[slice]], before: _Index = ()
    ) -> np.ndarray:
        """Returns the pieces of a tensor, for all combinations of runs of its dims, as
        one array.

        Args:
          before: the run of each dim before these.
        """
        if not runs:
            piece = tensor[before]
            self.bytes_read += piece.nbytes
            return piece
        pieces = [self._read_runs(tensor, runs[1:], (*before, run)) for run in runs[0]]
        return np.concatenate(pieces, len(before)) if len(pieces) > 1 else pieces[0]


def all_finite(values: np.ndarray) -> bool:
    """Checks whether no float is NaN or infinite: then all bits of its exponent are
    set.

    numpy's own isfinite takes six times as long for bfloat16, and memory for as many
    booleans.
    """
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    exponent = np.array(np.inf, values.dtype).view(bits.dtype)
    parts = (bits[start : start + _CHECKED] for start in range(0, bits.size, _CHECKED))
    return not any(((part & exponent) == exponent).any() for part in parts)


def _empty(dims: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array at an address that jax's CPU arrays can keep: others
    are copied.
    """
    size = math.prod(dims) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(dims)


def _runs(
    group: str, dims: Mapping[str, int], where: Mapping[str, tuple[int, int]]
) -> list[slice]:
    """Returns the ranges of a merged dim that hold the chosen range of each of its
    letters.
    """
    runs = [(0, 1)]
    for letter in group:
        size = dims[letter]
        chosen = where[letter]
        if chosen == (0, size):
            runs = [(start * size, stop * size) for start, stop in runs]
        else:
            runs = [
                (i * size + chosen[0], i * size + chosen[1])
                for run in runs
                for i in range(*run)
            ]
    return [slice(*run) for run in runs]


def stored_shapes(family: Family, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor of a model whose parameters have these
    shapes.
    """
    return {
        name: stored.shape(shapes)
        for stored in family.present(shapes)
        for name in stored.all_names(shapes)
    }


def unmapped(family: Family, shapes: Shapes) -> list[str]:
    """Returns a fault if the family has no tensor for some of our parameters."""
    known = {part.path for stored in family.present(shapes) for part in stored.parts}
    return _listed(
        f"{family.model_type} has no tensor for the parameters", shapes.keys() - known
    )


def _listed(what: str, names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return [f"{what}: {', '.join(ordered[:_SHOWN])}{more}"] if ordered else []
