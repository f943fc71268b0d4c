"""Tensors of a Hugging Face folder, read directly into sharded parameters.

Each process reads the shards of its own devices, and each distinct shard once. Besides
the arrays, the host holds one shard of one parameter at a time, and the piece of one
tensor that is copied into it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ConfigError
from jaxdist.interop import block_scales
from jaxdist.interop.families import SCORE, Family, Shapes, Stored, TensorPart
from jaxdist.interop.hf_config import canonical_values, derive, read_config
from jaxdist.interop.tensor_files import all_finite, slices_of
from jaxdist.models.model_values import (
    DEFAULTS,
    differing_values,
    gets_new_head,
    without_changes,
)
from jaxdist.storage.untrusted import Malformed, of_kind, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16")
_ALIGNED = 64  # bytes
_SHOWN = 12  # names that a fault lists
_Index = tuple[slice, ...]
_Ranges = tuple[tuple[int, int], ...]  # (start, stop) of each dim


def open_weights(
    folder: Path | str, values: Mapping[str, Any], shapes: Shapes
) -> Tensors:
    """Opens the tensors of a folder, after a check that they fit the model.

    Args:
      folder: the Hugging Face folder.
      values: the model's config, as fields of TransformerConfig.
      shapes: the shapes of the model's parameters, by path, and those of biases that
        choose experts (`Family.choice_biases`). A score that a folder of a language
        model lacks is left out.

    Raises:
      ConfigError: the folder holds another model, or its files are incomplete.
    """
    family, folder_values = derive(read_config(folder))
    model_values = canonical_values(values)
    faults = differing_values(
        model_values, without_changes(folder_values, model_values)
    )
    if faults:
        raise ConfigError(
            f"{folder} holds another model than the config: {fault}" for fault in faults
        )
    balance = values.get("balance", DEFAULTS["balance"])
    if family.has_choice_bias and balance != "bias":
        raise ConfigError(
            f"{folder}: biases choose the experts of {family.architecture}, and "
            f"model.balance={balance} has none; set model.balance=bias"
        )
    tensors = Tensors(folder, family)
    if gets_new_head(model_values, folder_values):
        tensors.absent = frozenset({SCORE})
    tensors.check(shapes)
    return tensors


class Tensors:
    """The safetensors files of a folder, opened and checked; no tensor is read yet.

    Args:
      folder: the Hugging Face folder.
      family: the architecture of its model.

    Raises:
      ConfigError: files are missing, cut short, or differ from the index.
    """

    def __init__(self, folder: Path | str, family: Family) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        # numbers of layers that predict further tokens and are not read
        self.unread_layers: list[int] = []
        # tensors that the folder need not have: their parameters are not read
        self.absent: frozenset[str] = frozenset()
        self._handles: dict[str, Any] = {}  # slices of a tensor, by the table's name
        self._not_finite: set[str] = set()  # names of tensors with NaN or infinity
        faults: list[str] = []
        for file, listed in self._files().items():
            try:
                slices = slices_of(self.folder / file)
            except Malformed as error:
                faults.append(f"{self.folder / file}: {error}; copy it again")
                continue
            names = slices.keys()
            faults += _listed(f"{file} lacks what {INDEX} promises", listed - names)
            if listed:
                faults += _listed(
                    f"{file} holds what {INDEX} does not list", names - listed
                )
            for name, tensor in slices.items():
                self._handles[family.canonical(name)] = tensor
        if faults:
            raise ConfigError(faults)
        config = read_config(folder)
        if family.extra_layers:
            self._leave_out_layers(config["num_hidden_layers"])
        quantization = config.get("quantization_config")
        self._handles, faults = block_scales.joined(self._handles, quantization)
        if faults:
            raise ConfigError(f"{self.folder}: {fault}" for fault in faults)
        self.family = family.form_of(self._handles)

    def _leave_out_layers(self, first: int) -> None:
        """Drops the tensors of a layer and those behind it."""
        names = [name for name in self._handles if _layer_of(name) >= first]
        for name in names:
            del self._handles[name]
        self.unread_layers = sorted({_layer_of(name) for name in names})

    @property
    def note(self) -> str:
        """A line about layers that are not read; "" if all are."""
        if not self.unread_layers:
            return ""
        numbers = ", ".join(map(str, self.unread_layers))
        return (
            f"{self.folder}: layer {numbers} is not read; "
            "it predicts further tokens (num_nextn_predict_layers)"
        )

    def _files(self) -> dict[str, set[str]]:
        """Lists the files, with the tensors that the index lists for each.

        Without an index there is one file, and its set is empty.
        """
        if not (self.folder / INDEX).is_file():
            if (self.folder / SINGLE).is_file():
                return {SINGLE: set()}
            fault = f"no {SINGLE} or {INDEX};"
            if any(self.folder.glob("*.bin")):
                fault = "pickled weights, which are never read;"
            raise ConfigError(
                f"{self.folder}: {fault} save it by save_pretrained of transformers"
            )
        files: dict[str, set[str]] = {}
        try:
            index = read_json(self.folder / INDEX, dict)
            file_of = of_kind(index.get("weight_map"), dict, "weight_map")
            for name, file in file_of.items():
                of_kind(file, str, f"weight_map: the file of {name}")
                files.setdefault(file, set()).add(name)
        except (FileNotFoundError, Malformed) as error:
            raise ConfigError(
                f"{self.folder / INDEX} cannot be read: {error}"
            ) from error
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ConfigError(
                f"{self.folder / INDEX} names files outside the folder: {', '.join(outside)}"
            )
        return files

    def sizes(self) -> dict[str, int]:
        """Looks up the size of each file in bytes."""
        return {file: (self.folder / file).stat().st_size for file in self._files()}

    def check(self, shapes: Shapes) -> None:
        """Checks that the tensors are exactly those of parameters with these shapes.

        Raises:
          ConfigError: a tensor is missing, unexpected, or has another shape or an
            unsupported dtype; or the family has no tensor for a parameter.
        """
        expected = stored_shapes(self.family, shapes)
        for name in self.absent:
            expected.pop(name, None)
        faults = unmapped(self.family, shapes)
        faults += _listed("missing tensors", expected.keys() - self._handles.keys())
        has_tied_head = "embedding" in shapes and "output" not in shapes
        unexpected = []
        for name in self._handles.keys() - expected.keys():
            is_tied_head = has_tied_head and name == "lm_head.weight"
            is_ignored = re.search(self.family.ignored, name)
            if not is_tied_head and not is_ignored:
                unexpected.append(name)
        faults += _listed("unexpected tensors", unexpected)
        misshapen: list[str] = []
        for name in sorted(expected.keys() & self._handles.keys()):
            handle = self._handles[name]
            shape = tuple(handle.get_shape())
            dtype = handle.get_dtype()
            if shape != expected[name]:
                misshapen.append(
                    f"{name} has shape {shape}, config.json makes it {expected[name]}"
                )
            elif dtype not in _DTYPES:
                faults.append(f"{name} is {dtype}; required {', '.join(_DTYPES)}")
        if len(misshapen) > 1:
            misshapen[0] += f"; {len(misshapen) - 1} more have other shapes, too"
        faults += misshapen[:1]
        if faults:
            raise ConfigError(f"{self.folder}: {fault}" for fault in faults)

    def load(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        convert: Callable[[str, jax.Array], Any] | None = None,
        by_layer: Collection[str] = (),
    ) -> dict[str, Any]:
        """Reads the parameters, each in the dtype and sharding of its abstract array.

        Args:
          abstract: the wanted arrays, by path.
          convert: called with the path and array of each parameter before the next one
            is read; its result is kept in place of the array.
          by_layer: paths of stacks that are read and converted one layer at a time. The
            results are joined. So one layer is in memory before its conversion.

        Returns:
          The parameters by path.

        Raises:
          ConfigError: as in `check`, before anything is read; or a tensor has NaN or
            infinite values.
        """
        shapes = {path: x.shape for path, x in abstract.items()}
        self.check(shapes)
        parameters = {}
        self._not_finite.clear()
        for stored in self.family.present(shapes):
            if stored.name in self.absent:
                continue
            for part in stored.parts:
                offset = stored.offset(part, shapes)
                x = abstract[part.path]
                pieces: Sequence[int | None] = [None]
                if part.stacked and part.path in by_layer:
                    pieces = range(x.shape[0])
                values: list[Any] = []
                for layer in pieces:
                    value: Any = self._place(stored, part, offset, x, layer)
                    if convert:
                        value = convert(part.path, value)
                    values.append(value)
                parameters[part.path] = jax.tree.map(_join_layers, *values)
        faults = _listed("tensors with NaN or infinite values", self._not_finite)
        if faults:
            raise ConfigError(
                f"{self.folder}: {fault}; copy or export it again" for fault in faults
            )
        return parameters

    def _place(
        self,
        stored: Stored,
        part: TensorPart,
        offset: int,
        x: jax.ShapeDtypeStruct,
        layer: int | None = None,
    ) -> jax.Array:
        """Reads a parameter into its shards, and puts them on this process's devices.

        Args:
          stored: the tensor.
          part: the parameter's part of it.
          offset: where the part begins on the tensor's axis.
          x: the wanted array.
          layer: the layer to read, as a stack of one; None: the whole parameter.
        """
        assert x.sharding is not None, f"{part.path} needs a sharding"
        shape = x.shape if layer is None else (1, *x.shape[1:])
        indices = x.sharding.addressable_devices_indices_map(x.shape)
        shards: dict[_Ranges, list[jax.Device]] = {}
        for device, index in indices.items():
            ranges = tuple(
                s.indices(n)[:2] for s, n in zip(index or (), x.shape, strict=True)
            )
            if layer is not None:
                ranges = ((layer, layer + 1), *ranges[1:])
            shards.setdefault(ranges, []).append(device)
        arrays = []
        for ranges, devices in shards.items():
            block = self._read_shard(stored, part, offset, x, ranges)
            arrays += [jax.device_put(block, device) for device in devices]
            # The copies end here, so that the block is freed before the next one.
            jax.block_until_ready(arrays)
        return jax.make_array_from_single_device_arrays(shape, x.sharding, arrays)

    def _read_shard(
        self,
        stored: Stored,
        part: TensorPart,
        offset: int,
        x: jax.ShapeDtypeStruct,
        ranges: _Ranges,
    ) -> np.ndarray:
        """Reads one shard, with all its layers and experts.

        Args:
          stored: the tensor.
          part: the parameter's part of it.
          offset: where the part begins on the tensor's axis.
          x: the wanted array.
          ranges: the shard's range of each dim of the parameter.
        """
        block = _empty([stop - start for start, stop in ranges], x.dtype)
        sizes = part.dim_sizes(x.shape)
        range_of = dict(zip(part.dims, ranges[part.stacked :], strict=True))
        # where the shard's entries of the last dim are in the range that is read
        picked: np.ndarray | None = None
        if part.num_paired:
            last = part.dims[-1]
            places = part.places(sizes[last])[slice(*range_of[last])]
            range_of[last] = (int(places.min()), int(places.max()) + 1)
            picked = places - places.min()
        runs = [_runs(group, sizes, range_of) for group in part.stored_dims]
        runs[stored.axis] = [
            slice(run.start + offset, run.stop + offset) for run in runs[stored.axis]
        ]
        stored_order = "".join(part.stored_dims)
        shard_sizes = [range_of[dim][1] - range_of[dim][0] for dim in stored_order]
        order = [stored_order.index(dim) for dim in part.dims]
        for position, name in stored.names(ranges).items():
            merged = self._read_runs(self._handles[name], runs)
            if not all_finite(merged):
                self._not_finite.add(name)
            values = merged.reshape(shard_sizes).transpose(order)
            if picked is not None:
                values = values[..., picked]
            block[position] = values
        return block

    def _read_runs(
        self, tensor: Any, runs: Sequence[Sequence[slice]], before: _Index = ()
    ) -> np.ndarray:
        """Reads pieces of a tensor and joins them to one array.

        Args:
          tensor: the slices of an open file.
          runs: the ranges to read of each dim.
          before: the chosen range of each dim before these.
        """
        if not runs:
            piece: np.ndarray = tensor[before]
            self.bytes_read += piece.nbytes
            return piece
        pieces = [self._read_runs(tensor, runs[1:], (*before, run)) for run in runs[0]]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces, len(before))


def _layer_of(name: str) -> int:
    """Reads the number of a layer from a tensor's name; -1 for other tensors."""
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _join_layers(*layers: jax.Array) -> jax.Array:
    """Joins stacks of one layer each, in their sharding."""
    if len(layers) == 1:
        return layers[0]
    join = jax.jit(jnp.concatenate, out_shardings=layers[0].sharding)
    joined: jax.Array = jax.block_until_ready(join(layers))
    return joined


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Allocates an array at an aligned address, which jax's CPU arrays use in place.

    jax copies arrays at other addresses.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    array: np.ndarray = raw[start : start + size].view(dtype)
    return array.reshape(shape)


