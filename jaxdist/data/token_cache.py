"""The token cache: a text corpus tokenised once, kept as files, found again by what it was made of.

`<cache_dir>/tokens-<key>/` holds `tokens.bin` (ids of all documents, one after the other),
`documents.npy` ([documents, 3] int64: length in tokens, UTF-8 bytes, hash group), `ids.txt` (their
ids, a JSON text per line) and `meta.json`. The folder appears whole or not at all.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.sources import Corpus, Document
from jaxdist.data.token_files import TokenFile, TokenStore, group_of
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic, lock
from jaxdist.storage.digest import digest, digest_bytes

_VERSION = 1  # of the layout above; part of the key
_BATCH_CHARACTERS = 4_000_000  # tokenised at once: enough for all cores, little memory
_PROGRESS_S = 5.0  # between two lines of progress

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
            assert store is not None, target
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
        meta = json.loads((target / "meta.json").read_text())
        documents = np.load(target / "documents.npy", allow_pickle=False)
        file = TokenFile(target / "tokens.bin", meta["dtype"], count=meta["tokens"])
    except (OSError, ValueError, KeyError):
        return None
    length, num_bytes, group = documents.T
    if length.sum() != meta["tokens"] or len(documents) != meta["documents"]:
        return None
    owner, start, group = np.zeros(len(length), np.int32), np.cumsum(length) - length, group.astype(np.uint8)
    metadata = {"max_id": meta["max_id"], "fingerprint": meta["fingerprint"]}
    return TokenStore(name, (file,), owner, start, length, group, num_bytes, **metadata)


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
    dtype = np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")
    rows: list[tuple[int, int, int]] = []
    content, max_id, begin_s = hashlib.sha256(), 0, time.monotonic()
    progress_s = begin_s
    with (part / "tokens.bin").open("wb") as tokens, (part / "ids.txt").open("w") as names:
        for batch in _batches(corpus):
            texts = [document.text for document in batch]
            ids = tokenizer.encode_documents(texts)
            if end is not None:
                ids = [np.append(document, end) for document in ids]
            block = np.concatenate(ids).astype(dtype)
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
        "documents": len(rows),
        "tokens": int(table[:, 0].sum()),
        "max_id": max_id,
        "fingerprint": digest(content.hexdigest(), digest_bytes(table.tobytes())),
    }
    (part / "meta.json").write_text(json.dumps(meta, indent=1))
    log(f"data: tokenised {_amount(rows)} in {time.monotonic() - begin_s:.1f} s -> {part.parent}")


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
