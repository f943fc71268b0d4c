"""Copies of a run's checkpoints in a real local S3 server; `pytest -m s3` where moto
and s3fs are.
"""

import importlib.util
import shutil

import fsspec
import pytest

from jaxdist import train
from jaxdist.checkpoint import folders, integrity
from jaxdist.config import ConfigError
from jaxdist.distributed.local_devices import free_port
from jaxdist.operations.copies.copies import Copies, fetch_newest
from jaxdist.telemetry.metrics import read_events
from support.runs import TINY

MISSING = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(
        bool(MISSING), reason="no S3 server: pip install 'moto[server]' s3fs"
    ),
]


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The URL of an empty bucket; the client finds the server by the environment, as a
    user's would.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port())
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    name = tmp_path.name.replace("_", "-").lower()  # the server's buckets outlive it
    fsspec.filesystem("s3").mkdir(name)
    yield f"s3://{name}"
    server.stop()


def run(workdir, **changes) -> int:
    steps = {
        "train.steps": 12,
        "checkpoint.every_steps": 5,
        "optimizer.schedule": "constant",
    }
    flags = [
        f"--config.{key}={str(value).lower()}"
        for key, value in (TINY | steps | changes).items()
    ]
    return train.main(["--config", "quickstart", "--workdir", str(workdir), *flags])


def events_of(workdir, name: str) -> list[int]:
    return [event["step"] for event in read_events(workdir) if event["event"] == name]


def test_a_run_resumes_bit_for_bit_from_s3_after_its_checkpoints_are_deleted(
    tmp_path, bucket
):
    whole, workdir, url = tmp_path / "whole", tmp_path / "run", f"{bucket}/runs/one"
    assert run(whole) == 0
    assert run(workdir, **{"train.steps": 7, "checkpoint.copy_to": url}) == 0
    assert sorted(events_of(workdir, "checkpoint_copied")) == [5, 7]
    shutil.rmtree(workdir / "checkpoints")
    assert run(workdir, **{"checkpoint.copy_to": url, "checkpoint.keep_last": 1}) == 0
    assert events_of(workdir, "checkpoint_fetched") == [7]
    assert events_of(workdir, "restore") == [7]
    assert not events_of(workdir, "checkpoint_copy_failed")
    sums = [
        integrity.check(folder / "checkpoints", 12).fingerprints
        for folder in (whole, workdir)
    ]
    assert sums[0] == sums[1]
    # Kept as here: older ones are gone (one that was being copied stays for one save
    # more).
    copies = Copies(url)
    steps = list(copies.steps())
    assert steps == folders.list_steps(workdir / "checkpoints")
    assert 12 in steps
    assert not {5, 7} & set(steps)
    step, size, bad = fetch_newest(copies, tmp_path / "fetched")
    assert (step, bad) == (12, {})
    assert integrity.check(tmp_path / "fetched", 12)
    assert size > 100_000
    # Damage in all of them is seen, and nothing starts over.
    for step in steps:
        path = copies._path(step, "metadata/metadata")
        copies._fs.pipe_file(
            path, copies._fs.cat_file(path).replace(b'"step"', b'"stEp"', 1)
        )
    shutil.rmtree(workdir)
    with pytest.raises(
        ConfigError, match="no usable copy in s3://.*metadata/metadata has changed"
    ):
        run(workdir, **{"checkpoint.copy_to": url})
    assert events_of(workdir, "bad_checkpoint") == steps[::-1]


def test_a_bucket_that_is_not_there_is_refused_before_the_first_step(tmp_path, bucket):
    with pytest.raises(
        ConfigError,
        match="copy_to=s3://.*-absent/run cannot be read .*bucket does not exist",
    ):
        run(tmp_path, **{"checkpoint.copy_to": f"{bucket}-absent/run"})
    assert not read_events(tmp_path)
