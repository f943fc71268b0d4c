"""Integrity of checkpoints: a sealed manifest per step, and the identity of its run.

    <folder>/<step>/manifest.json  {format, step, run, files, fingerprints, seal}
    <folder>/identity              the run whose steps these are

`files` is {path: [bytes, sha256]}, `fingerprints` is {array: hex}, and `seal` is the
SHA-256 of the rest. The manifest is written last, and seals the step. `folders.py`
defines what sealed, damaged and intact mean. A step of another run than `identity` is
damaged.

SHA-256 is in the standard library, and `sha256sum` checks it by hand. It takes a second
per GiB on a core, which is hidden behind training. Process 0 hashes the files after
Orbax has written them, because Orbax merges the files of all processes at the end. On
restore the processes split the work. This module needs neither jax nor a device.
"""

import contextlib
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import folders
from jaxdist.checkpoint.folders import MANIFEST, CheckpointError
from jaxdist.storage import atomic, run_format, untrusted
from jaxdist.storage.digest import digest, digest_file
from jaxdist.storage.paths import is_local
from jaxdist.storage.untrusted import named, of_kind

IDENTITY = "identity"
MAX_IDENTITY_BYTES = 1024
_HALF_IDENTITY = re.compile(rb"[0-9a-f]{0,16}( [0-9a-f]{0,8})?\s*")
_DEEPEST = 20  # deepest nesting of folders; Orbax's steps have 3 levels
_LOW_PRIORITY = 10  # nice value: a tenth of the time of a thread with 0
_SHOWN = 3  # faults of a step that a message lists


class OtherVersion(CheckpointError):
    """Error of a step that another version of jaxdist has sealed."""


@dataclass(frozen=True)
class Manifest:
    """Content that a sealed step must have."""

    step: int
    run: str  # identity of the run that wrote it
    files: dict[str, tuple[int, str]]  # {path inside the step: (bytes, sha256)}
    fingerprints: dict[str, str]  # {array: hex}, by `fingerprint.py`


# --- Writing --------------------------------------------------------------------------


def seal(
    folder: Path,
    step: int,
    run: str,
    fingerprints: Mapping[str, str],
    *,
    beside: bool = False,
) -> None:
    """Hashes every file of a step and writes its manifest: from then on it counts.

    Args:
      folder: folder of the checkpoints.
      step: step to seal.
      run: identity of its run.
      fingerprints: fingerprint of each array, by name.
      beside: whether steps are trained meanwhile. Then the threads that hash leave the
        cores to them.

    Raises:
      OSError: a file cannot be read, or the manifest cannot be written.
    """
    path = folder / str(step)
    manifest = Manifest(
        step=step,
        run=run,
        files=_hashed(path, sorted(_files(path)), beside=beside),
        fingerprints=dict(fingerprints),
    )
    try:
        atomic.write_text(path / MANIFEST, _text(manifest), durable=True)
    except OSError:
        # The file may exist, but be lost in a power failure. A failed step must not
        # count, so it is removed.
        with contextlib.suppress(OSError):
            (path / MANIFEST).unlink()
        raise


def _text(manifest: Manifest) -> str:
    document = run_format.marked(vars(manifest))
    document["seal"] = digest(_dump(document))
    return _dump(document)


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, indent=1)


# --- Checking -------------------------------------------------------------------------


def read_manifest(path: Path, *, place: object = None) -> Manifest:
    """Reads the manifest of a step's folder.

    Args:
      path: folder of the step.
      place: name of the folder for the error about another version; the default is
        `path`.

    Raises:
      OtherVersion: another version of jaxdist has sealed the step.
      CheckpointError: there is no manifest, or its content is not what was sealed.
    """
    try:
        content = untrusted.read_bytes(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{MANIFEST} is missing: half-written or planted"
        ) from None
    except untrusted.Malformed as error:
        raise CheckpointError(f"{MANIFEST} is not readable: {error}") from error
    return parse_manifest(content, place or path)


