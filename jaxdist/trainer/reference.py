"""The reference's log-probabilities of answers, computed once before training.

An objective that compares the policy with its first weights (`objective.reference=
computed`) needs one number for each answer. A pass over all rows computes them with the
run's own step, on its own layout. The workdir keeps them in reference.npz, because the
first weights are gone afterwards. A folder beside the token cache keeps them for other
runs on the same weights and data. An interrupted pass continues where it was saved.

Letters: P pieces (halves of pairs), G rows of a batch, M halves of a row.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import fingerprint
from jaxdist.config import ConfigError, trees
from jaxdist.data.dataset import Dataset
from jaxdist.data.loader import Placer
from jaxdist.data.packing import PackedDocuments
from jaxdist.distributed import consistency, coordination
from jaxdist.objectives.pairs import REFERENCE, halves
from jaxdist.protocols.model import Batch
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.storage.digest import digest
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import compose, reference_file
from jaxdist.trainer.reference_file import PLACE_COLUMNS, Stored
from jaxdist.trainer.run_config import RunConfig

_SAVE_EVERY_S = 30.0
_SPLITS = ("train", "validation")


def needed(config: RunConfig) -> bool:
    """Checks whether a run's batches need the reference's log-probabilities."""
    objective = compose.objective_of(config)
    return objective is not None and REFERENCE in objective.data_fields


def attach_stored(config: RunConfig, folder: Path, dataset: Dataset) -> None:
    """Adds the field REFERENCE to a run's data, from the file of its workdir.

    Every process makes the call, and the first one reads the file. It does nothing if
    the run needs no such field, or has it already.

    Raises:
      ConfigError: the file is missing or damaged, or lacks some answers.
    """
    if not needed(config):
        return
    if all(REFERENCE in samples.piece_fields for samples in _sides(dataset)):
        return
    places = _places(dataset)
    values = np.full(len(places), math.nan, np.float32)
    with coordination.raise_on_all():
        if coordination.is_lead():
            values = _stored_values(folder / reference_file.NAME, dataset, places)
    _attach(dataset, _from_lead(values))


def _stored_values(file: Path, dataset: Dataset, places: np.ndarray) -> np.ndarray:
    """Reads the values of all answers, [P]; see `attach_stored`."""
    stored = reference_file.read(file)
    if stored is None:
        raise ConfigError(
            f"{file} is missing or damaged: the run compares answers with its first "
            f"weights, and cannot compute them again; put the file back"
        )
    if stored.data != dataset.fingerprint:
        raise ConfigError(
            f"{file} belongs to other data than those of data.*; put these back"
        )
    values = _values_at(stored, places)
    if np.isnan(values).any():
        raise ConfigError(
            f"{file} lacks answers that the data now have; was data.validation_tokens "
            f"raised? Set it back"
        )
    return values


def settle(
    config: RunConfig,
    folder: Path,
    dataset: Dataset,
    built: TrainStep,
    state: State,
    *,
    model_class: type,
    say: Callable[[str], None],
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    """Computes the field REFERENCE of a new run's data, and stores it in the workdir.

    Every process makes the call. The first one reads and writes the files, and decides
    for all which values are known. It does nothing if the run needs no such field.

    Args:
      config: the run's config.
      folder: the workdir.
      dataset: the run's data, which receive the field.
      built: the run's step.
      state: a state with the weights of the reference.
      model_class: the model's class, whose source is a part of the cache's key.
      say: prints a line of progress.
      on_batch: is called as each batch starts.

    Raises:
      ConfigError: the file in the workdir cannot be written.
    """
    if not needed(config):
        return
    places = _places(dataset)
    key = _key(config, dataset, state, model_class)
    cached = config.data.cache_folder() / f"reference-{key[:16]}.npz"
    values = np.full(len(places), math.nan, np.float32)
    if coordination.is_lead():
        for file in (cached, folder / reference_file.NAME):
            stored = reference_file.read(file)
            if stored is not None and stored.key == key:
                found = _values_at(stored, places)
                values = np.where(np.isnan(found), values, found)
    stored = Stored(key, dataset.fingerprint, places, _from_lead(values))
    _compute(config, folder, dataset, built, state, stored, say=say, on_batch=on_batch)
    _attach(dataset, stored.values)
    with coordination.raise_on_all():
        if coordination.is_lead():
            reference_file.write(folder / reference_file.NAME, stored)
    if coordination.is_lead() and not cached.is_file():
        try:
            reference_file.write(cached, stored)
        except ConfigError as error:  # other runs compute it again
            say(f"reference: not kept for other runs: {error}")


def _from_lead(values: np.ndarray) -> np.ndarray:
    """Sends the first process's values to all processes, and returns them, writable."""
    sent: Any = multihost_utils.broadcast_one_to_all(values)
    return np.array(sent)


