"""From a DataConfig to a Dataset: corpora found, tokenised, split, cut into samples, checked."""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import cache, corpora, formats, packing, tokenizer
from jaxdist.data.dataset import Dataset, Part
from jaxdist.data.options import DataConfig, Source
from jaxdist.data.windows import Samples, Windows

_PRETOKENISED = ("bin", "megatron")


def open_dataset(
    config: DataConfig,
    *,
    sequence_length: int,
    vocab_size: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
    log: Callable[[str], None] = print,
) -> Dataset:
    """Returns the dataset of a config, tokenising the corpus on first use.

    Args:
      sequence_length: S.
      vocab_size: of the model; token ids must be below it. None: not checked.
      seed: of the order of samples.
      folder: where a run keeps its tokenizer.json (its workdir): read from there if present, else
        written there. None: nothing is written outside data.cache_dir.
      log: receives a line per event and per few seconds of work.

    Raises:
      ConfigError: missing, empty or too small corpora, ids beyond the vocabulary, illegal options.
      ImportError: naming the extra that a source or tokenizer needs.
    """
    if faults := config.faults():
        raise ConfigError(faults)
    weights, configs = sources_of(config)
    opener = _Opener(sequence_length, vocab_size, folder, log)
    parts = opener.parts(configs)
    dataset = Dataset(
        parts,
        weights,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        seed=seed,
        fingerprint=tokenizer.digest(
            sequence_length,
            config.packing,
            config.validation_share,
            weights,
            *(store.fingerprint for part in parts for store in part.stores),
        ),
    )
    log(
        f"data: {dataset.num_train_samples} training samples of {sequence_length} tokens "
        f"({dataset.num_train_tokens} tokens), {dataset.num_validation_tokens} held-out targets"
    )
    return dataset


def sources_of(config: DataConfig) -> tuple[list[float], list[DataConfig]]:
    """Returns the weights and the single-source configs of a config."""
    if config.source != "mixture":
        return [1.0], [config]
    weights, configs, faults = [], [], []
    # One text may hold several entries, as the command line gives them; a path may hold commas too.
    for entry in re.split(r",\s*(?=[\d.]+:)", ",".join(config.mixture)):
        weight, source, path = (*entry.split(":", 2), "", "")[:3]
        try:
            weights.append(float(weight))
            positive = 0 < weights[-1] < float("inf")
        except ValueError:
            positive = False
        kinds = [kind for kind in typing.get_args(Source) if kind != "mixture"]
        if not positive or source not in kinds:
            faults.append(
                f"data.mixture entry {entry!r}: required weight:source:path with a weight > 0 and "
                f"a source of {', '.join(kinds)}."
            )
            continue
        kind = typing.cast(Source, source)
        one = dataclasses.replace(config, source=kind, path=path, mixture=())
        configs.append(one)
        faults += one.faults()
    if faults:
        raise ConfigError(faults)
    return weights, configs


