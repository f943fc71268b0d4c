"""Numerical faults: non-finite steps, spikes of the loss, copies that differ; data left
out for them.

Steps and windows: updates count from 1; a batch of data is numbered from 0, and without
anything left out update n takes batch n - 1.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.config.groups.health import HealthConfig
from jaxdist.data import Dataset
from jaxdist.data.packing import Batch

# of a workdir: windows of batches left out, [first, after the last]
SKIPPED_FILE = "skipped.json"

_EVERY_ROW = slice(None)
# losses that say what is usual; of them needed; steps between looks
_RECENT = 100
_ENOUGH = 20
_REFRESH = 10


class Diverged(Exception):
    """The run cannot go on from its state: go back before step `first`, or stop."""

    def __init__(
        self, kind: str, reason: str, *, first: int, last: int, policy: str
    ) -> None:
        super().__init__(reason)
        self.kind = kind  # "nonfinite", "spike" or "drift"
        # steps that went wrong
        self.first = first
        self.last = last
        self.policy = policy  # "stop" or "rollback"
        self.skip = kind != "drift"  # whether data can be the cause


class Monitor:
    """Looks at the metrics of each step, in order; waits until the step is done."""

    def __init__(
        self,
        config: HealthConfig,
        *,
        nonfinite_limit: int,
        samples: Callable[[int], tuple[int, int]],
        event: Callable[..., None],
        note: Callable[[str], None],
    ) -> None:
        """Args:
        samples: first and last global sample index of a step's batch.
        event: takes an event's name, step and fields.
        note: takes a line for people.
        """
        self._config = config
        self._limit = nonfinite_limit
        self._samples = samples
        self._event = event
        self._note = note
        self.waited_s = 0.0  # for steps to be done
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._median = self._high = math.inf

    def look(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """Checks a step's loss.

        Raises:
          Diverged: by the policies of the config.
        """
        began = time.monotonic()
        skipped = int(metrics["skipped"])
        loss = float(metrics["loss"])
        self.waited_s += time.monotonic() - began
        if skipped:
            self._nonfinite(number, skipped)
        elif math.isfinite(loss):
            self._spike(number, loss)

    def _where(self, number: int) -> dict[str, int]:
        first, last = self._samples(number)
        return {"first_sample": first, "last_sample": last}

    def _nonfinite(self, number: int, skipped: int) -> None:
        self._event(
            "nonfinite", number, skipped_in_a_row=skipped, **self._where(number)
        )
        self._note(f"step {number}: loss or gradients are not finite; update left out")
        if skipped > self._limit:
            limit = f"optimizer.nonfinite_limit={self._limit}"
            text = (
                f"{skipped} steps in a row with non-finite loss or gradients ({limit})"
            )
            first = number - skipped + 1
            policy = self._config.nonfinite
            raise Diverged("nonfinite", text, first=first, last=number, policy=policy)

    def _spike(self, number: int, loss: float) -> None:
        sigmas = self._config.spike_sigmas
        losses = self._losses
        losses.append(loss)
        if sigmas and loss > self._high:
            self._event(
                "spike", number, loss=loss, median=self._median, **self._where(number)
            )
            text = f"step {number}: loss {loss:.4g} spikes above the recent median {self._median:.4g}"
            self._note(text)
            if self._config.spike == "rollback":
                raise Diverged(
                    "spike", text, first=number, last=number, policy="rollback"
                )
        if sigmas and len(losses) >= _ENOUGH and number % _REFRESH == 0:
            self._median = statistics.median_high(losses)
            sigma = 1.4826 * statistics.median_high(
                abs(loss - self._median) for loss in losses
            )
            # At least a hundredth of the median: smooth losses make no spikes of
            # nothing.
            self._high = self._median + sigmas * max(sigma, 0.01 * abs(self._median))

    def rewound(self) -> None:
        """Forgets the losses so far: the run has gone back."""
        self._losses.clear()
        self._high = math.inf


# --- data left out --------------------------------------------------------------------


class SkippingDataset(Dataset):
    """A dataset whose training batches leave out windows, each [first, after the last]
    batch.

    Which batch a step takes is a function of the windows alone.
    """

    def __init__(self, dataset: Dataset, windows: Iterable[Sequence[int]] = ()) -> None:
        vars(self).update(vars(dataset))
        self._whole = getattr(dataset, "_whole", dataset)
        self.windows = [[first, end] for first, end in windows]

    def position(self, step: int) -> int:
        """Returns the batch that is trained on after `step` updates."""
        left_out = 0  # all before is in a window that was counted
        for first, end in sorted(self.windows):
            first = max(first, left_out)
            if step >= first:
                step += max(end - first, 0)
            left_out = max(left_out, end)
        return step

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = _EVERY_ROW
    ) -> Batch:
        """Returns rows of the global batch after `step` updates, see Dataset."""
        return self._whole.train_batch(self.position(step), global_size, rows)

    def attention_work(
        self, step: int, global_size: int, chunks: int = 1
    ) -> np.ndarray | None:
        """Returns the work of the rows of the global batch after `step` updates, see
        Dataset.
        """
        return self._whole.attention_work(self.position(step), global_size, chunks)

    def reader_state(self, step: int) -> Any:
        """Returns that of the whole dataset, where `step` stands in it."""
        return self._whole.reader_state(self.position(step))

    def go_to(self, step: int, state: Any) -> str:
        """Tells the whole dataset that `step` comes next."""
        return self._whole.go_to(self.position(step), state)

    def without(self, first_step: int, last_step: int) -> SkippingDataset:
        """Returns the dataset that also leaves out what these updates took."""
        window = [self.position(first_step - 1), self.position(last_step - 1) + 1]
        return SkippingDataset(self, [*self.windows, window])
