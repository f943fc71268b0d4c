"""Checkpoints in an object store: gs:// through an emulator of Google Cloud Storage on
loopback.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec

import pytest

from jaxdist.distributed.local_devices import free_port
from jaxdist.telemetry.metrics import read_events
from support.paths import ROOT
from support.runs import command, environment, train

pytestmark = pytest.mark.skipif(
    not (find_spec("gcp_storage_emulator") and find_spec("gcsfs")),
    reason="needs: pip install gcp-storage-emulator gcsfs",
)


# The service says the generation of what it sends, and writers name the one that they
# replace; the emulator leaves it out.
EMULATOR = """
    import contextlib
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    download = objects.download

    def with_generation(request, response, storage, *args, **kwargs):
        with contextlib.suppress(NotFound):
            file = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["X-Goog-Generation"] = file["generation"]
        download(request, response, storage, *args, **kwargs)

    objects.download = with_generation
    from gcp_storage_emulator.__main__ import main

    main()
"""


@pytest.fixture
def store_environment(tmp_path):
    """Returns the variables that send gs:// to an emulator, which has the bucket
    `bucket`.
    """
    port = free_port()
    serve = [
        sys.executable,
        "-c",
        textwrap.dedent(EMULATOR),
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
    ]
    with open(tmp_path / "emulator.log", "w") as log:
        server = subprocess.Popen(
            [*serve, "--in-memory", "--default-bucket=bucket"],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
        )
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, (tmp_path / "emulator.log").read_text()
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        yield {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            # else each look for credentials waits for a metadata server
            "NO_GCE_CHECK": "true",
            "JAX_PLATFORMS": "cpu",
        }
    finally:
        server.kill()
        server.wait()


SCRIPT = """
    import json, logging
    import jax.numpy as jnp
    from jaxdist.checkpoint import folders
    from jaxdist.checkpoint.__main__ import main
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager

    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it looks for credentials again and again
    folder = folders.as_path("gs://bucket/runs/one")
    state = lambda step: {"x": jnp.arange(64.0) + step, "y": jnp.int32(step)}

    def save(store, step):
        store.save(step, state(step), {"data": step})
        assert store.wait()
        (result,) = store.poll()
        assert result.ok, result.error

    def restored(**options):
        with CheckpointManager(folder, CheckpointConfig(), **options) as store:
            found = store.restore(state(0))
            step = found.metadata["data"]
            assert all((found.state[name] == state(step)[name]).all() for name in "xy")
            return step, list(store.damaged_steps)

    assert not folders.has_steps(folder)
    with CheckpointManager(folder, CheckpointConfig(keep_last=3)) as store:
        for step in (1, 2, 3, 4):
            save(store, step)
        assert store.steps() == [2, 3, 4]
    assert restored() == (4, [])
    assert main(["verify", str(folder)]) == 0

    # a flipped bit, a planted file, a missing one
    file = max((p for p in (folder / "4" / "state" / "d").iterdir()), key=folders.file_bytes)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(bytes(raw))
    (folder / "3" / "state" / "planted").write_text("?")
    assert main(["verify", str(folder)]) == 1
    assert restored(mode="read") == (2, [4, 3])
    with CheckpointManager(folder, CheckpointConfig(keep_last=3)) as store:
        assert store.restore(state(0)).metadata == {"data": 2}
        assert store.steps() == [2]
        aside = folders.quarantine_folder(folder)
        assert sorted(p.name for p in aside.iterdir()) == ["3", "3.json", "4", "4.json"]
        assert "planted is not part of it" in json.loads((aside / "3.json").read_text())["reason"]
        for step in (3, 4):
            save(store, step)
    assert restored() == (4, [])

    # a save that died before its manifest
    folders.mark_unfinished(folder, 5)
    (folder / "5" / "metadata").mkdir(parents=True)
    (folder / "5" / "metadata" / "metadata").write_text("{")
    assert restored(mode="read") == (4, [])
    assert (folder / "5").exists()
    assert restored() == (4, [])
    assert not (folder / "5").exists() and not (folder / "5.unfinished").exists()
    (folder / "4" / "manifest.json").unlink()
    assert restored(mode="read") == (3, [4])
    print("all of it")
