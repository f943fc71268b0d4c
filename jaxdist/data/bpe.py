"""Tokenizers of the `tokenizers` package (extra `text`); load it with `extras.load`.

A tokenizer.json is a program. Its patterns may backtrack for hours, its replacements
may fill the memory, and unexpected content ends in a panic of the package. A file is
therefore tried out first, in a process with limits. `python -m jaxdist.data.bpe` is
that process.
"""

import contextlib
import json
import re
import sys
import threading
import time
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

_MAX_ID = np.iinfo(np.int32).max  # largest id that batches can hold
# Names of the end of a document in published vocabularies. The first one that is
# present wins.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>")
# Characters that a tokenizer is trained on, to limit the time. More text hardly changes
# the merges of vocabularies up to 64k.
_TRAINING_CHARACTERS = 100_000_000
# Seconds between warnings about texts that take long. The largest batch takes ten.
_PATIENCE_S = 120


class BpeTokenizer:
    """Tokenizer of a tokenizer.json file; see tokenizer.Tokenizer.

    Special ids are decoded to nothing.
    """

    def __init__(
        self,
        content: str,
        special_tokens: SpecialTokens = "tokens",
        config: TokenizerConfig = TokenizerConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Makes the tokenizer of a file.

        Args:
          content: text of the tokenizer.json.
          special_tokens: encoding of a text that spells a special token: tokens = its
            id, text = its characters.
          config: settings in the other files of the folder.

        Raises:
          ConfigError: `content` is no tokenizer.json.
        """
        self.content: str | None = content
        self.config = config
        with _failures("not a tokenizer.json that `tokenizers` reads"):
            self._open(content, special_tokens)

    def _open(self, content: str, special_tokens: SpecialTokens) -> None:
        """Parses the file, and finds the ids that have a meaning."""
        tokenizer = Tokenizer.from_str(content)
        tokenizer.encode_special_tokens = special_tokens == "text"
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        end_tokens = [tokenizer.token_to_id(name) for name in _END_NAMES]
        end = next((i for i in end_tokens if i is not None), None)
        # The file may put a begin token before a text, or only an end token after it.
        begin = tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.end_of_document: int | None = end
        self.begin_of_document: int | None = next((i for i in begin if i != end), None)
        ids = (*tokenizer.get_vocab(with_added_tokens=True).values(), *begin)
        self.vocab_size = max(ids, default=-1) + 1
        if not 1 <= self.vocab_size <= _MAX_ID:
            raise ConfigError(
                f"its largest id is {self.vocab_size - 1}; required 0 to {_MAX_ID - 1}"
            )
        self.end_ids = self._end_ids()
        self.special_tokens = {}
        if special_tokens == "tokens":
            added = tokenizer.get_added_tokens_decoder()
            self.special_tokens = {
                i: token.content for i, token in added.items() if token.special
            }
        # Token caches of both settings need different keys.
        setting = ["special tokens"] if self.special_tokens else []
        self.fingerprint = digest(tokenizer.to_str(), *setting)

    def _end_ids(self) -> tuple[int, ...]:
        """Collects the ids that end a generated text, ascending."""
        eos_token = self.config.special.get("eos_token", "")
        named = {
            *self.config.end_ids,
            self._tokenizer.token_to_id(eos_token),
            self.end_of_document,
        }
        # Some configs name ids beyond the vocabulary, which are never sampled.
        known = [i for i in named if i is not None and 0 <= i < self.vocab_size]
        return tuple(sorted(known))

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text to ids, [length] int32, without special ids around it."""
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to ids, int32, on all cores."""
        with _encoding(sum(map(len, texts))):
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_spans(
        self, texts: Sequence[tuple[str, Spans]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes each text to ids, and marks the ids that overlap its ranges."""
        with _encoding(sum(len(text) for text, _ in texts)):
            encodings = self._tokenizer.encode_batch(
                [text for text, _ in texts], add_special_tokens=False
            )
        encoded = []
        for encoding, (_, spans) in zip(encodings, texts, strict=True):
            inside = np.zeros(len(encoding.ids), bool)
            for span in spans:
                indices = [encoding.char_to_token(i) for i in range(*span)]
                tokens = [index for index in indices if index is not None]
                if tokens:  # a character may be in no token
                    inside[tokens[0] : tokens[-1] + 1] = True
            encoded.append((np.asarray(encoding.ids, np.int32), inside))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to a text, without special tokens."""
        with _failures("the tokenizer (data.tokenizer) cannot decode ids"):
            text: str = self._tokenizer.decode(
                [int(i) for i in ids], skip_special_tokens=True
            )
        return text


@contextlib.contextmanager
def _failures(problem: str) -> Iterator[None]:
    """Turns an error of the package in the body into a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{problem}: {error}") from None
    except BaseException as error:
        # The package raises Exception itself, and PanicException, which is none.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise ConfigError(f"{problem}: {one_line(error)}") from error


@contextlib.contextmanager
def _encoding(num_characters: int) -> Iterator[None]:
    """Names the tokenizer if it fails, and while it takes long.

    The package cannot be interrupted, and its patterns may need hours for texts that no
    trial has.
    """
    done = threading.Event()
    warning = threading.Thread(target=_warn, args=(done, num_characters), daemon=True)
    warning.start()
    try:
        with _failures("the tokenizer (data.tokenizer) cannot encode a text"):
            yield
    finally:
        done.set()
        warning.join()


def _warn(done: threading.Event, num_characters: int) -> None:
    begin_s = time.monotonic()
    while not done.wait(_PATIENCE_S):
        elapsed_s = time.monotonic() - begin_s
        print(
            f"data: the tokenizer (data.tokenizer) has worked {elapsed_s:.0f} s on "
            f"{num_characters:,} characters: one of its patterns may not end on them. "
            "Use another one",
            file=sys.stderr,
            flush=True,
        )


def load(
    path: Path, cache: Path | None = None, special_tokens: SpecialTokens = "tokens"
) -> BpeTokenizer:
    """Loads the tokenizer of a tokenizer.json file, after a trial.

    Args:
      path: the file.
      cache: folder that remembers the files that have passed. None tries the file out
        in any case.
      special_tokens: see BpeTokenizer.

    Raises:
      ConfigError: the file is no tokenizer.json, or fails or takes too long. Or another
        file of its folder is malformed.
    """
    try:
        data = read_bytes(path)
        content = data.decode()
    except (OSError, ValueError) as error:
        fault = f"{one_line(error)}; copy it again, or use another one"
        raise ConfigError(f"data.tokenizer={path}: {fault}") from error
    try:
        trial.once(
            "tokenizer",
            version=tokenizers.__version__,
            module=__name__,
            content=data,
            cache=cache,
        )
        config = TokenizerConfig()
        if path.name == TOKENIZER_FILE:
            config = tokenizer_config.read(path.parent)
        return BpeTokenizer(content, special_tokens, config)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer={path}: {error}") from error


# --- The trial ------------------------------------------------------------------------


def _try_out(content: bytes) -> None:
    """Loads a tokenizer.json and encodes texts with it."""
    tokenizer = BpeTokenizer(content.decode())
    for ids in tokenizer.encode_documents(list(_trial_texts(content.decode()))):
        tokenizer.decode(ids)


def _trial_texts(content: str) -> Iterator[str]:
    """Yields short texts on which patterns backtrack.

    They are runs of each character that a pattern names.
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
    """Trains a byte-level BPE with `size` ids, and returns its tokenizer.json.

    Args:
      texts: texts of each source. The sources have equal shares of the first 100
        million characters.
      size: number of ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END_NAMES[0]],
        # With all bytes, every text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    share = _TRAINING_CHARACTERS // len(texts)
    tokenizer.train_from_iterator(
        chain(*(_capped(source, share) for source in texts)), trainer
    )
    content: str = tokenizer.to_str()
    return content


def _capped(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    """Yields texts until they have `num_characters`."""
    remaining = num_characters
    for text in texts:
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


if __name__ == "__main__":
    trial.child(_try_out, sys.stdin.buffer.read())
