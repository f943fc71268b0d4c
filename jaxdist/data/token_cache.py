"""Token cache: a text corpus that is tokenized once, under a hash of its inputs.

`<cache_dir>/tokens-<key>/` holds these files:

    tokens.bin     ids of all documents, one after another
    weights.bin    only for chats: a byte for each id, 1 = learned
    documents.npy  [documents, 3] int64: length in tokens, UTF-8 bytes, hash group
    meta.json      description of the corpus, and checksums of the other files

The folder appears whole or not at all. A damaged one is made again. Large files are
checked in the background. If they are damaged, the run stops, and its next start makes
the folder again.
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
from typing import IO, Any, Protocol, Self

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data.reading import one_line
from jaxdist.data.sources.documents import Corpus, Document
from jaxdist.data.token_files import TokenFile, TokenStore, group_of
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic, lock, run_format
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import open_regular, read_json

# Version of the layout above. It is a part of the key, so caches of other versions are
# not read.
_VERSION = 3
# Characters that are tokenized at once: enough for all cores, and little memory.
_BATCH_CHARACTERS = 4_000_000
_TOKENS = "tokens.bin"
_WEIGHTS = "weights.bin"
_DOCUMENTS = "documents.npy"
_PROGRESS_S = 5.0  # seconds between two lines of progress
# Bytes of one checksum. A file of no more bytes is checked at the start (0.04 s), a
# larger one in the background.
_CHECKED_BYTES = 64 << 20
_IDLE_SHARE = 3  # ratio of sleep to work of a check in the background

Log = Callable[[str], None]


class Encoder(Protocol):
    """Encoder of documents to tokens."""

    vocab_size: int  # largest id + 1
    fingerprint: str  # equal exactly when encoding is equal

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Encodes documents.

        Returns:
          The ids of each document; the weights of its ids (1 = learned; [] = all are);
          counts for `notes`.
        """

    def notes(self, counts: Counter[str]) -> list[str]:
        """Formats lines to log about a corpus, from the sum of its counts."""


class TextEncoder:
    """Encoder of texts, with an end-of-document id if the tokenizer has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.fingerprint = tokenizer.fingerprint

    def encode(
        self, documents: Sequence[Document]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        """Encodes texts, and counts the special tokens that they spell.

        All ids are learned.
        """
        texts = [document.text for document in documents]
        ids = self._tokenizer.encode_documents(texts)
        special = self._tokenizer.special_tokens
        num_special: Counter[str] = Counter()
        if special:
            joined = np.concatenate(ids)
            special_ids, counts = np.unique(
                joined[np.isin(joined, list(special))], return_counts=True
            )
            for token_id, count in zip(
                special_ids.tolist(), counts.tolist(), strict=True
            ):
                num_special[special[token_id]] += count
        end = self._tokenizer.end_of_document
        if end is not None:
            ids = [np.append(document_ids, end) for document_ids in ids]
        return ids, [], num_special

    def notes(self, counts: Counter[str]) -> list[str]:
        """Lists the special tokens that the texts spell, on one line."""
        if not counts:
            return []
        listed = one_line(
            ", ".join(f"{name} {count}" for name, count in counts.items())
        )
        return [
            "its texts spell special tokens, and these are encoded as such "
            f"({listed}); data.special_tokens=text encodes their characters"
        ]


def open_tokens(corpus: Corpus, encoder: Encoder, folder: Path, log: Log) -> TokenStore:
    """Opens the tokens of a corpus in `folder`, and makes them if they are absent.

    Raises:
      ConfigError: the corpus is empty, the folder cannot be written, or a document is
        refused.
    """
    key = digest(_VERSION, corpus.name, corpus.stamp, encoder.fingerprint)[:16]
    target = folder / f"tokens-{key}"
    with build_lock(target, log):
        store = _load(target, corpus.name, log)
        if store is None:
            _build(corpus, encoder, target, log)
            store = _load(target, corpus.name, log)
        if store is None:
            raise OSError("what was just written cannot be read back")
    return store


@contextlib.contextmanager
def build_lock(target: Path, log: Log) -> Iterator[None]:
    """Holds the lock of `target`, so that only one process of a machine makes it.

    Raises:
      ConfigError: files cannot be read or written, now or in the body.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"data: waiting for another process that makes {target.name}"
        # On a file system without locks, the work may be done twice. The rename still
        # leaves one whole result.
        with lock.exclusive(Path(f"{target}.lock"), before_wait=lambda: log(waiting)):
            yield
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={target.parent}: cannot make {target.name} ({error}). "
            "Free space there, or set data.cache_dir or data.path."
        ) from error