def _runs(
    group: str, sizes: Mapping[str, int], range_of: Mapping[str, tuple[int, int]]
) -> list[slice]:
    """Finds the ranges of a merged dim that hold a shard.

    Args:
      group: the letters of the dims that are merged, the slowest first.
      sizes: the whole size of each letter.
      range_of: the shard's range of each letter.
    """
    runs = [(0, 1)]
    for letter in group:
        size = sizes[letter]
        start, stop = range_of[letter]
        if (start, stop) == (0, size):
            runs = [(first * size, last * size) for first, last in runs]
        else:
            rows = [row for run in runs for row in range(*run)]
            runs = [(row * size + start, row * size + stop) for row in rows]
    return [slice(*run) for run in runs]


def stored_shapes(family: Family, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Computes the shape of every tensor, by name, from the parameters' shapes."""
    return {
        name: stored.shape(shapes)
        for stored in family.present(shapes)
        for name in stored.all_names(shapes)
    }


def unmapped(family: Family, shapes: Shapes) -> list[str]:
    """Lists as one fault the parameters that the family has no tensor for."""
    known = {part.path for stored in family.present(shapes) for part in stored.parts}
    return _listed(
        f"{family.model_type} has no tensor for the parameters", shapes.keys() - known
    )


def _listed(problem: str, names: Iterable[str]) -> list[str]:
    """Makes a fault of a problem and the names that have it; none if there are none."""
    ordered = sorted(names)
    if not ordered:
        return []
    more = ""
    if len(ordered) > _SHOWN:
        more = f" and {len(ordered) - _SHOWN} more"
    return [f"{problem}: {', '.join(ordered[:_SHOWN])}{more}"]
