"""Byte-level BPE through the `tokenizers` package (extra `text`); load it with `extras.load`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxdist.config import ConfigError
from jaxdist.storage.digest import digest

# Names under which published vocabularies hold the end of a document; the first one present wins.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>")
# More text than this hardly changes the merges of vocabularies up to 64k; it bounds the time.
_TRAINING_CHARACTERS = 100_000_000


class BpeTokenizer:
    """A tokenizer.json file; see tokenizer.Tokenizer. Special ids are decoded to nothing."""

    def __init__(self, content: str):
        self.content: str | None = content
        self._tokenizer = Tokenizer.from_str(content)
        # A document that spells "<|endoftext|>" holds these characters, not the end of a document.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        end_tokens = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self.end_of_document: int | None = next((i for i in end_tokens if i is not None), None)
        before = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.begin_of_document: int | None = next((i for i in before if i != self.end_of_document), None)
        self.fingerprint = digest(self._tokenizer.to_str())

    def encode(self, text: str) -> np.ndarray:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load(path: Path) -> BpeTokenizer:
    """Returns the tokenizer of a tokenizer.json file.
    Raises ConfigError where the file is no such thing."""
    try:
        return BpeTokenizer(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(
            f"data.tokenizer={path}: not a tokenizer.json that `tokenizers` reads: {error}"
        ) from error


def train(texts: Sequence[Iterable[str]], size: int) -> str:
    """Returns the tokenizer.json of a byte-level BPE with `size` ids.

    Args:
      texts: of each source; of each, the first 100 million characters / number of sources are used.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that every text can be encoded
        show_progress=False,
    )
    share = _TRAINING_CHARACTERS // len(texts)
    tokenizer.train_from_iterator(chain(*(_capped(source, share) for source in texts)), trainer)
    return tokenizer.to_str()


def _capped(texts: Iterable[str], left: int) -> Iterator[str]:
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
