"""The token cache: a text corpus tokenised once, kept as files, found again by what it
was made of.

`<cache_dir>/tokens-<key>/` holds `tokens.bin` (ids of all documents, one after the
other), of chats `weights.bin` (a byte for each of them, 1: learned),
`documents.npy` ([documents, 3] int64: length in tokens, UTF-8 bytes, hash group),
`ids.txt` (their ids, a JSON text per line) and `meta.json`, which has checksums of what
is read. The folder appears whole or not at all. A damaged one is made again; where the
damage shows only while a run reads (large corpora are checked in the background), the
run stops, and its next start makes the folder again.
"""

import contextlib
import hashlib
import json
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.sources import Corpus, Document, one_line
from jaxdist.data.token_files import TokenFile, TokenStore, group_of
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic, lock, run_format
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import open_regular, read_json

_VERSION = 3  # of the layout above, in the key: a cache of another is made anew
_BATCH_CHARACTERS = 4_000_000  # tokenised at once: enough for all cores, little memory
_TOKENS, _WEIGHTS, _DOCUMENTS = "tokens.bin", "weights.bin", "documents.npy"
_PROGRESS_S = 5.0  # between two lines of progress
# of one checksum; up to so many are checked at the start (0.04 s), more behind it
_CHECKED_BYTES = 64 << 20
_IDLE_SHARE = 3  # a check in the background sleeps so much longer than it works

Log = Callable[[str], None]


class Encoder(Protocol):
    """What makes tokens of documents."""

    vocab_size: int  # largest id + 1
    fingerprint: str  # equal exactly when encoding is equal

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Returns of each document ids and weights (1: learned; no list: all), and what
        it counted.
        """

    def notes(self, counts: Counter[str]) -> list[str]:
        """Returns what to say of a corpus, from all that `encode` has counted of it."""


class TextEncoder:
    """Documents are texts, each of which ends with the tokenizer's end-of-document id,
    if it has one.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.vocab_size, self.fingerprint = tokenizer.vocab_size, tokenizer.fingerprint

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Returns the ids of texts, all learned, and how often they spell which special
        token.
        """
        special, end = self._tokenizer.special_tokens, self._tokenizer.end_of_document
        ids = self._tokenizer.encode_documents(
            [document.text for document in documents]
        )
        spelt: Counter[str] = Counter()
        if special:
            joined = np.concatenate(ids)
            pairs = np.unique(
                joined[np.isin(joined, list(special))], return_counts=True
            )
            spelt.update(
                {
                    special[i]: n
                    for i, n in zip(*(x.tolist() for x in pairs), strict=True)
                }
            )
        return [np.append(x, end) for x in ids] if end is not None else ids, [], spelt

    def notes(self, counts: Counter[str]) -> list[str]:
        """Returns which special tokens the texts spell."""
        spelt = one_line(", ".join(f"{name} {count}" for name, count in counts.items()))
        line = (
            f"its texts spell special tokens, and these are encoded as such ({spelt}); "
            "data.special_tokens=text encodes their characters"
        )
        return [line] if counts else []


def open_tokens(corpus: Corpus, encoder: Encoder, folder: Path, log: Log) -> TokenStore:
    """Returns the corpus as tokens, from `folder` if they are there, else made and kept
    there. Raises ConfigError where the corpus is empty, the folder cannot be written,
    or a document is refused."""
    key = digest(_VERSION, corpus.name, corpus.stamp, encoder.fingerprint)[:16]
    target = folder / f"tokens-{key}"
    with one_builder(target, log):
        if (store := _load(target, corpus.name, log)) is None:
            _build(corpus, encoder, target, log)
            store = _load(target, corpus.name, log)
            if store is None:
                raise OSError("what was just written cannot be read back")
    return store


@contextlib.contextmanager
def one_builder(target: Path, log: Log) -> Iterator[None]:
    """Holds the lock of `target`, so that processes of one machine do its work once.
    Raises ConfigError where files cannot be read or written, now or in the body."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"data: waiting for another process that makes {target.name}"
        # Without locks on this file system the work may be done twice, the rename still
        # wins.
        with lock.exclusive(Path(f"{target}.lock"), before_wait=lambda: log(waiting)):
            yield
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={target.parent}: cannot make {target.name} ({error}). "
            "Free space there, or set data.cache_dir or data.path."
        ) from error


