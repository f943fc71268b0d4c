"""Tokenizers: text <-> token ids.

`bytes` is built in: ids 0..255 are the UTF-8 bytes and there is no end-of-document id, so a loss in
nats per token is nats per byte and compares with any other byte-level model. `bpe:SIZE` and
tokenizer.json files go through the optional `tokenizers` package (bpe.py); they do have an
end-of-document id where the vocabulary holds one.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxdist import extras
from jaxdist.config import ConfigError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the package needs of a tokenizer."""

    name: str  # for logs
    vocab_size: int  # ids are below it
    end_of_document: int | None  # id appended to every document, if the vocabulary has one
    fingerprint: str  # equal exactly when encoding is equal

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, [length] int32, without any special id."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns `encode` of each text; may use all cores."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """The 256 bytes of UTF-8."""

    name = "bytes"
    vocab_size = 256
    end_of_document: int | None = None
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of `text`, [length] int32."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the UTF-8 bytes of each text, [length] uint8."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of byte values; ids above 255 become U+FFFD."""
        return b"".join(
            bytes([i]) if 0 <= i < 256 else "\ufffd".encode() for i in map(int, ids)
        ).decode("utf-8", "replace")


def bpe_size(name: str) -> int | None:
    """Returns SIZE of `bpe:SIZE`, None for any other tokenizer name.

    Raises:
      ConfigError: where SIZE is not a number from 257 up.
    """
    if not name.startswith("bpe:"):
        return None
    size = int(name[4:]) if re.fullmatch(r"\d+", name[4:]) else 0
    if size < 257:  # 256 bytes and the end of a document
        raise ConfigError(f"data.tokenizer={name}: required bpe:SIZE with SIZE >= 257.")
    return size


def load_tokenizer(name: str, *, folder: Path | None = None) -> Tokenizer:
    """Returns a tokenizer that needs no training, for commands that have no corpus at hand.

    Args:
      name: `data.tokenizer`.
      folder: where a run saved its tokenizer.json (its workdir); it wins over a path in `name`.

    Raises:
      ConfigError: where the tokenizer is `bpe:SIZE` and `folder` holds none, or a file is missing.
      ImportError: naming the extra, where `tokenizers` is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    size, saved = bpe_size(name), folder and folder / TOKENIZER_FILE
    if saved and saved.is_file():
        return _bpe().load(saved)
    if size:
        raise ConfigError(
            f"data.tokenizer={name}: no {TOKENIZER_FILE} in {folder or 'any folder'}. It is saved "
            "by the run that trains it; set data.tokenizer to the path of that file."
        )
    path = Path(name).expanduser()
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer={name}: required bytes, bpe:SIZE or the path of a tokenizer.json; "
            f"{path} is not a file."
        )
    return _bpe().load(path)


def train_tokenizer(
    name: str, texts: Sequence[Iterable[str]], *, file: Path, log: Callable[[str], None]
) -> Tokenizer:
    """Returns `bpe:SIZE` trained on the texts of all sources and written to `file`.

    Where `file` exists, it is loaded instead.
    """
    size = bpe_size(name)
    assert size is not None, name
    bpe = _bpe()
    if not file.is_file():
        log(f"data: training a byte-level BPE of {size} tokens")
        write_atomically(file, bpe.train(texts, size))
        log(f"data: wrote {file}")
    return bpe.load(file)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json to `folder` unless it is there; the byte tokenizer needs no file."""
    target = folder / TOKENIZER_FILE
    content = getattr(tokenizer, "content", None)
    if content is not None and not target.is_file():
        write_atomically(target, content)


def write_atomically(file: Path, content: str) -> None:
    """Writes a text file such that readers see all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(content, encoding="utf-8")
    part.replace(file)


def digest(*parts: object) -> str:
    """Returns the sha256 of the parts' texts, as hex."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _bpe():
    return extras.load("jaxdist.data.bpe", extra="text")
