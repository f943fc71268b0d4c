"""Which checkpoints can be trusted: a sealed manifest in each, and the run that it
belongs to.

    <folder>/<step>/manifest.json  written last: {format, step, run, files {path:
    [bytes, sha256]},
                                   fingerprints {array: hex}, seal: sha256 of the rest}
    <folder>/identity              the run whose steps these are; a step of another run
    is foreign

SHA-256 because it is in the standard library, `sha256sum` checks it by hand, and a
second a GiB on a core is hidden behind training. Files are hashed by process 0 after
the commit, as Orbax merges what the processes wrote there; on restore the processes
share the work. Without jax or a device.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint.files import MANIFEST, CheckpointError
from jaxdist.storage import atomic, run_format, untrusted
from jaxdist.storage.digest import digest, digest_file
from jaxdist.storage.untrusted import named, of_kind

IDENTITY = "identity"
_DEEPEST = 20  # folders in folders; Orbax's have 3
_SHOWN = 3  # faults of a step that are spelt out


class OtherVersion(CheckpointError):
    """Another version of jaxdist has sealed a step."""


@dataclass(frozen=True)
class Manifest:
    """What a sealed step must hold."""

    step: int
    run: str  # identity of the run that wrote it
    files: dict[str, tuple[int, str]]  # {path inside the step: (bytes, sha256)}
    # {array: hex}, the same for any mesh; see `fingerprint.py`
    fingerprints: dict[str, str]


# --- writing --------------------------------------------------------------------------


def seal(folder: Path, step: int, run: str, fingerprints: Mapping[str, str]) -> None:
    """Hash every file of a step and write its manifest: from here on the step counts.

    Raises:
      OSError: a file cannot be read, the manifest cannot be written.
    """
    path = folder / str(step)
    manifest = Manifest(
        step, run, _hashed(path, sorted(_files(path))), dict(fingerprints)
    )
    try:
        atomic.write_text(path / MANIFEST, _text(manifest), durable=True)
    except OSError:
        # there perhaps, but a power failure might take it: no step that failed may
        # count
        with contextlib.suppress(OSError):
            (path / MANIFEST).unlink()
        raise


def _text(manifest: Manifest) -> str:
    document = run_format.marked(vars(manifest))
    document["seal"] = digest(_dump(document))
    return _dump(document)


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, indent=1)


# --- checking -------------------------------------------------------------------------


def read_manifest(path: Path, *, place: object = None) -> Manifest:
    """Returns the manifest of a step's folder.

    Args:
      place: what to call the folder where another version has sealed it.

    Raises:
      OtherVersion: another version has sealed the step.
      CheckpointError: there is none, or it is not exactly what was sealed.
    """
    try:
        text = untrusted.read_bytes(path / MANIFEST).decode()
        document = untrusted.parse_json(text, dict)
        if _is_sealed(document):
            other = run_format.fault(document, place or path)
            if other:
                raise OtherVersion(other)
        manifest = Manifest(
            of_kind(document["step"], int, "step"),
            of_kind(document["run"], str, "run"),
            {
                n: (of_kind(b, int, n), of_kind(hex_, str, n))
                for n, (b, hex_) in document["files"].items()
            },
            {
                name: of_kind(hex_, str, name)
                for name, hex_ in document["fingerprints"].items()
            },
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{MANIFEST} is missing: half-written or planted"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is not readable: {named(error)}") from error
    if text != _text(manifest):  # also tells a changed seal or format
        raise CheckpointError(
            f"{MANIFEST} is damaged: its seal does not fit its content"
        )
    return manifest


def _is_sealed(document: Mapping[str, Any]) -> bool:
    """Checks whether a manifest of any format is as its version has sealed it.

    A damaged `format` makes no other version of it: the seal does not fit then.
    """
    if "seal" not in document:
        return run_format.KEY in document
    content = {name: value for name, value in document.items() if name != "seal"}
    return document["seal"] == digest(_dump(content))


def refuse_other_versions(folder: Path) -> None:
    """Checks that no step in a folder was sealed by another version.

    Raises:
      OtherVersion: one was; it names the newest.
    """
    for step in folders.newest_first(folder):
        try:
            read_manifest(folder / str(step))
        except OtherVersion:
            raise
        except (CheckpointError, OSError):
            continue  # damaged, or deleted by now


def check(
    folder: Path,
    step: int,
    *,
    run: str | None = None,
    part: tuple[int, int] = (0, 1),
    contents: bool = True,
    inside: str = "",
    threads: int | None = None,
) -> Manifest:
    """Returns the manifest of a step that is all it was when sealed.

    Args:
      run: the identity that the step must have; None: any.
      part: (i, n): of the files hash only every n-th, from the i-th: n processes share
        the work.
      contents: whether to hash at all, or to look only at names and sizes.
      inside: hash only files whose names begin so.
      threads: how many hash; 1: the caller's; None: up to eight.

    Raises:
      CheckpointError: what is wrong with it.
    """
    path = folders.present_path(folder, step)
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(
            f"it is the checkpoint of step {manifest.step}, not of step {step}"
        )
    if run is not None and manifest.run != run:
        raise CheckpointError(
            f"it belongs to another run ({manifest.run}; this one is {run})"
        )
    sizes = dict(_files(path))
    faults = [f"{name} is missing" for name in manifest.files if name not in sizes]
    faults += [
        f"{name} is not part of it" for name in sizes if name not in manifest.files
    ]
    for name, (size, _) in manifest.files.items():
        if name in sizes and sizes[name] != size:
            faults.append(f"{name} has {sizes[name]} bytes, {size} when sealed")
    if not faults and contents:
        chosen = sorted(file for file in sizes.items() if file[0].startswith(inside))
        hashed = _hashed(path, chosen[part[0] :: part[1]], threads)
        faults = [
            f"{n} has changed since it was sealed"
            for n in hashed
            if hashed[n] != manifest.files[n]
        ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError("; ".join(faults[:_SHOWN]) + more)
    return manifest


def _files(path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields (path inside the step, bytes) of all files but the manifest; -1 bytes of
    what is no such file.

    Those are links, since where they lead may change, pipes, which would hold us, and
    folders too deep.
    """
    for entry in path.iterdir():
        name = prefix + entry.name
        is_link = isinstance(entry, Path) and entry.is_symlink()
        is_folder = entry.is_dir()
        if is_folder and not is_link and prefix.count("/") < _DEEPEST:
            yield from _files(entry, f"{name}/")
        elif is_link or is_folder or (isinstance(entry, Path) and not entry.is_file()):
            yield name, -1
        elif name != MANIFEST:
            yield name, folders.file_bytes(entry)


