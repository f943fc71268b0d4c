"""The token cache: a text corpus tokenised once, kept as files, found again by what it was made of.

`<cache_dir>/tokens-<key>/` holds `tokens.bin` (ids of all documents, one after the other),
`documents.npy` ([documents, 3] int64: length in tokens, UTF-8 bytes, hash group), `ids.txt` (their
ids, a JSON text per line) and `meta.json`, which has checksums of what is read. The folder appears
whole or not at all. A damaged one is made again; where the damage shows only while a run reads (large
corpora are checked in the background), the run stops, and its next start makes the folder again.
"""

import contextlib
import hashlib
import json
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.sources import Corpus, Document, one_line
from jaxdist.data.token_files import TokenFile, TokenStore, group_of
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic, lock
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import open_regular, read_json

_VERSION = 2  # 2: ids are not wrapped, checksums; of the layout above; part of the key
_BATCH_CHARACTERS = 4_000_000  # tokenised at once: enough for all cores, little memory
_PROGRESS_S = 5.0  # between two lines of progress
_CHECKED_BYTES = 64 << 20  # of one checksum; up to so many are checked at the start (0.04 s), more behind it
_IDLE_SHARE = 3  # a check in the background sleeps so much longer than it works

Log = Callable[[str], None]


def open_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, log: Log) -> TokenStore:
    """Returns the corpus as tokens, from `folder` if they are there, else made and kept there.

    Each document ends with the tokenizer's end-of-document id, if it has one.
    Raises ConfigError where the corpus is empty or the folder cannot be written."""
    key = digest(_VERSION, corpus.name, corpus.stamp, tokenizer.fingerprint)[:16]
    target = folder / f"tokens-{key}"
    with one_builder(target, log):
        if (store := _load(target, corpus.name)) is None:
            _build(corpus, tokenizer, target, log)
            store = _load(target, corpus.name)
            if store is None:
                raise OSError("what was just written cannot be read back")
    if store.special_tokens:
        counts = one_line(", ".join(f"{name} {count}" for name, count in store.special_tokens.items()))
        log(
            f"data: {corpus.name}: its texts spell special tokens, and these are encoded as such ({counts}); "
            "data.special_tokens=text encodes their characters"
        )
    return store