def _load(target: Path, name: str, log: Log) -> TokenStore | None:
    """Opens a cache folder, and logs its notes; None if it is absent or damaged.

    Large files are checked in the background.
    """
    try:
        meta = run_format.unmarked(read_json(target / "meta.json", dict), target)
        if meta.pop("digest") != _digest_of(meta):
            return None
        expected = meta["checksums"]
        if list(_checksums(target / _DOCUMENTS)) != expected[_DOCUMENTS]:
            return None
        with open_regular(target / _DOCUMENTS) as content:
            documents = np.load(content, allow_pickle=False)
        dtypes = {_TOKENS: meta["dtype"], _WEIGHTS: "<u1"}
        files = [
            TokenFile(target / file_name, dtype, count=meta["tokens"])
            for file_name, dtype in dtypes.items()
            if file_name in expected
        ]
        if any(_is_damaged(file, expected[file.path.name]) for file in files):
            return None
    except (OSError, ValueError, KeyError):
        return None
    for file in files:
        if _is_large(expected[file.path.name]):
            _check_in_background(file, expected[file.path.name], target / "meta.json")
    for note in meta["notes"]:
        log(f"data: {name}: {note}")
    length, num_bytes, group = documents.T
    weights = tuple(files[1:])
    return TokenStore(
        name=name,
        files=(files[0],),
        file=np.zeros(len(length), np.int32),
        start=np.cumsum(length) - length,
        length=length,
        group=group.astype(np.uint8),
        # The bytes of a chat's text are not those of its learned tokens.
        num_bytes=None if weights else num_bytes,
        max_id=meta["max_id"],
        fingerprint=meta["fingerprint"],
        weights=weights,
    )


def _is_large(checksums: list[int]) -> bool:
    return len(checksums) > 1


def _is_damaged(file: TokenFile, expected: list[int]) -> bool:
    """Compares a file with its checksums, unless it is large."""
    return not _is_large(expected) and list(_checksums(file.path)) != expected


def _digest_of(meta: dict[str, Any]) -> str:
    return digest(json.dumps(meta, sort_keys=True))


def _checksums(path: Path) -> Iterator[int]:
    """Yields the CRC-32 of each _CHECKED_BYTES of a file."""
    with open_regular(path) as file:
        while piece := file.read(_CHECKED_BYTES):
            yield zlib.crc32(piece)


def _check_in_background(file: TokenFile, expected: list[int], meta: Path) -> None:
    threading.Thread(
        target=_check_slowly,
        args=(file, expected, meta),
        name="jaxdist-token-check",
        daemon=True,
    ).start()


def _check_slowly(file: TokenFile, expected: list[int], meta: Path) -> None:
    """Compares a file with its checksums, slowly.

    If the file is damaged, its readers fail, and `meta` is removed. The next start
    therefore makes the cache again.
    """
    begin_s = time.perf_counter()
    # Readers of a file that is gone or shorter fail by themselves.
    with contextlib.suppress(OSError, ValueError):
        pairs = zip(_checksums(file.path), expected, strict=True)
        for number, (found, written) in enumerate(pairs):
            if found != written:
                place = (
                    f"the {_CHECKED_BYTES >> 20} MiB "
                    f"from byte {number * _CHECKED_BYTES}"
                )
                file.fault = (
                    f"{file.path}: {place} are not what was written there. The next "
                    "start makes the cache again; if it happens often, check that disk "
                    "or set data.cache_dir"
                )
                meta.unlink(missing_ok=True)
                return
            time.sleep(_IDLE_SHARE * (time.perf_counter() - begin_s))
            begin_s = time.perf_counter()


# --- Making a cache -------------------------------------------------------------------


def _build(corpus: Corpus, encoder: Encoder, target: Path, log: Log) -> None:
    """Makes a cache folder. It appears whole, or not at all."""
    try:
        with atomic.replacing(target) as partial:
            partial.mkdir()
            _write(corpus, encoder, partial, log)
            if target.exists():  # `_load` has found it damaged
                log(f"data: {target} is damaged; made again")
                shutil.rmtree(target)
    except OSError:
        if not (target / "meta.json").is_file():
            raise  # otherwise another process has been faster


def _write(corpus: Corpus, encoder: Encoder, folder: Path, log: Log) -> None:
    """Tokenizes a corpus into the files of a cache.

    Raises:
      ConfigError: the corpus has no documents, or one is refused.
    """
    with _CacheWriter(folder, encoder) as writer:
        progress_s = time.monotonic()
        for batch in _batches(corpus):
            writer.add(batch)
            now_s = time.monotonic()
            if now_s - progress_s > _PROGRESS_S:
                progress_s = now_s
                log(f"data: {writer.amount()} after {now_s - writer.begin_s:.0f} s")
    if not writer.rows:
        fix = "Set data.path to other data"
        if corpus.keys:
            fix += f", or change {', '.join(f'data.{key}' for key in corpus.keys)}"
        raise ConfigError(
            f"data.source: {corpus.name} has no documents ({corpus.summary}). {fix}."
        )
    writer.finish(corpus)
    elapsed_s = time.monotonic() - writer.begin_s
    log(f"data: tokenized {writer.amount()} in {elapsed_s:.1f} s -> {folder.parent}")


