"""Orbax backend: writes and reads arrays and a JSON document as one step.

No other module imports Orbax. The backend uses `AsyncCheckpointer`, not Orbax's
`CheckpointManager`, which keeps a list of steps in memory and infers its layout from
the newest folder. `CheckpointManager` also refuses steps below its newest one by
returning False, even if the newest one is damaged. `manager.py` decides which steps
exist and which are deleted.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxdist.checkpoint.folders import METADATA_ITEM, STATE_ITEM
from jaxdist.config import trees
from jaxdist.distributed import coordination

# Arrays of fewer bytes are written by one replica, not split over all. A split compiles
# a slice for each device at the first save, while training waits.
_SPLIT_BYTES = 1 << 20


# Orbax logs the error of its thread with a traceback. It raises the same error, which
# `manager.py` reports.
logging.getLogger("absl").addFilter(
    lambda record: not (record.exc_info and "orbax" in record.pathname)
)


def _without_late_writes(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps an unraisablehook, and drops errors of saves that Orbax has given up.

    TensorStore's threads continue such a save, and raise these errors.
    """

    def filtered(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return filtered


sys.unraisablehook = _without_late_writes(sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    """Tests whether a record of asyncio is not about a later write of a failed save."""
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "orbax" in text)


logging.getLogger("asyncio").addFilter(_is_news)


def _spare_leaks_of_tensorstore() -> None:
    """Makes Orbax ask TensorStore for no JSON documents, whose values are never freed.

    TensorStore 0.1 keeps a reference to each text and list that it converts from JSON.
    For each save, Orbax converts the metrics of all drivers twice, for a line of its
    log, and for each array the spec of a folder. docs/project/decisions.md has the numbers.
    """
    convert = ts.KvStore.Spec.to_json

    def to_json(spec: Any, **options: Any) -> Any:
        """Converts a spec as TensorStore does; that of a plain folder by itself."""
        plain = {"driver": "file", "path": spec.path}
        if not options and spec == ts.KvStore.Spec(plain):
            return plain
        return convert(spec, **options)

    ts.KvStore.Spec.to_json = to_json  # type: ignore[method-assign,assignment]
    ts.experimental_collect_matching_metrics = lambda prefix="", **_: []


_spare_leaks_of_tensorstore()


def _type_handlers() -> Any:
    """Makes the registry of leaf types: arrays of any sharding, and host arrays.

    Process 0 alone writes host arrays.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=_SPLIT_BYTES,
    )
    host_arrays = ocp.type_handlers.NumpyHandler()
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, host_arrays)
    )


class OrbaxBackend:
    """Writer and reader of steps. It writes in the background, one step at a time.

    Every process must make the same calls.
    """

    def __init__(self, *, timeout_s: int, compress: bool = False) -> None:
        """Makes Orbax's checkpointer.

        Args:
          timeout_s: seconds that a save may take.
          compress: whether new steps are compressed. Steps of either kind can be read:
            each array's metadata says how it is stored.
        """
        # With `active_processes`, Orbax's processes wait for each other through the
        # coordination service, not in a collective. In a collective, a process whose
        # save fails would leave the others waiting, until its next step answers them.
        #
        # Orbax's default barrier does not know of failures. A full disk under one process
        # would block the saves of the others, and soon training, until it times out.
        several = jax.process_count() > 1
        everyone = set(range(jax.process_count())) if several else None
        self._barrier = coordination.FailableBarrier("save") if several else None
        processes = ocp.options.MultiprocessingOptions(active_processes=everyone)
        arrays = ocp.PyTreeCheckpointHandler(
            type_handler_registry=_type_handlers(), use_compression=compress
        )
        items = {STATE_ITEM: arrays, METADATA_ITEM: ocp.JsonCheckpointHandler()}
        composite = ocp.CompositeOptions(multiprocessing_options=processes)
        handler = ocp.CompositeCheckpointHandler(composite_options=composite, **items)
        wait = self._barrier.wait if self._barrier else None
        options = ocp.AsyncOptions(timeout_secs=timeout_s, barrier_sync_fn=wait)
        self._checkpointer = ocp.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=processes
        )

    def start(
        self, path: Path, arrays: Mapping[str, Any], document: Mapping[str, Any]
    ) -> None:
        """Starts to write a step.

        The method returns once the arrays are copied, so that they may be donated.

        Args:
          path: folder of the step, which must not exist.
          arrays: {name: array or scalar}.
          document: JSON document that is stored with the arrays.

        Raises:
          Exception: any error of Orbax or of the disk. `path` does not exist then.
        """
        leaves = {
            name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            for name, leaf in arrays.items()
        }
        state = ocp.args.PyTreeSave(trees.unflatten_names(leaves))
        items = {STATE_ITEM: state, METADATA_ITEM: ocp.args.JsonSave(dict(document))}
        if self._barrier:
            self._barrier.begin()
        with self._drained_on_error():
            self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def finish(self) -> None:
        """Waits until the running write ends.

        Raises:
          Exception: any error of that write.
        """
        with self._drained_on_error():
            self._checkpointer.wait_until_finished()

    @contextlib.contextmanager
    def _drained_on_error(self) -> Iterator[None]:
        """Waits for all writers of a failed save, and discards their errors.

        Otherwise the next save would report those errors.
        """
        try:
            yield
        except Exception as error:
            if self._barrier:
                self._barrier.fail(error)
            # One save leaves at most this many errors behind. Only the first counts.
            for _ in range(32):
                with contextlib.suppress(Exception):
                    self._checkpointer.wait_until_finished()
                    break
            raise

    def read(self, path: Path, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Reads the arrays of a step, each into the sharding of its abstract array.

        Args:
          path: folder of the step.
          abstract: {name: leaf with shape, dtype and sharding}.

        Raises:
          Exception: any error of Orbax or TensorStore. Types and texts vary with the
            damage.
        """
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for name, leaf in abstract.items()
        }
        item = ocp.args.PyTreeRestore(
            trees.unflatten_names(abstract),
            restore_args=trees.unflatten_names(restore_args),
            partial_restore=True,  # the caller has compared the names
        )
        # With arguments other than Composite, Orbax guesses the layout of the folder.
        restored = self._checkpointer.restore(
            path, args=ocp.args.Composite(**{STATE_ITEM: item})
        )
        arrays = trees.flatten_names(restored[STATE_ITEM])
        # Orbax skips arrays that are not there.
        missing = [
            name for name in abstract if not isinstance(arrays.get(name), jax.Array)
        ]
        if missing:
            raise ValueError(f"the files do not hold {', '.join(missing[:8])}")
        return arrays

    def close(self) -> None:
        """Waits for the running write and stops Orbax's threads."""
        self._checkpointer.close()