"""


def test_saving_rotation_damage_and_quarantine_in_an_object_store(store_environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        cwd=ROOT,
        env=os.environ | store_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("all of it\n"), done.stdout[-4000:]


def test_a_run_saves_to_an_object_store_and_goes_on_from_there(
    store_environment, tmp_path, monkeypatch
):
    for name, value in store_environment.items():
        monkeypatch.setenv(name, value)
    workdir = tmp_path / "run"
    settings = {
        "checkpoint__folder": "gs://bucket/runs/two",
        "train__steps": 14,
        "optimizer__schedule": "constant",
    }
    train(workdir, **settings)
    assert not (workdir / "checkpoints").exists()
    saves = [e for e in read_events(workdir) if e["event"] == "save"]
    assert [(e["step"], e["ok"]) for e in saves] == [(7, True), (14, True)]
    assert (
        "resumed after step 14"
        in train(workdir, **settings | {"train__steps": 16}).stdout
    )
    listed = subprocess.run(
        [sys.executable, "-m", "jaxdist.checkpoint", "list", str(workdir), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert [row["step"] for row in json.loads(listed.stdout)["steps"]] == [7, 14, 16]


OWNER = """
    import logging, sys, time
    from jaxdist.checkpoint import folders
    from jaxdist.storage import lock

    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    run, resumes, ahead_s, now = sys.argv[1], sys.argv[2] == "True", float(sys.argv[3]), time.time
    time.time = lambda: now() + ahead_s
    lock.RENEW_S, lock.TAKEOVER_S = 2.0, 20.0
    path = folders.as_path("gs://bucket/leased") / folders.OWNER
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with lock.lease(path, run, resumes=resumes) as is_held:
            print("held", flush=True)
            for line in sys.stdin:
                print(is_held(), flush=True)
    except lock.Locked as error:
        print(f"locked by {error}", flush=True)
"""


class Owner:
    """A process that asks for the lease of a folder in the store."""

    def __init__(self, variables, run, *, resumes=False, ahead_s=0):
        script = [
            sys.executable,
            "-c",
            textwrap.dedent(OWNER),
            run,
            str(resumes),
            str(ahead_s),
        ]
        self._process = subprocess.Popen(
            script, cwd=ROOT, env=os.environ | variables, stdin=-1, stdout=-1, text=True
        )
        assert self.answer() == "ready"

    def go(self) -> str:
        """Lets it ask; returns what became of that."""
        print(file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        return self._process.stdout.readline().strip()

    def is_held(self) -> bool:
        return self.go() == "True"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.slow
def test_one_of_several_owners_has_a_folder_in_an_object_store(store_environment):
    """Lives of owners: several at once, wrong clocks, a suspended one, a killed one."""
    one, another = (Owner(store_environment, run) for run in "ab")
    assert one.go() == "held"
    began = time.monotonic()
    others = [
        Owner(store_environment, "b", ahead_s=seconds) for seconds in (0, 1000, -1000)
    ]
    others += [Owner(store_environment, "a", resumes=True)]
    assert all(other.go().startswith("locked by process ") for other in others)
    time.sleep(max(0, began + 21 - time.monotonic()))
    assert one.is_held()  # longer than a lease lasts by itself

    one.signal(signal.SIGSTOP)
    time.sleep(21)
    assert another.go() == "held"
    one.signal(signal.SIGCONT)
    assert not one.is_held()
    assert another.is_held()
    one.end()
    # its record is not taken away by the end of the one before
    assert another.is_held()

    stranger, heir = (
        Owner(store_environment, "c"),
        Owner(store_environment, "b", resumes=True),
    )
    another.kill()
    assert stranger.go().startswith("locked by process ")
    assert heir.go() == "held"  # its own run's process is known to have gone
    heir.end()
    last = Owner(store_environment, "c")
    assert last.go() == "held"
    last.end()


def test_the_emulator_is_what_was_talked_to(store_environment, tmp_path):
    """Without it the same save fails: nothing here reaches, or needs, the real
    service.
    """
    lost = store_environment | dict.fromkeys(
        ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), "http://127.0.0.1:9"
    )
    run = command(tmp_path / "run", checkpoint__folder="gs://bucket/x", train__steps=1)
    done = subprocess.run(
        run, env=environment(1) | lost, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
