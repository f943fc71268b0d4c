"""`jaxdist.train` with one more callback, which raises in a method, on one process.

In the environment: FAILING_METHOD, a method of `Callback` ("on_step paused": `on_step`
of a callback that the loop pauses for); FAILING_PROCESS, a process's number; empty:
nothing fails. FAILING_KIND: "" for an OSError, "config" for a ConfigError.
"""

import os

import jax

from jaxdist import library, train
from jaxdist.config import ConfigError
from jaxdist.trainer.callbacks import Callback
from jaxdist.trainer.exit_code import exit_code
from jaxdist.trainer.health import Diverged
from jaxdist.trainer.preemption import own_process

FAIL_FROM = 6  # the first step that methods of the loop may fail at
METHOD = os.environ.get("FAILING_METHOD", "")
PROCESS = os.environ.get("FAILING_PROCESS", "")
KIND = os.environ.get("FAILING_KIND", "")


class Failing(Callback):
    """Fails in one method, on one process."""

    name = "failing"
    steps = 3 if METHOD == "on_step paused" else 0

    def __init__(self) -> None:
        self._diverged = False

    def _maybe_fail(self, method: str, step: int = FAIL_FROM) -> None:
        if method != METHOD or step < FAIL_FROM:
            return
        # both have come here: it fails neither in the start nor by itself
        print(f"process {jax.process_index()} is in {METHOD}", flush=True)
        if str(jax.process_index()) == PROCESS:
            if KIND == "config":
                raise ConfigError("a callback refuses on order")
            raise OSError(5, "a fault on order")

    def __enter__(self):
        self._maybe_fail("__enter__")
        return self

    def __exit__(self, *_):
        self._maybe_fail("__exit__")

    def on_check(self, config):
        self._maybe_fail("on_check")

    def on_open(self, run):
        self._maybe_fail("on_open")

    def on_start(self, run):
        self._maybe_fail("on_start")

    def on_phase(self, phase, step):
        self._maybe_fail("on_phase", step)

    def on_progress(self, text):
        self._maybe_fail("on_progress")

    def on_step(self, view):
        self._maybe_fail("on_step paused" if self.steps else "on_step", view.step)
        if METHOD == "on_fault" and view.step == FAIL_FROM and not self._diverged:
            self._diverged = True
            raise Diverged(
                "drift",
                "a drift on order",
                first=FAIL_FROM,
                last=FAIL_FROM,
                policy="rollback",
            )

    def on_record(self, step, metrics):
        self._maybe_fail("on_record", step)

    def on_row(self, row):
        self._maybe_fail("on_row", row.step)

    def on_evaluate(self, view, row):
        self._maybe_fail("on_evaluate", view.step)

    def on_save(self, step):
        self._maybe_fail("on_save", step)

    def on_fault(self, error):
        self._maybe_fail("on_fault")

    def on_end(self, end):
        self._maybe_fail("on_end")

    def state(self):
        # the save of the end: one before is whole
        self._maybe_fail("state", FAIL_FROM if self._saved else 0)
        self._saved = True

    _saved = False

    def load(self, state):
        self._maybe_fail("load")


def main() -> int:
    """Runs the command with the callbacks of `train`, and this one."""
    callbacks_of_train = library.run_callbacks
    library.run_callbacks = lambda *run: [*callbacks_of_train(*run), Failing()]
    return train.main()


if __name__ == "__main__":
    with own_process():
        raise SystemExit(exit_code(main))