def _load(target: Path, name: str, log: Log) -> TokenStore | None:
    """Returns the store of a cache folder, and says what is to know of it; None: it is
    absent or damaged.
    """
    try:
        meta = run_format.unmarked(read_json(target / "meta.json", dict), target)
        if meta.pop("digest") != _digest_of(meta):
            return None
        table, expected = target / _DOCUMENTS, meta["checksums"]
        if list(_checksums(table)) != expected[table.name]:
            return None
        with open_regular(table) as content:
            documents = np.load(content, allow_pickle=False)
        dtypes = {_TOKENS: meta["dtype"], _WEIGHTS: "<u1"}
        names = [name for name in dtypes if name in expected]
        files = [
            TokenFile(target / name, dtypes[name], count=meta["tokens"])
            for name in names
        ]
        large = [file for file in files if len(expected[file.path.name]) > 1]
        notes = meta["notes"]
        for file in files:
            if (
                file not in large
                and list(_checksums(file.path)) != expected[file.path.name]
            ):
                return None
    except (OSError, ValueError, KeyError):
        return None
    for file in large:
        checked = (file, expected[file.path.name], target / "meta.json")
        threading.Thread(
            target=_check_slowly, args=checked, name="jaxdist-token-check", daemon=True
        ).start()
    length, num_bytes, group = documents.T
    owner, start, group = (
        np.zeros(len(length), np.int32),
        np.cumsum(length) - length,
        group.astype(np.uint8),
    )
    for note in notes:
        log(f"data: {name}: {note}")
    metadata = {"max_id": meta["max_id"], "fingerprint": meta["fingerprint"]}
    tokens, weights = tuple(files[:1]), tuple(files[1:])
    # a chat's are not those of its learned tokens
    known = None if weights else num_bytes
    return TokenStore(
        name, tokens, owner, start, length, group, known, weights=weights, **metadata
    )


def _digest_of(meta: dict[str, Any]) -> str:
    return digest(json.dumps(meta, sort_keys=True))


def _checksums(path: Path) -> Iterator[int]:
    """Yields the CRC-32 of each _CHECKED_BYTES of a file."""
    with open_regular(path) as file:
        while piece := file.read(_CHECKED_BYTES):
            yield zlib.crc32(piece)


def _check_slowly(file: TokenFile, expected: list[int], meta: Path) -> None:
    """Compares a file with its checksums, slowly. Damage stops its readers, and removes
    `meta`, so that the next start makes the cache again."""
    begin_s = time.perf_counter()
    # Of a file that is gone or shorter its readers learn by themselves.
    with contextlib.suppress(OSError, ValueError):
        for number, (crc, right) in enumerate(
            zip(_checksums(file.path), expected, strict=True)
        ):
            if crc != right:
                place = f"the {_CHECKED_BYTES >> 20} MiB from byte {number * _CHECKED_BYTES}"
                file.fault = (
                    f"{file.path}: {place} are not what was written there. The next start makes the cache "
                    "again; if it happens often, check that disk or set data.cache_dir"
                )
                meta.unlink(missing_ok=True)
                return
            time.sleep(_IDLE_SHARE * (time.perf_counter() - begin_s))
            begin_s = time.perf_counter()


def _build(corpus: Corpus, encoder: Encoder, target: Path, log: Log) -> None:
    try:
        with atomic.replacing(target) as partial:
            partial.mkdir()
            _write(corpus, encoder, partial, log)
            if target.exists():  # _load refused it
                log(f"data: {target} is damaged; made again")
                shutil.rmtree(target)
    except OSError:
        # not just another process that was faster
        if not (target / "meta.json").is_file():
            raise


