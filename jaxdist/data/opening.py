"""Opening a dataset: from the options `data.*` to samples."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults as config_faults
from jaxdist.data import (
    chat,
    splits,
    token_cache,
    token_files,
    tokenizer,
    tokenizer_config,
)
from jaxdist.data import samples as sample_arrays
from jaxdist.data.config import DataConfig, parts_of
from jaxdist.data.dataset import Dataset, vocabulary_fault
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
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic
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
    loaded, encoder = _open_tokenizer(config, texts, folder, log)
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
    index = {sample_arrays.INDEX: SampleShape((), "int32")}
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
    opened = sample_arrays.open_samples(
        source,
        config.path,
        name=config.name,
        validation_path=config.validation_path,
        validation_share=config.validation_share,
        limit=config.validation_tokens,
    )
    contents = ", ".join(
        f"{name} {list(shape.dims)} {shape.dtype}"
        for name, shape in source.shapes(config.path).items()
    )
    log(
        f"data: {config.name}: {opened.train.num_rows} samples of {contents}; "
        f"{opened.held_out.num_rows} held out"
    )
    sides = splits.sample_splits(config.name, opened.train, opened.held_out)
    return Dataset([sides], seed=seed, fingerprint=opened.fingerprint)


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


# --- The tokenizer --------------------------------------------------------------------


def _open_tokenizer(
    config: DataConfig, texts: list[Corpus], folder: Path | None, log: Log
) -> tuple[Tokenizer | None, Encoder | None]:
    """Opens the tokenizer, and the encoder of documents that uses it; keeps what they
    need in `folder`.

    Args:
      texts: what the tokenizer is trained on, if it is to be trained.

    Returns:
      None twice for token ids that somebody else made, unless `data.tokenizer` names a
      file.
    """
    name = config.tokenizer
    size = tokenizer.bpe_size(name)
    if not texts and (size or name == "bytes"):
        return None, None
    is_kept = bool(folder and (folder / tokenizer.TOKENIZER_FILE).is_file())
    if size and not is_kept:
        name = str(_train_tokenizer(config, size, texts, log))
    loaded = tokenizer.load_tokenizer(
        name,
        folder=folder,
        cache=config.cache_folder(),
        special_tokens=config.special_tokens,
    )
    encoder: Encoder = token_cache.TextEncoder(loaded)
    about = loaded.config
    if config.format == "chat":
        chats = chat.open_encoder(config, loaded, folder)
        encoder = chats
        about = dataclasses.replace(
            about,
            end_ids=chats.end_ids,
            chat_template=chats.template.source if chats.template else "",
        )
    # A tokenizer without a file (bytes) has only its config to keep.
    is_new = not is_kept if loaded.content else about != loaded.config
    if folder and is_new:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer_config.write(folder, about)
        if loaded.content is not None:
            atomic.write_text(folder / tokenizer.TOKENIZER_FILE, loaded.content)
    return loaded, encoder


def _train_tokenizer(
    config: DataConfig, size: int, texts: list[Corpus], log: Log
) -> Path:
    """Trains a BPE on what is not held out of all texts, once; gives its file in the
    cache.
    """
    share = config.validation_share
    if config.validation_path:
        share = 0
    stamps = [stamp for corpus in texts for stamp in (corpus.name, corpus.stamp)]
    key = digest(config.tokenizer, share, *stamps)[:16]
    target = config.cache_folder() / f"tokenizer-{key}.json"
    with token_cache.one_builder(target, log):
        if not target.is_file():
            log(f"data: training a byte-level BPE of {size} tokens -> {target}")
            documents = [_training_texts(corpus, share) for corpus in texts]
            atomic.write_text(target, tokenizer.bpe().train(documents, size))
    return target


def _training_texts(corpus: Corpus, share: int) -> Iterator[str]:
    """Yields the texts that the hash leaves for training; all, if it leaves none (see
    `splits.split`).
    """
    is_empty = True
    for document in corpus.documents():
        if token_files.group_of([document.id])[0] >= share:
            is_empty = False
            yield document.text
    if is_empty:
        for document in corpus.documents():
            yield document.text
