"""A dataset: samples of fixed length, ordered by (seed, global sample index) and
nothing else.

Shapes: B rows asked for, S sequence length, G global batch. Nothing here knows of
processes: whoever asks names the rows of the global batch that it wants.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults as config_faults
from jaxdist.data import (
    arrays,
    chat,
    sliding,
    splits,
    token_cache,
    token_files,
    tokenizer,
    tokenizer_config,
)
from jaxdist.data.packing import Batch, PackedDocuments
from jaxdist.data.shuffle import Mixture, order_key, permute
from jaxdist.data.sources import Corpus, DataConfig, open_corpus, sources_of
from jaxdist.data.splits import DatasetSplit
from jaxdist.data.token_cache import Encoder, Log
from jaxdist.data.token_files import TokenStore
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest

# `sample` is int32; randomness folded from it repeats after 2^31 samples
SAMPLE_MASK = 0x7FFFFFFF
_ALL_ROWS = slice(None)


class SourceError(RuntimeError):
    """A source that failed while it was read; the text names it."""


class Dataset:
    """Training and held-out samples of one source or a mixture; made by
    `open_dataset`.
    """

    def __init__(
        self,
        sides: Sequence[tuple[DatasetSplit, ...]],
        weights: Sequence[float] = (1.0,),
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        seed: int,
        fingerprint: str,
    ):
        """Args:
        sides: of each source the training part and the held-out part.
        """
        train, held_out = zip(*sides, strict=True)
        self.name = " + ".join(side.name for side in train)
        # of the tokens, the split, the cut and the mixture
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer  # None: the tokens came without one
        self.bytes_per_token = _bytes_per_token(train)
        # of all held-out documents
        self.validation_bytes_per_token = _bytes_per_token(held_out)
        self._samples = {"train": [side.samples for side in train]}
        self._samples["validation"] = [side.samples for side in held_out]
        self._sizes = np.array([samples.num_rows for samples in self._samples["train"]])
        self._keys = np.array(
            [order_key(seed, str(i)) for i in range(len(sides))], np.uint64
        )
        self._mixture, self._vocab_size = Mixture(weights), vocab_size
        self._unscanned = not all(side.scanned for side in train + held_out)
        self._fills = not any(
            isinstance(side.samples, arrays.ArrayRows) for side in held_out
        )
        self.num_train_samples = int(self._sizes.sum())  # one epoch of each
        self.num_train_tokens = sum(side.num_tokens for side in train)
        self.num_validation_tokens = sum(side.samples.num_targets for side in held_out)
        # None: they do not slide
        self.validation_windows = sliding.total(side.samples for side in held_out)
        # Held-out rows are numbered through all sources.
        self._ends = np.cumsum([side.samples.num_rows for side in held_out])

    def train_batch(
        self, step: int, global_size: int, rows: slice | np.ndarray = _ALL_ROWS
    ) -> Batch:
        """Returns rows of the global batch of `step` (updates finished before it, from
        0).

        Args:
          global_size: sequences per step, G.
          rows: which of the G rows, all by default; a slice or [B] integers.

        Returns:
          tokens, targets, positions [B, S] int32, weights [B, S] float32, sample [B]
          int32 (the global sample index, modulo 2^31); with packing=documents also
          segment_ids [B, S] int32.

        Raises SourceError where a source cannot be read or holds an id beyond the
        vocabulary."""
        return self.read("train", step * global_size + np.arange(global_size)[rows])

    def reader_state(self, step: int) -> Any:
        """Returns what a reader of `step` must be told to go on there, as JSON; None:
        the step says all.
        """
        return None

    def go_to(self, step: int, state: Any) -> str:
        """Tells the reader that `step` comes next; returns a line for people, "" where
        there is none to say.

        Args:
          state: of `reader_state`; None: unknown.
        """
        return ""

    def num_validation_batches(self, global_size: int) -> int:
        """Returns how many batches of `global_size` rows hold all held-out samples.

        Samples of arrays have no weights, so there no empty row can fill the last
        batch: only whole batches count. Raises ConfigError where nothing is held out,
        or no whole batch."""
        rows = int(self._ends[-1])
        count = -(-rows // global_size) if self._fills else rows // global_size
        if not self.num_validation_tokens or not count:
            some = f"the {rows} samples held out are no whole batch of {global_size}"
            raise ConfigError(
                f"data source {self.name}: {some if rows else 'nothing is held out'} for evaluation. Set "
                "data.validation_path, raise data.validation_share, or set train.eval_every=0."
            )
        return count

    def validation_batch(
        self, number: int, global_size: int, rows: slice | np.ndarray = _ALL_ROWS
    ) -> Batch:
        """Returns rows of held-out batch `number`; as train_batch, the last filled with
        empty rows.

        Over all batches every held-out token that has a predecessor is a target once:
        weights sum to `num_validation_tokens`.
        """
        return self.read(
            "validation", number * global_size + np.arange(global_size)[rows]
        )

    def read(self, split: str, indices: np.ndarray) -> Batch:
        """Returns samples [B] of split `train` (any index >= 0) or `validation`; see
        train_batch.

        A validation index past the end gives an empty row (weights 0).
        """
        indices = np.asarray(indices, np.int64)
        if split == "train":
            source, rows = self._locate(indices)
        else:
            source = np.minimum(
                np.searchsorted(self._ends, indices, "right"), len(self._ends) - 1
            )
            rows = indices - np.concatenate([[0], self._ends[:-1]])[source]
        try:
            batch = _read(self._samples[split], source, rows)
        except (OSError, IndexError) as error:
            place = f"{split} sample {indices[0]}"
            raise SourceError(
                f"data source {self.name} ended or failed at {place}: {error}"
            ) from error
        if self._unscanned:
            ids = batch["tokens"], batch["targets"]
            if (smallest := min(int(x.min()) for x in ids)) < 0:
                place = f"among {split} samples {indices[0]} to {indices[-1]}"
                raise SourceError(
                    f"data source {self.name}: token id {smallest} {place}; required 0 or more"
                )
            if fault := _id_fault(
                self.name, max(int(x.max()) for x in ids), self._vocab_size
            ):
                raise SourceError(fault)
        return batch | {"sample": (indices & SAMPLE_MASK).astype(np.int32)}

    def attention_work(
        self, step: int, global_size: int, chunks: int = 1
    ) -> np.ndarray | None:
        """Returns how much attention each row of the global batch of `step` needs, [G,
        chunks] int64: pairs of tokens of the same document, by equal chunks of the row;
        None where all rows need the same.
        """
        if not all(
            isinstance(samples, PackedDocuments) for samples in self._samples["train"]
        ):
            return None
        source, rows = self._locate(step * global_size + np.arange(global_size))
        work = np.empty((global_size, chunks), np.int64)
        for number in np.unique(source):
            mine = source == number
            work[mine] = self._samples["train"][number].attention_work(
                rows[mine], chunks
            )
        return work

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and its row of training samples, both [B]."""
        source, running = self._mixture.locate(indices)
        return source, permute(running, self._sizes[source], self._keys[source])


