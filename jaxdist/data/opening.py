"""Opening a dataset: from the options `data.*` to samples."""

import dataclasses
from functools import partial
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults as config_faults
from jaxdist.data import splits, token_cache
from jaxdist.data.config import DataConfig, parts_of
from jaxdist.data.dataset import Dataset, vocabulary_fault
from jaxdist.data.encoders import open_tokenizer
from jaxdist.data.samples import INDEX
from jaxdist.data.sources.documents import Corpus
from jaxdist.data.sources.source import (
    SampleShape,
    SampleShapes,
    SampleSource,
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
) -> Dataset:
    """Opens the dataset of a config; the corpus is tokenized on first use.

    Args:
      vocab_size: of the model; token ids must be below it. None: not checked.
      seed: of the order of samples.
      folder: where a run keeps its tokenizer.json (its workdir): read from there if
        present, else written there. None: nothing is written outside data.cache_dir.
      log: receives a line per event and per few seconds of work.
      stride: held-out documents are windows that move by so many tokens
        (`jaxdist.data.sliding`).

    Raises:
      ConfigError: missing, empty or too small corpora, ids beyond the vocabulary,
        invalid options.
      ImportError: names the extra that a source or tokenizer needs.
    """
    if faults := config_faults(config, "data."):
        raise ConfigError(faults)
    source = SOURCES[config.source]
    if isinstance(source, SampleSource):
        return _open_samples(source, config, seed, log)
    weights, parts = parts_of(config)
    num_train = len(parts)
    if config.validation_path:  # a corpus of its own; a mixture has none
        parts.append(dataclasses.replace(config, path=config.validation_path))
    corpora = [_open_corpus(part, log) for part in parts]
    texts = [corpus for corpus in corpora[:num_train] if corpus]
    loaded, encoder = open_tokenizer(config, texts, folder, log)
    stores = [
        _open_tokens(part, corpus, encoder, log)
        for part, corpus in zip(parts, corpora, strict=True)
    ]
    _check_vocabulary(stores, vocab_size)
    cut = partial(splits.cut, config, sequence_length=sequence_length, log=log)
    sides = [
        (cut(train), cut(held_out, held_out=True, stride=stride))
        for train, held_out in splits.split_all(stores, config, log)
    ]
    dataset = Dataset(
        sides,
        weights,
        tokenizer=loaded,
        vocab_size=vocab_size,
        seed=seed,
        fingerprint=digest(
            sequence_length,
            config.cut,
            config.validation_share,
            weights,
            *(store.fingerprint for store in stores),
        ),
    )
    log(
        f"data: {dataset.num_train_samples} training samples of {sequence_length} "
        f"tokens ({dataset.num_train_tokens} tokens), "
        f"{dataset.num_validation_tokens} held-out targets"
    )
    return dataset


def sample_shapes(config: DataConfig, sequence_length: int) -> SampleShapes:
    """Lists dims and dtype of what one sample of a config's dataset holds, by batch
    entry.

    Raises:
      ConfigError: the file of samples is not what it must be.
    """
    index = {INDEX: SampleShape((), "int32")}
    source = SOURCES[config.source]
    if isinstance(source, SampleSource):
        return source.shapes(config.path) | index
    dtypes = {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "positions": "int32",
    }
    if config.packing == "documents":
        dtypes["segment_ids"] = "int32"
    shapes = {
        name: SampleShape((sequence_length,), dtype) for name, dtype in dtypes.items()
    }
    return shapes | index


def _open_samples(
    source: SampleSource, config: DataConfig, seed: int, log: Log
) -> Dataset:
    sides, fingerprint = splits.split_samples(source, config)
    train, held_out = sides
    contents = ", ".join(
        f"{name} {list(shape.dims)} {shape.dtype}"
        for name, shape in source.shapes(config.path).items()
    )
    log(
        f"data: {config.name}: {train.num_tokens} samples of {contents}; "
        f"{held_out.num_tokens} held out"
    )
    return Dataset([sides], seed=seed, fingerprint=fingerprint)


def _open_corpus(config: DataConfig, log: Log) -> Corpus | None:
    """Opens the documents of a source; None: it has token ids."""
    source = SOURCES[config.source]
    if not isinstance(source, TextSource):
        return None
    corpus = source.open(config)
    log(f"data: {corpus.name}: {corpus.summary}")
    return corpus


def _open_tokens(
    config: DataConfig, corpus: Corpus | None, encoder: Encoder | None, log: Log
) -> TokenStore:
    """Opens the tokens of a corpus, or of a source that has ids."""
    source = SOURCES[config.source]
    if isinstance(source, TokenSource):
        return source.open(config)
    assert corpus
    assert encoder
    return token_cache.open_tokens(corpus, encoder, config.cache_folder(), log)


def _check_vocabulary(stores: list[TokenStore], vocab_size: int | None) -> None:
    """Raises ConfigError naming every source with an id beyond the vocabulary."""
    faults = [
        vocabulary_fault(store.name, store.max_id, vocab_size) for store in stores
    ]
    faults = [fault for fault in faults if fault]
    if faults:
        raise ConfigError(faults)
