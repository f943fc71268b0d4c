"""Tokenizer of a dataset, opened or trained, and the encoder that uses it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from jaxdist.data import token_cache, token_files, tokenizer, tokenizer_config
from jaxdist.data.config import DataConfig
from jaxdist.data.sources.documents import Corpus
from jaxdist.data.token_cache import Encoder, Log
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.data.tokenizer_config import TokenizerConfig
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest


class OpenEncoder(Protocol):
    """Function that makes the encoder of a format's documents."""

    def __call__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path | None
    ) -> tuple[Encoder, TokenizerConfig]:
        """Makes the encoder, and the settings of the tokenizer that a run keeps.

        Args:
          config: settings of the data.
          tokenizer: tokenizer of the texts.
          folder: workdir of a run; None = no workdir.

        Raises:
          ConfigError: a setting is invalid.
          ImportError: an extra is missing. The error names the extra.
        """


def open_tokenizer(
    config: DataConfig,
    texts: list[Corpus],
    folder: Path | None,
    log: Log,
    open_encoder: OpenEncoder,
) -> tuple[Tokenizer | None, Encoder | None]:
    """Opens the tokenizer of a config, and the encoder of documents that uses it.

    Args:
      config: settings of the data.
      texts: corpora to train the tokenizer on, if it has to be trained.
      folder: workdir that keeps the tokenizer's files; None = nowhere.
      log: receives a line if a tokenizer is trained.
      open_encoder: makes the encoder of the format; see `formats.Format`.

    Returns:
      The tokenizer and the encoder. Sources of token ids have neither, unless
      `data.tokenizer` names a file.
    """
    name = config.tokenizer
    size = tokenizer.bpe_size(name)
    if not texts and (size or name == "bytes"):
        return None, None
    is_kept = bool(folder and (folder / tokenizer.TOKENIZER_FILE).is_file())
    if size and not is_kept:
        name = str(_train_tokenizer(config, size=size, texts=texts, log=log))
    loaded = tokenizer.load_tokenizer(
        name,
        folder=folder,
        cache=config.cache_folder(),
        special_tokens=config.special_tokens,
    )
    encoder, settings = open_encoder(config, loaded, folder)
    # A start that failed may have kept the tokenizer without data.chat_template.
    is_new = bool(loaded.content) and not is_kept
    if folder and (is_new or settings != loaded.config):
        _write_files(folder, loaded, settings)
    return loaded, encoder


def _write_files(folder: Path, loaded: Tokenizer, settings: TokenizerConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_config.write(folder, settings)
    if loaded.content is not None:
        atomic.write_text(folder / tokenizer.TOKENIZER_FILE, loaded.content)


def _train_tokenizer(
    config: DataConfig, *, size: int, texts: list[Corpus], log: Log
) -> Path:
    """Trains a BPE on the texts that are not held out, once for each set of texts.

    Returns:
      Its file in the cache.
    """
    share = config.validation_share
    if config.validation_path:
        share = 0
    stamps = [stamp for corpus in texts for stamp in (corpus.name, corpus.stamp)]
    key = digest(config.tokenizer, share, *stamps)[:16]
    target = config.cache_folder() / f"tokenizer-{key}.json"
    with token_cache.build_lock(target, log):
        if not target.is_file():
            log(f"data: training a byte-level BPE of {size} tokens -> {target}")
            documents = [_training_texts(corpus, share) for corpus in texts]
            atomic.write_text(target, tokenizer.bpe().train(documents, size))
    return target


def _training_texts(corpus: Corpus, share: int) -> Iterator[str]:
    """Yields the texts that are not held out, or all texts if all would be."""
    is_empty = True
    for document in corpus.documents():
        if token_files.group_of([document.id])[0] >= share:
            is_empty = False
            yield document.text
    if is_empty:
        for document in corpus.documents():
            yield document.text
