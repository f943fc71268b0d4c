"""An iterable's batches as a function of the step, and its own state, kept with
checkpoints.

An iterator with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader,
streams of Hugging Face datasets) or `get_state` and `set_state` (grain) goes on where
it was. Of any other the batches before are read again. States are stored as JSON: what
came from a checkpoint is never executed or unpickled.
"""

import base64
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxdist.storage.untrusted import Malformed, of_kind

# States kept behind the last batch read: the reader is ahead of training by
# data.prefetch, 64 at most.
_KEPT = 70
_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_PLAIN = (str, int, bool, type(None))


class NoBatch(RuntimeError):
    """The iterable has no such batch; the text says why."""


class Iterated:
    """An iterable's batches by number; it begins anew where it ends, if it can."""

    def __init__(self, batches: Iterable[Any]):
        self._batches, self._iterator = batches, iter(())
        self._next = 0  # of the batch that the iterator gives
        self._states: dict[int, Any] = {}  # encoded, each as it was before that batch
        self._epoch = 0  # of the next beginning

    def __call__(self, step: int) -> Any:
        """Returns the batch after `step` updates.

        Raises:
          NoBatch: the iterator has ended, or cannot go back.
        """
        if step == 0 or step < self._next:
            self._epoch = 0
            if not self._restart():
                raise NoBatch(
                    f"the iterator cannot go back to the batch after {step} updates; give an iterable that "
                    f"can be begun anew, or a function of the step"
                )
            self._next = 0
        batch = None
        while self._next <= step:
            batch = next(self._iterator, None)
            if batch is None and self._restart():
                batch = next(self._iterator, None)
            if batch is None:
                raise NoBatch(
                    f"the iterator ended after {self._next} batches; give more or lower steps"
                )
            self._next += 1
            self._note_state()
        return batch

    def state(self, step: int) -> Any:
        """Returns the iterator's state before the batch after `step` updates, as JSON;
        None: unknown.
        """
        return self._states.get(step)

    def go_to(self, step: int, state: Any) -> str:
        """Sets the iterator to give the batch after `step` updates next; returns a line
        that says how.

        Args:
          state: of `state`, from a checkpoint; None: there was none.

        Raises:
          NoBatch: the iterator does not take it.
        """
        holder, setter = self._holder()[::2]
        if state is None or holder is None:
            again = (
                ""
                if step < self._next
                else f"its first {step - self._next} batches are passed over"
            )
            return (
                f"batches: the iterator has no state to go on from; {again}"
                if again
                else ""
            )
        try:
            self._epoch, value = decode(state)
            if holder is self._batches:  # its state counts from the next beginning on
                getattr(holder, setter)(value)
                self._restart()
            else:
                self._restart()
                holder, _, setter = self._holder()
                getattr(holder, setter)(value)
        except Exception as error:
            # the library's own, of a state that is another iterator's
            raise NoBatch(
                f"the iterator does not take the state that was saved ({error!r:.200}); give the one that "
                f"the run began with, or a new folder"
            ) from error
        self._next = step
        self._states = {step: state}
        return f"batches: the iterator goes on by its own state at the batch after {step} updates"

    def _restart(self) -> bool:
        """Begins the next epoch, where the iterable can be begun anew; returns whether
        it can.
        """
        before, tell_epoch = self._iterator, getattr(self._batches, "set_epoch", None)
        # it shuffles by the epoch; a stream's state counts in its epoch alone
        if callable(tell_epoch):
            tell_epoch(self._epoch)
        self._iterator, self._epoch = iter(self._batches), self._epoch + 1
        return self._iterator is not before

    def _holder(self) -> tuple[Any, str, str]:
        """Returns the iterator, or else the iterable, that has a state, and how to get
        it and to set it.
        """
        for holder in (self._iterator, self._batches):
            for names in _METHODS:
                if all(callable(getattr(holder, name, None)) for name in names):
                    return holder, *names
        return None, "", ""

    def _note_state(self) -> None:
        holder, getter, _ = self._holder()
        if holder is None:
            return
        try:
            self._states[self._next] = encode(
                (self._epoch - 1, getattr(holder, getter)())
            )
        except TypeError:  # what no JSON holds: then the batches are read again
            return
        self._states.pop(self._next - _KEPT, None)


# --- states as JSON -------------------------------------------------------------------


def encode(value: Any) -> Any:
    """Returns a state as JSON: what JSON has not stands in an object of one tag.

    Raises:
      TypeError: it holds something else than numbers, texts, bytes, arrays, and
        containers of them.
    """
    if isinstance(value, _PLAIN) or isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        return {"torch": encode(value.numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        whole = np.ascontiguousarray(value)
        content = base64.b64encode(whole.tobytes()).decode()
        return {"array": [value.dtype.str, list(np.shape(value)), content]}
    raise TypeError(
        f"{type(value).__name__} is no part of a state that JSON could hold"
    )


def decode(value: Any) -> Any:
    """Returns the state of its JSON.

    Raises:
      Malformed: it is none of `encode`.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((tag, item),) = value.items()
        return _DECODERS[tag](item)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Malformed(f"no state of an iterator: {error!r}") from None


def _array(parts: Any) -> np.ndarray:
    dtype, dims, content = parts
    if np.dtype(dtype).kind not in "biufc":
        raise ValueError(dtype)
    return (
        np.frombuffer(base64.b64decode(content), dtype)
        .reshape(of_kind(dims, list))
        .copy()
    )


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "tuple": lambda items: tuple(decode(item) for item in items),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "array": _array,
    "torch": lambda item: sys.modules["torch"].from_numpy(decode(item)),
}