def _write(corpus: Corpus, encoder: Encoder, part: Path, log: Log) -> None:
    vocab = encoder.vocab_size
    # From the largest id: vocabularies may have gaps, so that a count of their entries
    # is too small.
    dtype = np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")
    rows: list[tuple[int, int, int]] = []
    counts: Counter[str] = Counter()
    content, max_id, begin_s = hashlib.sha256(), 0, time.monotonic()
    progress_s, files = begin_s, [_TOKENS]
    with contextlib.ExitStack() as opened:
        tokens, weights = (
            opened.enter_context((part / name).open("wb"))
            for name in (_TOKENS, _WEIGHTS)
        )
        names = opened.enter_context((part / "ids.txt").open("w"))
        for batch in _batches(corpus):
            ids, learned, counted = encoder.encode(batch)
            counts += counted
            block = _narrowed(np.concatenate(ids), dtype, encoder)
            content.update(block.data)
            tokens.write(block.data)
            if learned:
                files = [_TOKENS, _WEIGHTS]
                mask = np.concatenate(learned).astype(np.uint8)
                content.update(mask.data)
                weights.write(mask.data)
            max_id = max(max_id, int(block.max(initial=0)))
            groups = group_of(document.id for document in batch)
            sizes = (
                len(document.text.encode("utf-8", "replace")) for document in batch
            )
            rows += zip(map(len, ids), sizes, groups.tolist(), strict=True)
            names.writelines(json.dumps(document.id) + "\n" for document in batch)
            if time.monotonic() - progress_s > _PROGRESS_S:
                progress_s = time.monotonic()
                log(f"data: {_amount(rows)} after {progress_s - begin_s:.0f} s")
    if _WEIGHTS not in files:
        (part / _WEIGHTS).unlink()
    if not rows:
        raise ConfigError(
            f"data.source: {corpus.name} has no documents. Set data.path."
        )
    table = np.asarray(rows, np.int64)
    np.save(part / _DOCUMENTS, table)
    meta = {
        "version": _VERSION,
        "corpus": corpus.name,
        "summary": corpus.summary,
        "tokenizer": encoder.fingerprint,
        "dtype": dtype.str,
        "checksums": {
            name: list(_checksums(part / name)) for name in (*files, _DOCUMENTS)
        },
        "documents": len(rows),
        "tokens": int(table[:, 0].sum()),
        "max_id": max_id,
        "notes": encoder.notes(counts),
        "fingerprint": digest(content.hexdigest(), digest_bytes(table.tobytes())),
    }
    (part / "meta.json").write_text(
        json.dumps(
            run_format.marked(meta | {"digest": _digest_of(meta)}),
            indent=1,
        )
    )
    log(
        f"data: tokenised {_amount(rows)} in {time.monotonic() - begin_s:.1f} s -> {part.parent}"
    )


def _narrowed(ids: np.ndarray, dtype: np.dtype, encoder: Encoder) -> np.ndarray:
    """Returns ids as the cache holds them.
    Raises ConfigError where one is outside the tokenizer's vocabulary: it might
    wrap."""
    for extreme in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= extreme < encoder.vocab_size:
            raise ConfigError(
                f"data.tokenizer: it makes id {extreme}, outside its vocabulary of ids 0 to "
                f"{encoder.vocab_size - 1} (fingerprint {encoder.fingerprint[:12]}); use another one."
            )
    return ids.astype(dtype)


def _amount(rows: list[tuple[int, int, int]]) -> str:
    tokens, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return f"{len(rows)} documents, {size / 1e6:.2f} MB, {tokens} tokens"


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    """Yields the documents in lists of about _BATCH_CHARACTERS characters."""
    batch, size = [], 0
    for document in corpus.documents():
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