def _compute(
    config: RunConfig,
    folder: Path,
    dataset: Dataset,
    built: TrainStep,
    state: State,
    stored: Stored,
    *,
    say: Callable[[str], None],
    on_batch: Callable[[], None],
) -> None:
    """Computes the values that are missing, batch by batch; see `settle`."""
    size = config.batch.global_size
    values = stored.values
    rows_in_all = sum(samples.num_rows for samples in _sides(dataset))
    sums_of = _build_sums(config, built)
    began = time.monotonic()
    saved = -math.inf
    done = 0
    computed = 0
    first_piece = 0
    for samples in _sides(dataset):
        counts = samples.piece_counts
        starts = first_piece + np.concatenate([[0], np.cumsum(counts)])
        first_piece = int(starts[-1])
        for begin in range(0, samples.num_rows, size):
            end = min(begin + size, samples.num_rows)
            done += end - begin
            pieces = slice(int(starts[begin]), int(starts[end]))
            if not np.isnan(values[pieces]).any():
                continue
            on_batch()
            sums = sums_of(state, samples, np.arange(begin, begin + size))
            in_row = np.arange(sums.shape[1]) < counts[begin:end, None]
            values[pieces] = sums[: end - begin][in_row]
            computed += end - begin
            now = time.monotonic()
            if now - saved > _SAVE_EVERY_S:
                # Clocks differ, so processes must not wait for each other here.
                saved = now
                _save_part(folder / reference_file.NAME, stored)
                left = (rows_in_all - done) * (now - began) / computed
                say(
                    f"reference: {done} of {rows_in_all} rows, about "
                    f"{time_text(left)} to go"
                )
    if computed:
        say(
            f"reference: log-probabilities of {len(values)} answers in {computed} rows, "
            f"in {time_text(time.monotonic() - began)}"
        )


def _save_part(file: Path, stored: Stored) -> None:
    """Saves what is computed so far, if possible. Only the end of the pass must."""
    if coordination.is_lead():
        with contextlib.suppress(ConfigError):
            reference_file.write(file, stored)


def _build_sums(
    config: RunConfig, built: TrainStep
) -> Callable[[State, PackedDocuments, np.ndarray], np.ndarray]:
    """Builds the function that computes the sums of some rows' answers, [G, M]."""
    shapes = compose.batch_shapes(config)
    del shapes[REFERENCE]
    placer = Placer(built.batch_shardings(shapes), config.batch.global_size)

    def sums(state: State, batch: Batch) -> jax.Array:
        log_p = built.terms(state, batch)["log_probability"] * batch["weights"]
        both = jax.vmap(halves)(log_p, batch["segment_ids"])
        return jnp.stack(both, axis=-1).reshape(len(log_p), -1)

    replicated = NamedSharding(built.mesh, P())
    program = jax.jit(sums, out_shardings=replicated)

    def sums_of(state: State, samples: PackedDocuments, rows: np.ndarray) -> np.ndarray:
        chosen = rows[placer.rows]
        batch = samples.read(chosen)
        batch["sample"] = chosen.astype(np.int32)
        return np.asarray(program(state, placer(batch)))

    return sums_of


def _sides(dataset: Dataset) -> Iterator[PackedDocuments]:
    """Yields the rows of the training data of each source, then of its held-out data."""
    for split in _SPLITS:
        for samples in dataset.rows_of(split):
            assert isinstance(samples, PackedDocuments)
            yield samples


def _places(dataset: Dataset) -> np.ndarray:
    """Lists the pieces of all sides, [P, 4]; see `Stored`."""
    parts = []
    for side, samples in enumerate(_sides(dataset)):
        columns = [np.full(len(samples.pieces.owner), side), *samples.pieces]
        parts.append(np.stack([column.astype(np.int64) for column in columns], 1))
    return np.concatenate(parts) if parts else np.empty((0, PLACE_COLUMNS), np.int64)


def _values_at(stored: Stored, places: np.ndarray) -> np.ndarray:
    """Finds the values of some pieces, [P]; NaN = unknown."""
    if np.array_equal(places, stored.places):
        return stored.values
    by_place = dict(zip(map(tuple, stored.places.tolist()), stored.values, strict=True))
    found = [by_place.get(tuple(place), math.nan) for place in places.tolist()]
    return np.array(found, np.float32)


def _attach(dataset: Dataset, values: np.ndarray) -> None:
    """Adds the values of all pieces to the data."""
    begin = 0
    for samples in _sides(dataset):
        end = begin + len(samples.pieces.owner)
        samples.set_piece_field(REFERENCE, values[begin:end])
        begin = end


def _key(config: RunConfig, dataset: Dataset, state: State, model_class: type) -> str:
    """Hashes what the values depend on: weights, data, cut, and how they are computed."""
    arrays: dict[str, Any] = {}
    for name in ("trainable", "model_state", "frozen"):
        for path, x in trees.flatten_names(getattr(state, name)).items():
            arrays[f"{name}/{path}"] = x
    device = jax.devices()[0]
    return digest(
        sorted(fingerprint.of(arrays).items()),
        sorted(consistency.code(model_class).items()),
        repr(sorted(config.model.items())),
        repr(dataclasses.asdict(config.lora)),
        repr(config.precision),
        repr(config.context),
        dataset.fingerprint,
        device.platform,
        device.device_kind,
    )