def _id_fault(name: str, largest: int | None, vocab_size: int | None) -> str:
    """Returns what is wrong with a source's largest token id; empty where nothing is,
    or is known.
    """
    if largest is None or vocab_size is None or largest < vocab_size:
        return ""
    return (
        f"data source {name}: token id {largest} with model.vocab_size={vocab_size}. Set model.vocab_size "
        f"to {largest + 1} or more, above every id."
    )


def _read(samples: list, source: np.ndarray, rows: np.ndarray) -> Batch:
    """Returns one batch whose row i is row `rows[i]` of `samples[source[i]]`."""
    numbers = np.unique(source)
    if len(numbers) == 1:  # nothing to merge, and constant arrays stay the same objects
        return samples[numbers[0]].read(rows)
    batch: Batch = {}
    for number in numbers:
        for name, values in samples[number].read(rows[source == number]).items():
            whole = batch.setdefault(
                name, np.empty((len(rows), *values.shape[1:]), values.dtype)
            )
            whole[source == number] = values
    return batch


def _bytes_per_token(sides: tuple[DatasetSplit, ...]) -> float | None:
    """Returns UTF-8 bytes per token over all sides; None where one is unknown, or
    without tokens.
    """
    sizes = [side.num_bytes for side in sides]
    tokens = sum(side.num_tokens for side in sides)
    return (
        None
        if None in sizes or not tokens
        else float(sum(filter(None, sizes)) / tokens)
    )


# --- Opening --------------------------------------------------------------------------


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
    """Returns the dataset of a config, tokenising the corpus on first use.

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
        illegal options.
      ImportError: naming the extra that a source or tokenizer needs.
    """
    if faults := config_faults(config, "data."):
        raise ConfigError(faults)
    if not config.is_text:
        return _open_arrays(config, seed, log)
    weights, configs = sources_of(config)
    count = len(configs)
    if config.validation_path:  # a corpus of its own; a mixture has none
        configs = [config, dataclasses.replace(config, path=config.validation_path)]
    texts = [
        None if c.source in ("bin", "megatron") else _open_text(c, log) for c in configs
    ]
    loaded, encoder = _open_tokenizer(
        config, [text for text in texts[:count] if text], folder, log
    )
    stores = [
        _open_tokens(*pair, encoder, log) for pair in zip(configs, texts, strict=True)
    ]
    if faults := list(
        filter(
            None, (_id_fault(store.name, store.max_id, vocab_size) for store in stores)
        )
    ):
        raise ConfigError(faults)
    sides = [
        (
            splits.cut(config, *train, sequence_length, log),
            splits.cut(
                config, *held, sequence_length, log, held_out=True, stride=stride
            ),
        )
        for train, held in splits.split_all(stores, config, log)
    ]
    fingerprints = [store.fingerprint for store in stores]
    fingerprint = digest(
        sequence_length, config.cut, config.validation_share, weights, *fingerprints
    )
    dataset = Dataset(
        sides,
        weights,
        tokenizer=loaded,
        vocab_size=vocab_size,
        seed=seed,
        fingerprint=fingerprint,
    )
    log(
        f"data: {dataset.num_train_samples} training samples of {sequence_length} tokens "
        f"({dataset.num_train_tokens} tokens), {dataset.num_validation_tokens} held-out targets"
    )
    return dataset