def parse_manifest(content: bytes, place: object) -> Manifest:
    """Parses the content of a manifest.

    Args:
      content: the bytes of the file.
      place: name of the step for the error about another version.

    Raises:
      OtherVersion: another version of jaxdist has sealed the step.
      CheckpointError: the content is not what was sealed.
    """
    try:
        text = content.decode()
        document = untrusted.parse_json(text, dict)
        if _seal_fits(document):
            other = run_format.fault(document, place)
            if other:
                raise OtherVersion(other)
        manifest = Manifest(
            step=of_kind(document["step"], int, "step"),
            run=of_kind(document["run"], str, "run"),
            files={
                name: (of_kind(size, int, name), of_kind(hex_, str, name))
                for name, (size, hex_) in document["files"].items()
            },
            fingerprints={
                name: of_kind(hex_, str, name)
                for name, hex_ in document["fingerprints"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is not readable: {named(error)}") from error
    if text != _text(manifest):  # this includes a changed seal or format
        raise CheckpointError(
            f"{MANIFEST} is damaged: its seal does not fit its content"
        )
    return manifest


def _seal_fits(document: Mapping[str, Any]) -> bool:
    """Checks whether the seal of a manifest of any format fits its content.

    If only `format` is damaged, the seal does not fit: this is no other version.
    """
    if "seal" not in document:
        return run_format.KEY in document
    content = {name: value for name, value in document.items() if name != "seal"}
    return bool(document["seal"] == digest(_dump(content)))


def refuse_other_versions(folder: Path) -> None:
    """Checks that no step in a folder was sealed by another version of jaxdist.

    Raises:
      OtherVersion: a step was. The error names the newest one.
    """
    for step in folders.newest_first(folder):
        try:
            read_manifest(folder / str(step))
        except OtherVersion:
            raise
        except (CheckpointError, OSError):
            continue  # the step is damaged, or its run has deleted it


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
    """Checks that a step's files are as they were when sealed; returns the manifest.

    Args:
      folder: folder of the checkpoints.
      step: step to check.
      run: identity that the step must have. None accepts any.
      part: (i, n) hashes only every n-th file, from the i-th, so that n processes split
        the work.
      contents: whether to hash files, or to compare only names and sizes.
      inside: hash only files whose names begin with this text.
      threads: number of threads that hash. 1 uses the caller's thread, None uses up to
        eight.

    Raises:
      CheckpointError: the faults of the step.
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
    faults = _size_faults(sizes, manifest)
    if not faults and contents:
        chosen = sorted(
            (name, size) for name, size in sizes.items() if name.startswith(inside)
        )
        first, stride = part
        hashed = _hashed(path, chosen[first::stride], threads)
        faults = [
            f"{name} has changed since it was sealed"
            for name in hashed
            if hashed[name] != manifest.files[name]
        ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError("; ".join(faults[:_SHOWN]) + more)
    return manifest


def _size_faults(sizes: Mapping[str, int], manifest: Manifest) -> list[str]:
    """Compares names and sizes of files, {name: bytes}, with those in the manifest."""
    faults = [f"{name} is missing" for name in manifest.files if name not in sizes]
    faults += [
        f"{name} is not part of it" for name in sizes if name not in manifest.files
    ]
    for name, (size, _) in manifest.files.items():
        if name in sizes and sizes[name] != size:
            faults.append(f"{name} has {sizes[name]} bytes, {size} when sealed")
    return faults


def _files(path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields (path inside the step, bytes) of all files except the manifest.

    The size is -1 for entries that no step has: links, pipes, and folders that are too
    deep. The target of a link may change, and reading a pipe would block.
    """
    for entry in path.iterdir():
        name = prefix + entry.name
        is_link = is_local(entry) and entry.is_symlink()
        is_folder = entry.is_dir()
        if is_folder and not is_link and prefix.count("/") < _DEEPEST:
            yield from _files(entry, f"{name}/")
        elif is_link or is_folder or (is_local(entry) and not entry.is_file()):
            yield name, -1
        elif name != MANIFEST:
            yield name, folders.file_bytes(entry)


def _hashed(
    path: Path,
    files: Sequence[tuple[str, int]],
    threads: int | None = None,
    *,
    beside: bool = False,
) -> dict[str, tuple[int, str]]:
    """Hashes files, {name: (bytes, sha256)}, by up to `threads` threads.

    With `beside`, the threads have a low priority.
    """
    names = [path / name for name, _ in files]
    if threads == 1:
        digests = [digest_file(name) for name in names]
    else:
        count = threads or min(8, os.cpu_count() or 1)
        begin = _lower_priority if beside else None
        with ThreadPoolExecutor(count, "hash", begin) as pool:
            digests = list(pool.map(digest_file, names))
    return {
        name: (size, hex_) for (name, size), hex_ in zip(files, digests, strict=True)
    }


def _lower_priority() -> None:
    """Makes this thread take only cores that other threads leave idle, and 10 % of others.

    Only Linux has priorities of threads.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


# --- Identity -------------------------------------------------------------------------


def identity(folder: Path, *, create: bool, own: str | None = None) -> str | None:
    """Reads or creates the identity of the run that owns `folder`.

    If the file is absent or damaged, the identity is `own`. Without `own` it is the
    identity of the steps, if all belong to one run. A step that was copied to a new
    folder therefore starts a run there.

    Args:
      folder: folder of the checkpoints.
      create: whether to write the file, with a random identity if there is no other.
      own: identity of the caller's run, if it is known.

    Returns:
      The identity, or None if there is none.

    Raises:
      CheckpointError: the folder belongs to another run than `own`, or holds steps of
        several runs and no file says which one owns it.
    """
    name = read_identity(folder)
    if name is None:
        steps = _steps_by_run(folder)
        if own is None and len(steps) > 1:
            raise CheckpointError(
                f"{folder} holds steps of several runs: {shown_steps(steps)}. Its file {IDENTITY}, which names "
                f"the owner, is lost. Move the steps of all runs but one elsewhere."
            )
        name = own or next(iter(steps), None)
        if create:
            name = name or secrets.token_hex(8)
            atomic.write_bytes(folder / IDENTITY, identity_file(name), durable=True)
    elif own not in (None, name):
        raise CheckpointError(
            f"{folder} belongs to run {name}, and this is run {own} (steps there: "
            f"{shown_steps(_steps_by_run(folder)) or 'none'}). Put the checkpoints of this run back."
        )
    return name


def read_identity(folder: Path) -> str | None:
    """Reads the identity in the folder's file; None if it is absent or damaged."""
    with contextlib.suppress(OSError, untrusted.Malformed):
        return parse_identity(untrusted.read_bytes(folder / IDENTITY))
    return None


def identity_file(name: str) -> bytes:
    """Makes the content of the file that names the owner of a folder of steps."""
    return f"{name} {digest(name)[:8]}\n".encode()


def parse_identity(content: bytes) -> str:
    """Reads the identity in the content of such a file.

    Raises:
      Malformed: the content is empty or no identity.
    """
    if not content.strip():
        raise untrusted.Malformed("it is empty")
    if len(content) > MAX_IDENTITY_BYTES:
        raise untrusted.Malformed(f"it has more than {MAX_IDENTITY_BYTES:,} bytes")
    name, _, check_sum = content.decode(errors="replace").strip().partition(" ")
    if check_sum != digest(name)[:8]:
        raise untrusted.Malformed(f"its {len(content)} bytes are no identity")
    return name


def is_half_identity(content: bytes) -> bool:
    """Tests whether a content is the begin of an identity, as a kill leaves it."""
    return _HALF_IDENTITY.fullmatch(content) is not None


def _steps_by_run(folder: Path) -> dict[str, list[int]]:
    """Groups the steps by run: {run: steps, descending}; contents are not hashed."""
    runs: dict[str, list[int]] = {}
    for step in reversed(folders.list_steps(folder)):
        with contextlib.suppress(CheckpointError, OSError):
            runs.setdefault(check(folder, step, contents=False).run, []).append(step)
    return runs


def shown_steps(steps: Mapping[str, Sequence[int]]) -> str:
    """Formats steps by run, a few of each."""
    return "; ".join(
        f"run {run}: {', '.join(map(str, each[:_SHOWN]))}"
        for run, each in steps.items()
    )


def newest_metadata(folder: Path, run: str | None) -> dict[str, Any]:
    """Reads the metadata of a run's newest sealed step, if the metadata is unchanged.

    A step with changed metadata is skipped; without any other, the result is {}. Other
    files are not hashed, so the step may still be damaged.
    """
    for step in folders.newest_first(folder):
        with contextlib.suppress(CheckpointError, OSError):
            check(folder, step, run=run, inside=f"{folders.METADATA_ITEM}/")
            return folders.read_step(folder, step).metadata
    return {}
