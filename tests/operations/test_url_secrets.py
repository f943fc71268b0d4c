"""A store's URL with a password and a signature: used, and never printed or stored."""

import logging
import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxdist import train
from jaxdist.config import ConfigError
from jaxdist.operations.copies import copies as module
from jaxdist.operations.copies.copies import Copies
from jaxdist.trainer import exit_code
from support.runs import TINY

pytestmark = pytest.mark.usefixtures("shared_steps")

SECRETS = ("hunter2", "c0ffee")
STEPS = {
    "train.steps": 3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 1,
    "train.loggers": "tensorboard",
}


class Guarded(MemoryFileSystem):
    """A store whose errors have its whole URL, as those of many clients do."""

    protocol = "guarded"
    broken = False

    def put_file(self, lpath, rpath, callback=None, **kwargs):
        if Guarded.broken:
            raise ConnectionError(f"PUT guarded:/{rpath}: refused; {rpath.upper()}")
        super().put_file(lpath, rpath, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if Guarded.broken:
            raise ConnectionError(f"GET guarded:/{path}: hunter2 is no password")
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("guarded", Guarded, clobber=True)


@pytest.fixture
def url(tmp_path, monkeypatch):
    """A URL with secrets, of a store of its own."""
    monkeypatch.setattr(module, "DELAYS_S", (0.0,))
    monkeypatch.setattr(Guarded, "broken", False)
    yield f"guarded://me:hunter2@{tmp_path.name}/run?sig=c0ffee"
    Guarded.store.clear()


def arguments(workdir, **changes) -> list[str]:
    settings = TINY | STEPS | {"checkpoint.every_steps": 2} | changes
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["--config", "quickstart", "--workdir", str(workdir), *flags]


def code_of(words: list[str], monkeypatch) -> int:
    """Runs the command as a process does, which also records its words in run.json."""
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "jaxdist.train", *words])
    monkeypatch.setattr("sys.argv", ["jaxdist.train", *words])
    return exit_code.exit_code(lambda: train.main(words))


def assert_no_secret(capfd, *folders) -> None:
    texts = {"output": "".join(capfd.readouterr())}
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                texts[str(file)] = file.read_bytes().decode(errors="replace")
    assert len(texts) > 5
    found = [(name, s) for name, text in texts.items() for s in SECRETS if s in text]
    assert not found


def test_a_run_copies_to_a_url_with_secrets_that_nothing_has(
    tmp_path, url, capfd, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)  # fsspec logs each call as DEBUG
    workdir = tmp_path / "run"
    words = arguments(workdir, **{"checkpoint.copy_to": url})
    assert code_of(words, monkeypatch) == 0
    assert Copies(url).whole_steps() == [3, 2]
    stored = Copies(url)._fs.cat_file(f"{Copies(url)._root}/config.json")
    assert not any(secret.encode() in stored for secret in SECRETS)
    assert not any(secret in caplog.text for secret in SECRETS)
    assert_no_secret(capfd, workdir)
    # without the URL
    assert code_of(["--workdir", str(workdir)], monkeypatch) == 78
    error = capfd.readouterr().err
    assert "config.json does not store the secrets of a URL" in error
    assert "--config.checkpoint.copy_to=URL, or empty" in error


@pytest.mark.slow
def test_a_run_with_a_secret_url_fails_to_copy_and_resumes_elsewhere(
    tmp_path, url, capfd, monkeypatch
):
    workdir = tmp_path / "run"
    words = arguments(workdir, **{"checkpoint.copy_to": url})
    assert code_of(words, monkeypatch) == 0
    # the error of a copy is an event and a line
    Guarded.broken = True
    words += ["--config.train.steps=5"]
    assert code_of(words, monkeypatch) == 0
    events = (workdir / "events.jsonl").read_text()
    assert "checkpoint_copy_failed" in events
    assert "guarded://***@" in events
    Guarded.broken = False
    # a new machine, with the URL
    assert_no_secret(capfd, workdir)
    shutil.rmtree(workdir)
    assert code_of(words, monkeypatch) == 0
    assert "fetched step 3 from guarded://***@" in capfd.readouterr().out
    without = ["--workdir", str(workdir), "--config.checkpoint.copy_to="]
    assert code_of(without, monkeypatch) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint.copy_to": "nowhere://me:hunter2@b/r?sig=c0ffee"},
        {"checkpoint.copy_to": "s3:/me:hunter2@b/r?sig=c0ffee", "seed": "x"},
        {"data.source": "text", "data.path": "https://me:hunter2@b/r?sig=c0ffee"},
        {"init.from_run": "https://me:hunter2@b/r?sig=c0ffee"},
        {"init.from_huggingface": "https://me:hunter2@b/r?sig=c0ffee"},
        {"checkpoint.folder": "https://me:hunter2@b/r?sig=c0ffee"},
        {"checkpoint.copyto": "s3://me:hunter2@b/r?sig=c0ffee"},
    ],
)
def test_no_refusal_has_a_secret(tmp_path, capfd, monkeypatch, changes):
    assert code_of(arguments(tmp_path / "run", **changes), monkeypatch) in (1, 78)
    output = "".join(capfd.readouterr())
    assert "error: " in output
    assert not any(secret in output for secret in SECRETS)


def test_a_store_that_is_down_names_no_secret(tmp_path, url, monkeypatch):
    copies = Copies(url)

    def refuse(*_, **__):
        raise ConnectionError(f"no route to {url}: me:hunter2, sig c0ffee")

    monkeypatch.setattr(copies._fs, "find", refuse)
    with pytest.raises(ConfigError, match="no route to") as caught:
        module.fetch_newest(copies, tmp_path)
    assert not any(secret in str(caught.value) for secret in SECRETS)