class _CacheWriter:
    """Writer of the files of a cache."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self.begin_s = time.monotonic()
        # (tokens, UTF-8 bytes, group) of each document
        self.rows: list[tuple[int, int, int]] = []
        self._folder = folder
        self._encoder = encoder
        self._dtype = _smallest_dtype(encoder.vocab_size)
        self._tokens = (folder / _TOKENS).open("wb")
        self._weights: IO[bytes] | None = None  # opened for the first weights
        self._counts: Counter[str] = Counter()
        self._damaged: list[str] = []  # ids of documents that are not UTF-8
        self._content = hashlib.sha256()
        self._max_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        if self._weights:
            self._weights.close()

    def add(self, batch: list[Document]) -> None:
        """Encodes documents and writes their tokens.

        Raises:
          ConfigError: a document is refused, or the tokenizer makes an invalid id.
        """
        ids, learned, counts = self._encoder.encode(batch)
        self._counts += counts
        self._damaged += [document.id for document in batch if document.is_damaged]
        tokens = np.concatenate(ids)
        self._check_vocabulary(tokens)
        tokens = tokens.astype(self._dtype)
        self._max_id = max(self._max_id, int(tokens.max(initial=0)))
        self._content.update(tokens.data)
        self._tokens.write(tokens.data)
        if learned:
            weights = np.concatenate(learned).astype(np.uint8)
            self._content.update(weights.data)
            if self._weights is None:
                self._weights = (self._folder / _WEIGHTS).open("wb")
            self._weights.write(weights.data)
        groups = group_of(document.id for document in batch)
        for document, tokens_of, group in zip(batch, ids, groups.tolist(), strict=True):
            num_bytes = len(document.text.encode("utf-8", "replace"))
            self.rows.append((len(tokens_of), num_bytes, group))

    def _check_vocabulary(self, ids: np.ndarray) -> None:
        """Checks that all ids are in the vocabulary; others might wrap around.

        Raises:
          ConfigError: an id is not.
        """
        vocab_size = self._encoder.vocab_size
        for extreme in (ids.min(initial=0), ids.max(initial=0)):
            if not 0 <= extreme < vocab_size:
                raise ConfigError(
                    f"data.tokenizer: it makes id {extreme}, outside its vocabulary of "
                    f"ids 0 to {vocab_size - 1} "
                    f"(fingerprint {self._encoder.fingerprint[:12]}); use another one."
                )

    def amount(self) -> str:
        """Formats the number of documents, bytes and tokens so far."""
        num_tokens = sum(row[0] for row in self.rows)
        num_bytes = sum(row[1] for row in self.rows)
        return (
            f"{len(self.rows)} documents, {num_bytes / 1e6:.2f} MB, {num_tokens} tokens"
        )

    def _damage_notes(self) -> list[str]:
        """Formats a line about documents that are not UTF-8; [] if all are."""
        if not self._damaged:
            return []
        return [
            f"documents that are not UTF-8: {len(self._damaged)}, for example "
            f"{one_line(self._damaged[0])}; their invalid bytes became U+FFFD. Convert such "
            f"files, for example with iconv -f latin1 -t utf-8"
        ]

    def finish(self, corpus: Corpus) -> None:
        """Writes the table of documents, and `meta.json` last."""
        table = np.asarray(self.rows, np.int64)
        np.save(self._folder / _DOCUMENTS, table)
        names = [_TOKENS, _DOCUMENTS]
        if self._weights:
            names.insert(1, _WEIGHTS)
        meta = {
            "version": _VERSION,
            "corpus": corpus.name,
            "summary": corpus.summary,
            "tokenizer": self._encoder.fingerprint,
            "dtype": self._dtype.str,
            "checksums": {
                name: list(_checksums(self._folder / name)) for name in names
            },
            "documents": len(self.rows),
            "tokens": int(table[:, 0].sum()),
            "max_id": self._max_id,
            "notes": [*self._encoder.notes(self._counts), *self._damage_notes()],
            "fingerprint": digest(
                self._content.hexdigest(), digest_bytes(table.tobytes())
            ),
        }
        meta["digest"] = _digest_of(meta)
        text = json.dumps(run_format.marked(meta), indent=1)
        (self._folder / "meta.json").write_text(text)


def _smallest_dtype(vocab_size: int) -> np.dtype:
    """Chooses the smallest type that holds every id.

    Args:
      vocab_size: largest id + 1. Vocabularies may have gaps, so the number of their
        entries may be too small.
    """
    if vocab_size <= 1 << 8:
        return np.dtype("<u1")
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def _batches(corpus: Corpus) -> Iterator[list[Document]]:
    """Yields the documents in lists of about _BATCH_CHARACTERS characters.

    The documents of one record are in one list.
    """
    batch: list[Document] = []
    size = 0
    for document in corpus.documents():
        if size >= _BATCH_CHARACTERS and not document.continues_record:
            yield batch
            batch = []
            size = 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch
