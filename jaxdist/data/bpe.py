"""Tokenizers of the `tokenizers` package (extra `text`); load it with `extras.load`.

A tokenizer.json is a program: its patterns may backtrack for hours, its replacements
fill the memory, and what the package does not expect ends in a panic. A file is
therefore tried out first, in a process with limits; `python -m jaxdist.data.bpe` is
that process.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.config import ConfigError
from jaxdist.data import tokenizer_config, trial
from jaxdist.data.reading import one_line
from jaxdist.data.tokenizer import TOKENIZER_FILE, Spans
from jaxdist.data.tokenizer_config import SpecialTokens, TokenizerConfig
from jaxdist.storage.digest import digest
from jaxdist.storage.untrusted import read_bytes

_MAX_ID = np.iinfo(np.int32).max  # what batches hold
# Names under which published vocabularies hold the end of a document; the first one
# present wins.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>")
# More text than this hardly changes the merges of vocabularies up to 64k; it bounds the
# time.
_TRAINING_CHARACTERS = 100_000_000


class BpeTokenizer:
    """A tokenizer.json file; see tokenizer.Tokenizer. Special ids are decoded to
    nothing.
    """

    def __init__(
        self,
        content: str,
        special_tokens: SpecialTokens = "tokens",
        config: TokenizerConfig = TokenizerConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Makes the tokenizer of a file.

        Args:
          special_tokens: what a text encodes to that spells one: its id, as the file
            says, or its characters.
          config: what the files beside `content` say.

        Raises:
          ConfigError: `content` is no tokenizer.json.
        """
        self.content: str | None = content
        self.config = config
        with _failures("not a tokenizer.json that `tokenizers` reads"):
            self._open(content, special_tokens)

    def _open(self, content: str, special_tokens: SpecialTokens) -> None:
        tokenizer = Tokenizer.from_str(content)
        tokenizer.encode_special_tokens = special_tokens == "text"
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        end_tokens = [tokenizer.token_to_id(name) for name in _END_NAMES]
        end = next((i for i in end_tokens if i is not None), None)
        before = tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.end_of_document: int | None = end
        self.begin_of_document: int | None = next((i for i in before if i != end), None)
        ids = (*tokenizer.get_vocab(with_added_tokens=True).values(), *before)
        self.vocab_size = max(ids, default=-1) + 1
        if not 1 <= self.vocab_size <= _MAX_ID:
            raise ConfigError(
                f"its largest id is {self.vocab_size - 1}; required 0 to {_MAX_ID - 1}"
            )
        end_of_text = tokenizer.token_to_id(self.config.special.get("eos_token", ""))
        named = {*self.config.end_ids, end_of_text, end}
        # Ids beyond the vocabulary, which some configs name, are never drawn.
        drawn = {i for i in named if i is not None and 0 <= i < self.vocab_size}
        self.end_ids = tuple(sorted(drawn))
        self.special_tokens = {}
        if special_tokens == "tokens":
            added = tokenizer.get_added_tokens_decoder()
            self.special_tokens = {
                i: token.content for i, token in added.items() if token.special
            }
        # Caches of the two settings must not be mixed up.
        how = ["special tokens"] if self.special_tokens else []
        self.fingerprint = digest(tokenizer.to_str(), *how)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _failures("the tokenizer (data.tokenizer) cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        with _failures("the tokenizer (data.tokenizer) cannot encode a text"):
            encodings = self._tokenizer.encode_batch(
                [text for text, _ in texts], add_special_tokens=False
            )
        encoded = []
        for encoding, (_, spans) in zip(encodings, texts, strict=True):
            inside = np.zeros(len(encoding.ids), bool)
            for span in spans:
                places = [encoding.char_to_token(i) for i in range(*span)]
                tokens = [place for place in places if place is not None]
                if tokens:  # a character may be in no token
                    inside[tokens[0] : tokens[-1] + 1] = True
            encoded.append((np.asarray(encoding.ids, np.int32), inside))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        with _failures("the tokenizer (data.tokenizer) cannot decode ids"):
            return self._tokenizer.decode(
                [int(i) for i in ids], skip_special_tokens=True
            )


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Raises ConfigError where the package fails in the body."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except BaseException as error:
        # It raises bare Exception, and PanicException, which is none.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise ConfigError(f"{what}: {one_line(error)}") from error


def load(
    path: Path, cache: Path | None = None, special_tokens: SpecialTokens = "tokens"
) -> BpeTokenizer:
    """Loads the tokenizer of a tokenizer.json file, after a trial.

    Args:
      cache: folder that remembers files that passed; None: the file is tried out in any
        case.
      special_tokens: see BpeTokenizer.

    Raises:
      ConfigError: the file is no such thing, or fails or takes too long; a file beside
        it is malformed.
    """
    try:
        data = read_bytes(path)
        content = data.decode()
    except (OSError, ValueError) as error:
        fault = f"{one_line(error)}; copy it again, or use another one"
        raise ConfigError(f"data.tokenizer={path}: {fault}") from error
    try:
        trial.once("tokenizer", tokenizers.__version__, __name__, data, cache)
        beside = TokenizerConfig()
        if path.name == TOKENIZER_FILE:
            beside = tokenizer_config.read(path.parent)
        return BpeTokenizer(content, special_tokens, beside)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer={path}: {error}") from error


# --- The trial ------------------------------------------------------------------------


def _try_out(content: bytes) -> None:
    """Loads a tokenizer.json and encodes texts with it."""
    tokenizer = BpeTokenizer(content.decode())
    for ids in tokenizer.encode_documents(list(_trial_texts(content.decode()))):
        tokenizer.decode(ids)


def _trial_texts(content: str) -> Iterator[str]:
    """Yields short texts on which patterns backtrack: runs of each character that a
    pattern names.
    """
    patterns = re.findall(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")', content)
    named = "".join(json.loads(pattern) for pattern in patterns)
    letters = "".join(dict.fromkeys(named))[:100]
    single = dict.fromkeys("aA0 \n'.-_é中" + letters)
    for run in (*single, letters, "ab ", "a1", letters[::-1]):
        for length in (30, 2000):
            yield (run * length)[:length]
            yield (run * length)[:length] + "\x01"


def train(texts: Sequence[Iterable[str]], size: int) -> str:
    """Trains a byte-level BPE with `size` ids, and gives its tokenizer.json.

    Args:
      texts: of each source; of each, the first 100 million characters / number of
        sources are used.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END_NAMES[0]],
        # so that every text can be encoded
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    share = _TRAINING_CHARACTERS // len(texts)
    tokenizer.train_from_iterator(
        chain(*(_capped(source, share) for source in texts)), trainer
    )
    return tokenizer.to_str()


def _capped(texts: Iterable[str], left: int) -> Iterator[str]:
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


if __name__ == "__main__":
    trial.child(_try_out, sys.stdin.buffer.read())
