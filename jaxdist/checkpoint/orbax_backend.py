"""The one module that imports Orbax: arrays and a JSON document, written as one atomic
step.

`AsyncCheckpointer` is used directly, not `CheckpointManager`: the manager keeps its own
list of steps, refuses (returns False) steps below its newest even when that one is
damaged, and infers its layout from the newest folder. Which steps exist and which are
deleted is decided in `manager.py`.
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

from jaxdist.checkpoint.files import METADATA_ITEM, STATE_ITEM
from jaxdist.config import trees
from jaxdist.distributed import coordination

# Below this many bytes the replicas of an array are not split over the processes that
# write it: each split compiles a slice for each device, at the first save, while
# training waits.
_SPLIT_BYTES = 1 << 20


# Orbax logs the error of its thread with a traceback, and raises it for us to report.
logging.getLogger("absl").addFilter(
    lambda record: not (record.exc_info and "orbax" in record.pathname)
)


def _pass_over_late_writes(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns an unraisablehook without what TensorStore's threads say of a save that
    Orbax has given up.
    """
    return lambda thrown: (
        None if str(thrown.exc_value) == "Event loop is closed" else show(thrown)
    )


sys.unraisablehook = _pass_over_late_writes(sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    """Tests whether asyncio says more than that further writes of a failed save
    failed, too.
    """
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "orbax" in text)


logging.getLogger("asyncio").addFilter(_is_news)


def _type_handlers() -> Any:
    """Lists how leaves are written: arrays of any sharding, and host arrays by
    process 0.
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
    """Writes in the background, one step at a time; every process must make the same
    calls.
    """

    def __init__(self, *, timeout_s: int) -> None:
        # Named, the processes wait for each other through the coordination service, not
        # in a collective: one whose save fails would leave the others in it, to be
        # answered by its next step's. Orbax's own barrier knows nothing of failures: a
        # full disk under one process would hold the saves of the others, and soon
        # training, until it times out.
        several = jax.process_count() > 1
        everyone = set(range(jax.process_count())) if several else None
        self._barrier = coordination.FailableBarrier("save") if several else None
        processes = ocp.options.MultiprocessingOptions(active_processes=everyone)
        arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=_type_handlers())
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
        """Begin to write; returns once the arrays are copied, so that they may be
        donated.

        Raises:
          Exception: whatever Orbax or the disk raised; `path` does not exist then.
        """
        leaves = {
            k: v if isinstance(v, jax.Array) else np.asarray(v)
            for k, v in arrays.items()
        }
        state = ocp.args.PyTreeSave(trees.unflatten_names(leaves))
        items = {STATE_ITEM: state, METADATA_ITEM: ocp.args.JsonSave(dict(document))}
        if self._barrier:
            self._barrier.begin()
        with self._drained_on_error():
            self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def finish(self) -> None:
        """Wait until the running write is committed; raises its error, if any."""
        with self._drained_on_error():
            self._checkpointer.wait_until_finished()

    @contextlib.contextmanager
    def _drained_on_error(self) -> Iterator[None]:
        """Lets all writers of a failed save end, and takes their errors: else the next
        save has them.
        """
        try:
            yield
        except Exception as error:
            if self._barrier:
                self._barrier.fail(error)
            # errors that one save can leave behind, at most; the first is what counts
            for _ in range(32):
                with contextlib.suppress(Exception):
                    self._checkpointer.wait_until_finished()
                    break
            raise

    def read(self, path: Path, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the named arrays of a step, each read into the sharding of its
        abstract array.

        Raises:
          Exception: whatever Orbax or TensorStore raised (types and texts vary with the
            damage).
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
            partial_restore=True,  # which arrays there must be is checked before
        )
        # Always Composite: with other arguments Orbax guesses the layout from what it
        # finds.
        restored = self._checkpointer.restore(
            path, args=ocp.args.Composite(**{STATE_ITEM: item})
        )
        arrays = trees.flatten_names(restored[STATE_ITEM])
        missing = [
            name for name in abstract if not isinstance(arrays.get(name), jax.Array)
        ]
        if missing:
            raise ValueError(
                f"the files do not hold {', '.join(missing[:8])}"
            )  # Orbax leaves out what is not there
        return arrays

    def close(self) -> None:
        """Wait for the running write and stop Orbax's threads."""
        self._checkpointer.close()