def _hashed(
    path: Path, files: Sequence[tuple[str, int]], threads: int | None = None
) -> dict[str, tuple[int, str]]:
    names = [path / name for name, _ in files]
    if threads == 1:
        digests = [digest_file(name) for name in names]
    else:
        with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(digest_file, names))
    return {
        name: (size, hex_) for (name, size), hex_ in zip(files, digests, strict=True)
    }


# --- identity -------------------------------------------------------------------------


def identity(folder: Path, *, create: bool, own: str | None = None) -> str | None:
    """Returns the identity of the run that owns `folder`.

    Where the file is absent or damaged it is `own`, or else that of the steps, if all
    are of one run (a step copied to a new folder begins a run there), and with `create`
    written, made up if need be.

    Args:
      own: the identity that the caller's run is known to have.

    Raises:
      CheckpointError: the folder is another run's than `own`, or nothing says whose of
        several it is.
    """
    name = read_identity(folder)
    if name is None:
        steps = _steps_by_run(folder)
        if own is None and len(steps) > 1:
            raise CheckpointError(
                f"{folder} holds steps of several runs, and which of them it belongs to is lost with its "
                f"file {IDENTITY}: {_shown(steps)}; move the steps of all runs but one elsewhere"
            )
        name = (
            own or next(iter(steps), None) or (secrets.token_hex(8) if create else None)
        )
        if create and name:
            atomic.write_text(
                folder / IDENTITY, f"{name} {digest(name)[:8]}\n", durable=True
            )
    elif own not in (None, name):
        raise CheckpointError(
            f"{folder} belongs to run {name}, and this is run {own} (steps there: "
            f"{_shown(_steps_by_run(folder)) or 'none'}); put this run's own checkpoints back"
        )
    return name


def read_identity(folder: Path) -> str | None:
    """Returns the identity that the folder's file names; None if it is absent or
    damaged.
    """
    with contextlib.suppress(OSError, ValueError):
        name, _, check_sum = (
            untrusted.read_bytes(folder / IDENTITY).decode().strip().partition(" ")
        )
        if check_sum == digest(name)[:8]:
            return name
    return None


def _steps_by_run(folder: Path) -> dict[str, list[int]]:
    """Returns {run: its steps with a sound manifest, descending}."""
    runs: dict[str, list[int]] = {}
    for step in reversed(folders.list_steps(folder)):
        with contextlib.suppress(CheckpointError, OSError):
            runs.setdefault(check(folder, step, contents=False).run, []).append(step)
    return runs


def _shown(steps: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(
        f"run {run}: {', '.join(map(str, each[:_SHOWN]))}"
        for run, each in steps.items()
    )


def newest_metadata(folder: Path, run: str | None) -> dict[str, Any]:
    """Reads what the newest step of a run that looks sound says beside its arrays; {}
    if there is none.

    Of its files only those of the metadata are hashed.
    """
    for step in folders.newest_first(folder):
        with contextlib.suppress(CheckpointError, OSError):
            check(folder, step, run=run, inside=f"{folders.METADATA_ITEM}/")
            return folders.read_step(folder, step).metadata
    return {}
