"""Tokenizers: text <-> token ids.

The tokenizer `bytes` is built in. Its ids 0..255 are the UTF-8 bytes, and it has no
end-of-document id. Its loss in nats per token is the loss per byte, and can be compared
with any other byte-level model.

Tokenizers of `bpe:SIZE` and of tokenizer.json files need the optional package
`tokenizers` (bpe.py). They have an end-of-document id if their vocabulary has one.
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
    """Interface of a tokenizer."""

    # largest id + 1; ids may have gaps, so this is not their number
    vocab_size: int
    # id that is appended to every document; None if the vocabulary has none
    end_of_document: int | None
    # id that the tokenizer's file puts before a text, which published models expect
    begin_of_document: int | None
    end_ids: tuple[int, ...]  # ids that end a generated text, ascending
    special_tokens: Mapping[int, str]  # {id: text} of those that a text can spell
    config: TokenizerConfig  # settings in the other files of the tokenizer's folder
    fingerprint: str  # equal exactly if the encoding is equal
    content: (
        str | None
    )  # text of the tokenizer.json; None = the tokenizer needs no file

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text to ids, [length] int32, without special ids around it."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to ids of any integer type. It may use all cores."""

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes each text to ids, and marks the ids that overlap its ranges.

        Args:
          texts: pairs of a text and its ranges of characters.

        Returns:
          Pairs of ids and marks, [length] int32 and bool.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to a text. Invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Tokenizer of the 256 bytes of UTF-8. It decodes larger ids to U+FFFD."""

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
        """Encodes a text to its bytes, [length] int32."""
        return self.encode_documents([text])[0].astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to its bytes, uint8."""
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts
        ]

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes each text to its bytes, and marks the bytes in its ranges."""
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
        """Decodes bytes to a text. Invalid UTF-8 and larger ids become U+FFFD."""
        replacement = "\ufffd".encode()
        parts = (
            bytes([token_id]) if 0 <= token_id < 256 else replacement
            for token_id in map(int, ids)
        )
        return b"".join(parts).decode("utf-8", "replace")


def load_tokenizer(
    name: str,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Tokenizer:
    """Loads a tokenizer without training it, for commands that have no corpus.

    Args:
      name: value of `data.tokenizer`.
      folder: workdir of a run. Its tokenizer.json takes precedence over a path in
        `name`.
      cache: folder that remembers the files that have passed a trial. None tries out
        each file, which takes half a second.
      special_tokens: value of `data.special_tokens`.

    Raises:
      ConfigError: the name is `bpe:SIZE` and `folder` has no tokenizer.json. Or a file
        is missing, is no tokenizer.json, or fails or takes too long on short texts.
      ImportError: the package `tokenizers` is not installed. The error names the extra.
    """
    if name == "bytes":
        if not folder:
            return ByteTokenizer()
        return ByteTokenizer(tokenizer_config.read(folder))
    size = bpe_size(name)
    tokenizer: Tokenizer
    if folder and (folder / TOKENIZER_FILE).is_file():
        tokenizer = bpe().load(folder / TOKENIZER_FILE, cache, special_tokens)
        return tokenizer
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
    tokenizer = bpe().load(path, cache, special_tokens)
    return tokenizer


def bpe() -> Any:
    """Imports `jaxdist.data.bpe`, which needs the package `tokenizers`."""
    return extras.load("jaxdist.data.bpe")


def bpe_size(name: str) -> int | None:
    """Parses SIZE of `bpe:SIZE`; None for any other name of a tokenizer.

    Raises:
      ConfigError: SIZE is not a number >= 257 and < 10^9. There are 256 bytes and the
        end of a document.
    """
    if not name.startswith("bpe:"):
        return None
    if not re.fullmatch(r"\d{3,9}", name[4:]) or int(name[4:]) < 257:
        raise ConfigError(
            f"data.tokenizer={name}: required bpe:SIZE with SIZE >= 257 and < 10^9."
        )
    return int(name[4:])
