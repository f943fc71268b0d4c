"""Books the time that jax traces, lowers and compiles to the ledger of a run."""

import contextlib
from collections.abc import Iterator

import jax

from jaxdist.operations.ledger.ledger import Ledger

# events of jax that say how long tracing, lowering and compiling took
_PARTS = "/jax/core/compile/"


@contextlib.contextmanager
def booked(ledger: Ledger) -> Iterator[None]:
    """Books what jax compiles in the thread of the ledger until the body ends; costs
    steps nothing.
    """

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(_PARTS):
            ledger.compiled(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
