"""Opening of a dataset: from the settings `data.*` to rows."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, cast

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults as config_faults
from jaxdist.data import splits, token_cache
from jaxdist.data.chat import ChatEncoder
from jaxdist.data.config import DataConfig, parts_of
from jaxdist.data.dataset import Dataset, vocabulary_fault
from jaxdist.data.encoders import open_tokenizer
from jaxdist.data.formats import format_of
from jaxdist.data.sources.documents import Corpus, SourceOptions
from jaxdist.data.sources.source import (
    SampleSource,
    Source,
    TextSource,
    TokenSource,
)
from jaxdist.data.sources.table import SOURCES
from jaxdist.data.token_cache import Encoder, Log
from jaxdist.data.token_files import TokenStore
from jaxdist.storage.digest import digest


def open_dataset(
    config: DataConfig,
    *,
    sequence_length: int,
    vocab_size: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
    log: Log = print,
    stride: int | None = None,
    summary: bool = True,
    scored: bool = False,
) -> Dataset:
    """Opens the dataset of a config. The corpus is tokenized on first use.

    Args:
      config: settings of the data.
      sequence_length: S.
      vocab_size: vocabulary size of the model. Token ids must be below it; None skips
        the check.
      seed: seed of the order of rows.
      folder: workdir of a run, which keeps its tokenizer.json: it is read if present,
        or else written. None writes nothing outside data.cache_dir.
      log: receives a line per event, and every few seconds of work.
      stride: tokens by which windows over held-out documents move
        (`jaxdist.data.sliding`); None = no sliding windows.
      summary: whether to log the size of the dataset.
      scored: whether a model scores documents at their last token. It is then an input
        of its row, and not only a target.

    Raises:
      ConfigError: missing, empty or too small corpora, ids beyond the vocabulary, or
        invalid settings.
      ImportError: a source or tokenizer needs an extra. The error names the extra.
    """
    faults = config_faults(config, "data.")
    if faults:
        raise ConfigError(faults)
    source = SOURCES[config.source]
    if isinstance(source, SampleSource):
        return _open_samples(source, config, seed=seed, log=log, summary=summary)
    record_format = format_of(config, scored=scored)
    weights, parts = parts_of(config)
    num_train = len(parts)
    if config.validation_path:  # a separate corpus, which no mixture has
        parts.append(dataclasses.replace(config, path=config.validation_path))
    corpora = [open_corpus(part, log) for part in parts]
    texts = [corpus for corpus in corpora[:num_train] if corpus]
    loaded, encoder = open_tokenizer(
        config, texts, folder, log, record_format.open_encoder
    )
    if isinstance(encoder, ChatEncoder) and encoder.warning:
        log(encoder.warning)
    stores = [
        _open_tokens(part, corpus, encoder, log)
        for part, corpus in zip(parts, corpora, strict=True)
    ]
    _check_vocabulary(stores, vocab_size)
    cut = partial(record_format.cut, config, sequence_length=sequence_length, log=log)
    sides = []
    for train_documents, held_out_documents in splits.split_all(stores, config, log):
        train = cut(train_documents)
        held_out = cut(held_out_documents, held_out=True, stride=stride)
        sides.append((train, held_out))
    dataset = Dataset(
        sides,
        weights,
        tokenizer=loaded,
        vocab_size=vocab_size,
        seed=seed,
        fingerprint=digest(
            sequence_length,
            f"{config.cut} scored" if scored else config.cut,
            config.validation_share,
            weights,
            *(store.fingerprint for store in stores),
        ),
    )
    if summary:
        log(
            f"data: {dataset.num_train_samples} training samples of {sequence_length} "
            f"tokens ({dataset.num_train_tokens} tokens), "
            f"{dataset.num_validation_tokens} held-out targets"
        )
    return dataset


def _open_samples(
    source: SampleSource, config: DataConfig, *, seed: int, log: Log, summary: bool
) -> Dataset:
    """Opens a dataset of samples of arrays, and logs the shapes of a sample."""
    sides, fingerprint = splits.split_samples(source, config)
    train, held_out = sides
    contents = ", ".join(
        f"{name} {list(shape.dims)} {shape.dtype}"
        for name, shape in source.shapes(config.path).items()
    )
    if summary:
        log(
            f"data: {config.name}: {train.num_tokens} samples of {contents}; "
            f"{held_out.num_tokens} held out"
        )
    return Dataset([sides], seed=seed, fingerprint=fingerprint)


class _DeclaredOptions:
    """Settings of a source, without the keys that its row does not declare.

    A key that a source reads and does not declare would be missing in the stamp: tokens
    of another value would be read from the cache.
    """

    source: str
    path: str
    name: str
    endings: tuple[str, ...]

    def __init__(self, config: DataConfig, source: Source) -> None:
        for name in ("source", "path", "name", "endings", *source.reads):
            setattr(self, name, getattr(config, name))

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("source")  # absent while a copy is made
        raise AttributeError(
            f"data.{name}: the row of data.source={source} in the table of sources "
            "does not declare that it reads this key (Source.reads)"
        )


def _declared_options(config: DataConfig, source: Source) -> SourceOptions:
    return cast(SourceOptions, _DeclaredOptions(config, source))


def open_corpus(config: DataConfig, log: Log) -> Corpus | None:
    """Opens the documents of a source; None if the source has token ids.

    The keys that the source reads are a part of the stamp.
    """
    source = SOURCES[config.source]
    if not isinstance(source, TextSource):
        return None
    corpus = source.open(_declared_options(config, source))
    log(f"data: {corpus.name}: {corpus.summary}")
    values = [(name, getattr(config, name)) for name in source.reads]
    return dataclasses.replace(
        corpus, stamp=digest(corpus.stamp, *values), keys=source.reads
    )


def _open_tokens(
    config: DataConfig, corpus: Corpus | None, encoder: Encoder | None, log: Log
) -> TokenStore:
    """Opens the tokens of a corpus, or of a source that has token ids."""
    source = SOURCES[config.source]
    if isinstance(source, TokenSource):
        return source.open(_declared_options(config, source))
    assert corpus
    assert encoder
    return token_cache.open_tokens(corpus, encoder, config.cache_folder(), log)


def _check_vocabulary(stores: list[TokenStore], vocab_size: int | None) -> None:
    """Checks that the model's vocabulary holds all known token ids.

    Raises:
      ConfigError: it does not. The error names every source with a larger id.
    """
    faults = []
    for store in stores:
        fault = vocabulary_fault(store.name, store.max_id, vocab_size)
        if fault:
            faults.append(fault)
    if faults:
        raise ConfigError(faults)