@dataclasses.dataclass
class _Opener:
    """What the sources of one dataset share."""

    length_S: int
    vocab_size: int | None
    folder: Path | None
    log: Callable[[str], None]
    encoder: tokenizer.Tokenizer | None = None  # of all text sources; None: there are none

    def parts(self, configs: list[DataConfig]) -> list[Part]:
        """Returns the sources, opened; text is tokenised by one tokenizer."""
        found = [None if c.source in _PRETOKENISED else self._corpus(c) for c in configs]
        texts = [corpus for corpus in found if corpus]
        self.encoder = self._tokenizer(configs[0], texts)
        return [self._part(*pair) for pair in zip(configs, found, strict=True)]

    def _part(self, config: DataConfig, corpus: corpora.Corpus | None) -> Part:
        store = self._store(config, corpus)
        stores: tuple[formats.TokenStore, ...] = (store,)
        if config.validation_path:
            held_config = dataclasses.replace(config, path=config.validation_path)
            held_store = self._store(held_config, corpus and self._corpus(held_config))
            train, held = np.ones(len(store.length), bool), np.ones(len(held_store.length), bool)
            stores = (store, held_store)
        else:
            store, held = split(store, config.validation_share, self.log)
            train, held_store, stores = ~held, store, (store,)
        train_tokens = int(store.length[train].sum())
        if train_tokens <= self.length_S:
            raise ConfigError(
                f"data source {store.name}: {train_tokens} training tokens, but one sample needs "
                f"{self.length_S + 1}. Give more text, lower batch.sequence_length or "
                "data.validation_share."
            )
        return Part(
            stores,
            train=self._samples(config, store, train, -1),
            validation=self._samples(config, held_store, held, config.validation_tokens),
            train_tokens=train_tokens,
            train_bytes=None if store.num_bytes is None else int(store.num_bytes[train].sum()),
            tokenizer=self.encoder,
        )

    def _corpus(self, config: DataConfig) -> corpora.Corpus:
        corpus = corpora.open_corpus(config)
        self.log(f"data: {corpus.name}: {corpus.summary}")
        return corpus

    def _store(self, config: DataConfig, corpus: corpora.Corpus | None) -> formats.TokenStore:
        """Returns the tokens of a source, checked against the model's vocabulary."""
        if corpus:
            assert self.encoder
            store = cache.open_tokens(corpus, self.encoder, config.cache_folder(), self.log)
        elif config.source == "bin":
            store = formats.open_bin(config)
        else:
            store = formats.open_megatron(config)
        largest = store.max_id
        if largest is not None and self.vocab_size is not None and largest >= self.vocab_size:
            raise ConfigError(
                f"data source {store.name}: token id {largest} with model.vocab_size="
                f"{self.vocab_size}. Set model.vocab_size to {largest + 1} or more."
            )
        return store

    def _tokenizer(
        self, config: DataConfig, texts: list[corpora.Corpus]
    ) -> tokenizer.Tokenizer | None:
        """Returns the tokenizer; None for tokens made elsewhere, unless a file of it is named."""
        trained = tokenizer.bpe_size(config.tokenizer) is not None
        if not texts and (trained or config.tokenizer == "bytes"):
            return None
        saved = self.folder and (self.folder / tokenizer.TOKENIZER_FILE).is_file()
        if trained and not saved:
            found = self._train_tokenizer(config, texts)
        else:
            found = tokenizer.load_tokenizer(config.tokenizer, folder=self.folder)
        if self.folder:
            tokenizer.save_tokenizer(found, self.folder)
        return found

    def _train_tokenizer(
        self, config: DataConfig, texts: list[corpora.Corpus]
    ) -> tokenizer.Tokenizer:
        """Returns `bpe:SIZE`, trained on what is not held out of all text sources."""
        share = 0 if config.validation_path else config.validation_share
        stamps = (part for corpus in texts for part in (corpus.name, corpus.stamp))
        key = tokenizer.digest(config.tokenizer, share, *stamps)[:16]
        file = config.cache_folder() / f"tokenizer-{key}.json"
        with cache.one_builder(file, self.log):
            return tokenizer.train_tokenizer(
                config.tokenizer,
                [_training_texts(corpus, share) for corpus in texts],
                file=file,
                log=self.log,
            )

    def _samples(
        self, config: DataConfig, store: formats.TokenStore, chosen: np.ndarray, limit: int
    ) -> Samples:
        if config.packing == "window":
            return Windows(store, chosen, self.length_S, validation_limit=limit)
        plan = packing.open_packing(
            store,
            chosen,
            self.length_S,
            limit=max(limit, 0),
            folder=config.cache_folder(),
            log=self.log,
        )
        return packing.PackedDocuments(store, plan, self.length_S)


def _training_texts(corpus: corpora.Corpus, share: int) -> Iterator[str]:
    """Yields what the hash leaves for training; all, where it leaves nothing (see split)."""
    empty = True
    for document in corpus.documents():
        if formats.group_of([document.id])[0] >= share:
            empty = False
            yield document.text
    if empty:
        yield from (document.text for document in corpus.documents())


def split(
    store: formats.TokenStore, share: int, log: Callable[[str], None]
) -> tuple[formats.TokenStore, np.ndarray]:
    """Returns the store and which documents are held out, [documents] bool.

    Documents whose id hashes below `share` (of 256) are held out. Where that takes none or all of
    them (a corpus of one file), each document is first cut into blocks of BLOCK_TOKENS, which are
    then documents.
    """
    held = store.group < share
    if not share or (held.any() and not held.all()):
        return store, held
    blocks = -(-store.length // formats.BLOCK_TOKENS)
    document = np.repeat(np.arange(len(blocks)), blocks)
    number = packing.count_up(blocks)
    offset = number * formats.BLOCK_TOKENS
    length = np.minimum(formats.BLOCK_TOKENS, store.length[document] - offset)
    scale = length / np.maximum(store.length[document], 1)
    num_bytes = None if store.num_bytes is None else store.num_bytes[document] * scale
    pairs = zip(document.tolist(), number.tolist(), strict=True)
    store = dataclasses.replace(
        store,
        file=store.file[document],
        start=store.start[document] + offset,
        length=length,
        group=formats.group_of(f"{d}#{n}" for d, n in pairs),
        num_bytes=num_bytes,
    )
    held = store.group < share
    log(
        f"data: {store.name}: few documents, so blocks of {formats.BLOCK_TOKENS} tokens are held "
        f"out: {held.sum()} of {len(held)}"
    )
    return store, held