@contextlib.contextmanager
def one_builder(target: Path, log: Log) -> Iterator[None]:
    """Holds the lock of `target`, so that processes of one machine do its work once.
    Raises ConfigError where files cannot be read or written, now or in the body."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"data: waiting for another process that makes {target.name}"
        # Without locks on this file system the work may be done twice, the rename still wins.
        with lock.exclusive(Path(f"{target}.lock"), before_wait=lambda: log(waiting)):
            yield
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={target.parent}: cannot make {target.name} ({error}). "
            "Free space there, or set data.cache_dir or data.path."
        ) from error


def _load(target: Path, name: str) -> TokenStore | None:
    """Returns the store of a cache folder; None where it is absent or damaged."""
    try:
        meta = read_json(target / "meta.json", dict)
        if meta.pop("digest") != _digest_of(meta):
            return None
        tokens, table = target / "tokens.bin", target / "documents.npy"
        expected = meta["checksums"]
        if list(_checksums(table)) != expected[table.name]:
            return None
        with open_regular(table) as content:
            documents = np.load(content, allow_pickle=False)
        file = TokenFile(tokens, meta["dtype"], count=meta["tokens"])
        small = len(expected[tokens.name]) <= 1
        if small and list(_checksums(tokens)) != expected[tokens.name]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    if not small:
        checked = (file, expected[tokens.name], target / "meta.json")
        threading.Thread(target=_check_slowly, args=checked, name="jaxdist-token-check", daemon=True).start()
    length, num_bytes, group = documents.T
    owner, start, group = np.zeros(len(length), np.int32), np.cumsum(length) - length, group.astype(np.uint8)
    metadata = {"max_id": meta["max_id"], "fingerprint": meta["fingerprint"]}
    special = meta.get("special_tokens", {})  # not in older caches, which have none
    return TokenStore(
        name, (file,), owner, start, length, group, num_bytes, special_tokens=special, **metadata
    )


def _digest_of(meta: dict[str, Any]) -> str:
    return digest(json.dumps(meta, sort_keys=True))


def _checksums(path: Path) -> Iterator[int]:
    """Yields the CRC-32 of each _CHECKED_BYTES of a file."""
    with open_regular(path) as file:
        while piece := file.read(_CHECKED_BYTES):
            yield zlib.crc32(piece)


def _check_slowly(file: TokenFile, expected: list[int], meta: Path) -> None:
    """Compares a file with its checksums, slowly. Damage stops its readers, and removes `meta`, so that
    the next start makes the cache again."""
    begin_s = time.perf_counter()
    # Of a file that is gone or shorter its readers learn by themselves.
    with contextlib.suppress(OSError, ValueError):
        for number, (crc, right) in enumerate(zip(_checksums(file.path), expected, strict=True)):
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


def _build(corpus: Corpus, tokenizer: Tokenizer, target: Path, log: Log) -> None:
    try:
        with atomic.replacing(target) as partial:
            partial.mkdir()
            _write(corpus, tokenizer, partial, log)
            if target.exists():  # _load refused it
                log(f"data: {target} is damaged; made again")
                shutil.rmtree(target)
    except OSError:
        if not (target / "meta.json").is_file():  # not just another process that was faster
            raise


def _write(corpus: Corpus, tokenizer: Tokenizer, part: Path, log: Log) -> None:
    vocab, end = tokenizer.vocab_size, tokenizer.end_of_document
    # From the largest id: vocabularies may have gaps, so that a count of their entries is too small.
    dtype = np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")
    rows: list[tuple[int, int, int]] = []
    spelt: Counter[str] = Counter()  # special tokens in texts
    content, max_id, begin_s = hashlib.sha256(), 0, time.monotonic()
    progress_s = begin_s
    with (part / "tokens.bin").open("wb") as tokens, (part / "ids.txt").open("w") as names:
        for batch in _batches(corpus):
            texts = [document.text for document in batch]
            ids = tokenizer.encode_documents(texts)
            spelt += _special_tokens(ids, tokenizer)
            if end is not None:
                ids = [np.append(document, end) for document in ids]
            block = _narrowed(np.concatenate(ids), dtype, tokenizer)
            content.update(block.data)
            tokens.write(block.data)
            max_id = max(max_id, int(block.max(initial=0)))
            groups = group_of(document.id for document in batch)
            sizes = (len(text.encode("utf-8", "replace")) for text in texts)
            rows += zip(map(len, ids), sizes, groups.tolist(), strict=True)
            names.writelines(json.dumps(document.id) + "\n" for document in batch)
            if time.monotonic() - progress_s > _PROGRESS_S:
                progress_s = time.monotonic()
                log(f"data: {_amount(rows)} after {progress_s - begin_s:.0f} s")
    if not rows:
        raise ConfigError(f"data.source: {corpus.name} has no documents. Set data.path.")
    table = np.asarray(rows, np.int64)
    np.save(part / "documents.npy", table)
    meta = {
        "version": _VERSION,
        "corpus": corpus.name,
        "summary": corpus.summary,
        "tokenizer": tokenizer.fingerprint,
        "dtype": dtype.str,
        "checksums": {name: list(_checksums(part / name)) for name in ("tokens.bin", "documents.npy")},
        "documents": len(rows),
        "tokens": int(table[:, 0].sum()),
        "max_id": max_id,
        "special_tokens": spelt,
        "fingerprint": digest(content.hexdigest(), digest_bytes(table.tobytes())),
    }
    (part / "meta.json").write_text(json.dumps(meta | {"digest": _digest_of(meta)}, indent=1))
    log(f"data: tokenised {_amount(rows)} in {time.monotonic() - begin_s:.1f} s -> {part.parent}")


def _special_tokens(documents: list[np.ndarray], tokenizer: Tokenizer) -> Counter[str]:
    """Returns how often texts spell each of the special tokens."""
    if not tokenizer.special_tokens:
        return Counter()
    ids = np.concatenate(documents)
    numbers, counts = np.unique(ids[np.isin(ids, list(tokenizer.special_tokens))], return_counts=True)
    names = (tokenizer.special_tokens[number] for number in numbers.tolist())
    return Counter(dict(zip(names, counts.tolist(), strict=True)))


def _narrowed(ids: np.ndarray, dtype: np.dtype, tokenizer: Tokenizer) -> np.ndarray:
    """Returns ids as the cache holds them.
    Raises ConfigError where one is outside the tokenizer's vocabulary: it might wrap."""
    for extreme in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= extreme < tokenizer.vocab_size:
            raise ConfigError(
                f"data.tokenizer: it makes id {extreme}, outside its vocabulary of ids 0 to "
                f"{tokenizer.vocab_size - 1} (fingerprint {tokenizer.fingerprint[:12]}); use another one."
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
