"""Tokenizers: text <-> token ids.

`bytes` is built in: ids 0..255 are the UTF-8 bytes and there is no end-of-document id,
so a loss in nats per token is nats per byte and compares with any other byte-level
model. `bpe:SIZE` and tokenizer.json files go through the optional `tokenizers` package
(bpe.py); they do have an end-of-document id where the vocabulary holds one.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jaxdist.config import ConfigError, extras
from jaxdist.data import tokenizer_config
from jaxdist.data.reading import expanded
from jaxdist.data.tokenizer_config import SpecialTokens, TokenizerConfig

Spans = Sequence[tuple[int, int]]  # ranges of characters
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the package needs of a tokenizer."""

    # largest id + 1: ids may have gaps, so that this is not their count
    vocab_size: int
    # id appended to every document, if the vocabulary has one
    end_of_document: int | None
    # id that its file puts before a text: published models expect it
    begin_of_document: int | None
    end_ids: tuple[int, ...]  # ids after which a generated text ends, ascending
    special_tokens: Mapping[int, str]  # by id, those that a text can spell
    config: TokenizerConfig  # what the files beside it say
    fingerprint: str  # equal exactly when encoding is equal
    content: str | None  # of its tokenizer.json; None: it needs no file

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text to ids, [length] int32, without any special id."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to ids of any integer type; may use all cores."""

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes each text to ids, and marks those that are, also in part, in its
        ranges, bool.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to a text; invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """The 256 bytes of UTF-8; ids above 255 are decoded to U+FFFD."""

    vocab_size = 256
    end_of_document: int | None = None
    begin_of_document: int | None = None
    special_tokens: Mapping[int, str] = MappingProxyType({})
    fingerprint = "bytes"
    content: str | None = None

    def __init__(self, config: TokenizerConfig = TokenizerConfig()) -> None:  # noqa: B008 (frozen)
        self.config = config
        ends = [i for i in config.end_ids if 0 <= i < self.vocab_size]
        self.end_ids = tuple(sorted(ends))

    def encode(self, text: str) -> np.ndarray:
        return self.encode_documents([text])[0].astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts
        ]

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        encoded = []
        for text, spans in texts:
            ids = self.encode(text)
            inside = np.zeros(len(ids), bool)
            for span in spans:
                first, last = (len(self.encode(text[:place])) for place in span)
                inside[first:last] = True
            encoded.append((ids, inside))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        parts = (
            bytes([i]) if 0 <= i < 256 else "\ufffd".encode() for i in map(int, ids)
        )
        return b"".join(parts).decode("utf-8", "replace")


def load_tokenizer(
    name: str,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Tokenizer:
    """Loads a tokenizer that needs no training, for commands that have no corpus at
    hand.

    Args:
      name: `data.tokenizer`.
      folder: where a run saved its tokenizer.json (its workdir); it wins over a path in
        `name`.
      cache: folder that remembers which files were tried out; None: each is, which
        takes half a second.
      special_tokens: what a text encodes to that spells one, `data.special_tokens`.

    Raises:
      ConfigError: where the tokenizer is `bpe:SIZE` and `folder` holds none, or a file
        is missing, is no tokenizer.json, or fails or takes too long on short texts.
      ImportError: naming the extra, where `tokenizers` is not installed.
    """
    if name == "bytes":
        if not folder:
            return ByteTokenizer()
        return ByteTokenizer(tokenizer_config.read(folder))
    size = bpe_size(name)
    if folder and (folder / TOKENIZER_FILE).is_file():
        return bpe().load(folder / TOKENIZER_FILE, cache, special_tokens)
    if size:
        raise ConfigError(
            f"data.tokenizer={name}: no {TOKENIZER_FILE} in {folder or 'any folder'}. "
            "It is saved by the run that trains it; "
            "set data.tokenizer to the path of that file."
        )
    path = expanded(name)
    if os.path.isdir(path):
        path = path / TOKENIZER_FILE
    if not os.path.isfile(path):
        raise ConfigError(
            f"data.tokenizer={name}: required bytes, bpe:SIZE or the path of a "
            f"tokenizer.json; {path} is not a file."
        )
    return bpe().load(path, cache, special_tokens)


def bpe() -> Any:
    """Imports `jaxdist.data.bpe`, which needs the package tokenizers."""
    return extras.load("jaxdist.data.bpe")


def bpe_size(name: str) -> int | None:
    """Reads SIZE of `bpe:SIZE`; None for any other tokenizer name.

    Raises:
      ConfigError: SIZE is not a number from 257 (256 bytes and the end of a document)
        to 10^9.
    """
    if not name.startswith("bpe:"):
        return None
    if not re.fullmatch(r"\d{3,9}", name[4:]) or int(name[4:]) < 257:
        raise ConfigError(
            f"data.tokenizer={name}: required bpe:SIZE with SIZE >= 257 and < 10^9."
        )
    return int(name[4:])