def _open_arrays(config: DataConfig, seed: int, log: Log) -> Dataset:
    name, fingerprint, train, held_out = arrays.open_arrays(config)
    kinds = arrays.sample_shapes(config).items()
    contents = ", ".join(
        f"{entry} {list(dims)} {dtype}" for entry, (dims, dtype) in kinds
    )
    log(
        f"data: {name}: {train.num_rows} samples of {contents}; {held_out.num_rows} held out"
    )
    return Dataset(
        [splits.array_splits(name, train, held_out)], seed=seed, fingerprint=fingerprint
    )


def sample_shapes(
    config: DataConfig, sequence_length: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns dims and dtype of what one sample of a config's dataset holds, by batch
    entry.

    Raises:
      ConfigError: `data.source=arrays` has no such file.
    """
    index: dict[str, tuple[tuple[int, ...], str]] = {arrays.INDEX: ((), "int32")}
    if not config.is_text:
        return arrays.sample_shapes(config) | index
    dtypes = {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "positions": "int32",
    }
    if config.packing == "documents":
        dtypes["segment_ids"] = "int32"
    return {name: ((sequence_length,), dtype) for name, dtype in dtypes.items()} | index


def _open_tokens(
    config: DataConfig, text: Corpus | None, encoder: Encoder | None, log: Log
) -> TokenStore:
    """Returns the tokens of a text, or (None) of token files."""
    if text is None:
        return (
            token_files.open_bin
            if config.source == "bin"
            else token_files.open_megatron
        )(config)
    assert encoder
    return token_cache.open_tokens(text, encoder, config.cache_folder(), log)


def _open_text(config: DataConfig, log: Log) -> Corpus:
    corpus = open_corpus(config)
    log(f"data: {corpus.name}: {corpus.summary}")
    return corpus


def _open_tokenizer(
    config: DataConfig, texts: list[Corpus], folder: Path | None, log: Log
) -> tuple[Tokenizer | None, Encoder | None]:
    """Returns the tokenizer and what makes tokens of documents with it, and keeps both
    in `folder`.

    None for tokens made elsewhere, unless a file of their tokenizer is named."""
    size, name = tokenizer.bpe_size(config.tokenizer), config.tokenizer
    if not texts and (size or name == "bytes"):
        return None, None
    file = folder and folder / tokenizer.TOKENIZER_FILE
    kept = file and file.is_file()
    if size and not kept:  # trained on what is not held out of all text sources
        share = 0 if config.validation_path else config.validation_share
        stamps = (part for corpus in texts for part in (corpus.name, corpus.stamp))
        target = (
            config.cache_folder()
            / f"tokenizer-{digest(name, share, *stamps)[:16]}.json"
        )
        with token_cache.one_builder(target, log):
            if not target.is_file():
                log(f"data: training a byte-level BPE of {size} tokens -> {target}")
                documents = [_training_texts(corpus, share) for corpus in texts]
                atomic.write_text(target, tokenizer.bpe().train(documents, size))
        name = str(target)
    cache, special = config.cache_folder(), config.special_tokens
    loaded = tokenizer.load_tokenizer(
        name, folder=folder, cache=cache, special_tokens=special
    )
    encoder: Encoder = token_cache.TextEncoder(loaded)
    about = loaded.config
    if config.format == "chat":
        encoder = chats = chat.open_encoder(config, loaded, folder)
        source = chats.template.source if chats.template else ""
        about = dataclasses.replace(about, end_ids=chats.end_ids, chat_template=source)
    if folder and (not kept if loaded.content else about != loaded.config):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer_config.write(folder, about)
        if loaded.content is not None:
            atomic.write_text(folder / tokenizer.TOKENIZER_FILE, loaded.content)
    return loaded, encoder


def _training_texts(corpus: Corpus, share: int) -> Iterator[str]:
    """Yields what the hash leaves for training; all, where it leaves nothing (see
    split).
    """
    empty = True
    for document in corpus.documents():
        if token_files.group_of([document.id])[0] >= share:
            empty = False
            yield document.text
    if empty:
        yield from (document.text for document in corpus.documents())
