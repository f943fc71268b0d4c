"""Loggers for tests, to be named in train.loggers: they record, raise, or never come
back.
"""

import json
import threading

CALLED_BY: list[str] = []  # names of the threads that made a logger


class Recording:
    """Appends each call to WORKDIR/calls.jsonl."""

    def __init__(self, run):
        CALLED_BY.append(threading.current_thread().name)
        self._file = open(run.workdir / "calls.jsonl", "a")
        self._add(
            "made",
            run.name,
            run.identity,
            run.first_step,
            run.config["train.steps"],
            run.info["parameters"],
        )

    def _add(self, *call):
        self._file.write(json.dumps(call) + "\n")

    def write(self, step, values):
        self._add("write", step, values)

    def event(self, name, step=None, **fields):
        self._add("event", name, step, fields)

    def close(self):
        self._add("close")
        self._file.close()


class NotMade:
    def __init__(self, run):
        raise OSError("no network")


class Raising:
    def __init__(self, run):
        pass

    def write(self, *_, **__):
        raise SystemExit("a logger that would end the process")

    event = close = write


class Sleeping(Raising):
    def write(self, *_, **__):
        threading.Event().wait()

    event = close = write
