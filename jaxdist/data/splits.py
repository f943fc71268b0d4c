"""Training side and held-out side of a source, cut into rows.

Words of this folder:
  split: the name of a side of the whole dataset, "train" or "validation"
  side: the training data or the held-out data of one source, a `DatasetSplit`
  to split: to choose the side of each document, or of each sample of arrays
  to cut: to make rows of S predictions out of a side's documents

The id of a document alone decides whether it is held out. The number of a sample of
arrays alone decides whether that sample is. The seed of a run has no effect.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import packing, sliding, token_files
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import DatasetSplit, Samples
from jaxdist.data.samples import Arrays, SampleRows, count_samples
from jaxdist.data.shuffle import order_key, permute
from jaxdist.data.sources.source import SampleSource
from jaxdist.data.token_cache import Log
from jaxdist.data.token_files import TokenStore
from jaxdist.storage.digest import digest

Sides = tuple[DatasetSplit, DatasetSplit]  # training side, held-out side


# --- Samples of arrays ----------------------------------------------------------------


def sample_sides(name: str, train: SampleRows, held_out: SampleRows) -> Sides:
    """Makes the sides of a source of arrays. Each sample counts as one token."""
    return (
        DatasetSplit(name, train, train.num_rows, pads=False),
        DatasetSplit(name, held_out, held_out.num_rows, pads=False),
    )


def split_samples(source: SampleSource, config: DataConfig) -> tuple[Sides, str]:
    """Reads the samples of a source of arrays, and splits them.

    Returns:
      The sides, and a fingerprint of the contents and of how they are split.

    Raises:
      ConfigError: the file is invalid, with all faults, or no samples are left for
        training.
      ImportError: an extra is missing. The error names the extra.
    """
    assert source.read
    arrays, stamp = source.read(config.path)
    count = count_samples(arrays)
    held_out_arrays = arrays
    if config.validation_path:
        held_out_arrays, held_out_stamp = source.read(config.validation_path)
        _check_alike(arrays, held_out_arrays, config.validation_path)
        train = np.arange(count)
        held_out = np.arange(count_samples(held_out_arrays))
        fingerprint = digest(stamp, held_out_stamp)
    else:
        share = config.validation_share
        shuffled = permute(np.arange(count), count, order_key(0, "held out"))
        num_held_out = math.ceil(count * share / 256)
        train = np.sort(shuffled[num_held_out:])
        held_out = np.sort(shuffled[:num_held_out])
        fingerprint = digest(stamp, share)
    if not len(train):
        raise ConfigError(
            f"data source {config.name}: all {count} samples are held out; "
            "give more of them"
        )
    if config.validation_tokens:
        held_out = held_out[: config.validation_tokens]
    sides = sample_sides(
        config.name, SampleRows(arrays, train), SampleRows(held_out_arrays, held_out)
    )
    return sides, fingerprint


def _check_alike(arrays: Arrays, held_out: Arrays, validation_path: str) -> None:
    """Checks that held-out samples have the entries and dims of the others.

    Raises:
      ConfigError: they differ.
    """
    dims = {name: list(values.shape[1:]) for name, values in arrays.items()}
    held_out_dims = {name: list(values.shape[1:]) for name, values in held_out.items()}
    if held_out_dims != dims:
        raise ConfigError(
            f"data.validation_path={validation_path}: "
            f"a sample has {held_out_dims}, in data.path {dims}"
        )


# --- Documents ------------------------------------------------------------------------


def split_all(
    stores: list[TokenStore], config: DataConfig, log: Log
) -> Iterator[tuple[TokenStore, TokenStore]]:
    """Yields the training documents and the held-out documents of each source."""
    if config.validation_path:
        train, held_out = stores
        yield train, held_out
        return
    for documents in stores:
        store, held = split(documents, config.validation_share, log)
        yield store.take(~held), store.take(held)


def split(store: TokenStore, share: int, log: Log) -> tuple[TokenStore, np.ndarray]:
    """Chooses the documents that are held out.

    These are the documents whose id hashes below `share`, out of 256. In a corpus of
    few files, that may be none or all of them. Each document is then cut into blocks of
    BLOCK_TOKENS, which count as documents. Examples are not cut: those with the
    smallest hash are held out.

    Args:
      store: tokenized documents.
      share: documents of every 256 to hold out.
      log: receives a line if the hash alone does not split the documents.

    Returns:
      The store, whose documents may be blocks, and a mask [documents] of the held-out
      ones.
    """
    is_held_out = store.group < share
    if not share or (is_held_out.any() and not is_held_out.all()):
        return store, is_held_out
    if store.weights:
        is_held_out = store.group == store.group.min(initial=255)
        if is_held_out.all():
            is_held_out = np.zeros_like(is_held_out)
        log(
            f"data: {store.name}: few examples, so {is_held_out.sum()} of {len(is_held_out)} are "
            "held out"
        )
        return store, is_held_out
    store = _cut_into_blocks(store)
    is_held_out = store.group < share
    log(
        f"data: {store.name}: few documents, so blocks of {token_files.BLOCK_TOKENS} "
        f"tokens are held out: {is_held_out.sum()} of {len(is_held_out)}"
    )
    return store, is_held_out


def _cut_into_blocks(store: TokenStore) -> TokenStore:
    """Makes each block of BLOCK_TOKENS of a document a document."""
    size = token_files.BLOCK_TOKENS
    blocks = -(-store.length // size)
    document = np.repeat(np.arange(len(blocks)), blocks)
    number = packing.count_up(blocks)
    documents = store.take(document)
    offset = number * size
    length = np.minimum(size, documents.length - offset)
    num_bytes = None
    if documents.num_bytes is not None:
        num_bytes = documents.num_bytes * (length / np.maximum(documents.length, 1))
    pairs = zip(document.tolist(), number.tolist(), strict=True)
    return dataclasses.replace(
        documents,
        start=documents.start + offset,
        length=length,
        group=token_files.group_of(f"{d}#{n}" for d, n in pairs),
        num_bytes=num_bytes,
    )


def cut_texts(
    config: DataConfig,
    store: TokenStore,
    *,
    sequence_length: int,
    log: Log,
    held_out: bool = False,
    stride: int | None = None,
) -> DatasetSplit:
    """Cuts texts into rows, and logs the fate of those longer than a row.

    Args:
      config: settings of the data.
      store: documents of one side of a source.
      sequence_length: S.
      log: receives the lines.
      held_out: whether the documents are held out.
      stride: tokens by which sliding windows move; None = no sliding windows.

    Raises:
      ConfigError: the training side is too small.
    """
    length = store.length
    kept = length
    if stride is None and config.truncates:
        kept = np.minimum(length, sequence_length + 1)
    num_tokens = int(kept.sum())
    if not held_out and num_tokens <= sequence_length:
        raise ConfigError(
            f"data source {store.name}: {num_tokens} training tokens, but one "
            f"sample needs {sequence_length + 1}. Give more text, lower "
            "batch.sequence_length or data.validation_share."
        )
    if stride is None and config.packing == "documents":
        _log_longer(
            store.name,
            side_name(held_out),
            length=length,
            kept=kept,
            sequence_length=sequence_length,
            log=log,
        )
    rows = _make_rows(
        config,
        store,
        sequence_length=sequence_length,
        log=log,
        held_out=held_out,
        stride=stride,
    )
    num_bytes = None
    if store.num_bytes is not None:
        share = kept / np.maximum(length, 1)
        num_bytes = float((store.num_bytes * share).sum())
    return DatasetSplit(
        name=store.name,
        samples=rows,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        scanned=store.max_id is not None,
    )


def cut_examples(
    config: DataConfig,
    store: TokenStore,
    *,
    sequence_length: int,
    log: Log,
    held_out: bool = False,
    stride: int | None = None,
) -> DatasetSplit:
    """Cuts examples into rows, and logs how many are truncated or dropped.

    See `cut_texts` for the arguments. The tokens of the side are its learned tokens.

    Raises:
      ConfigError: the training side has no learned tokens.
    """
    longest = int(store.length.max(initial=0))
    if stride is None and config.truncates:
        longest = sequence_length
    num_tokens = _count_examples(store, longest, log, held_out=held_out)
    rows = _make_rows(
        config,
        store,
        sequence_length=sequence_length,
        log=log,
        held_out=held_out,
        stride=stride,
    )
    return DatasetSplit(
        name=store.name,
        samples=rows,
        num_tokens=num_tokens,
        scanned=store.max_id is not None,
    )


def _make_rows(
    config: DataConfig,
    store: TokenStore,
    *,
    sequence_length: int,
    log: Log,
    held_out: bool,
    stride: int | None,
) -> Samples:
    """Makes the rows of documents; see `cut_texts`."""
    limit = config.validation_tokens if held_out else 0
    if stride is not None:
        return sliding.SlidingWindows(
            store,
            sequence_length,
            stride=stride,
            limit=limit,
            packed=config.packing == "documents",
        )
    if config.packing == "window":
        return packing.Windows(store, sequence_length, limit=limit, partial=held_out)
    plan = packing.open_packing(
        store,
        sequence_length,
        limit=limit,
        truncate=config.truncates,
        folder=config.cache_folder(),
        log=log,
    )
    return packing.PackedDocuments(store, plan, sequence_length)


def side_name(held_out: bool) -> str:
    """Names a side of a source for logs: "held-out" or "training"."""
    return "held-out" if held_out else "training"


def _log_longer(
    name: str,
    side: str,
    *,
    length: np.ndarray,
    kept: np.ndarray,
    sequence_length: int,
    log: Log,
) -> None:
    """Logs the fate of documents that are longer than a row, if there are any.

    Args:
      name: name of the source.
      side: "training" or "held-out".
      length: [documents], tokens.
      kept: [documents], tokens that rows hold.
      sequence_length: S.
      log: receives the line.
    """
    longer = int((length > sequence_length + 1).sum())
    if not longer:
        return
    fate = "split, and continued in other rows"
    dropped = int((length - kept).sum())
    if dropped:
        fate = f"cut off there: {dropped} of {length.sum()} tokens are dropped"
    log(
        f"data: {name}: {longer} of {len(length)} {side} documents are longer than "
        f"{sequence_length + 1} tokens and {fate}"
    )


def _count_examples(
    store: TokenStore, sequence_length: int, log: Log, *, held_out: bool
) -> int:
    """Counts the learned tokens of examples; logs how many are truncated or skipped.

    Raises:
      ConfigError: training has no learned tokens.
    """
    length = store.length
    predictions = packing.count_predictions(store)
    learned_before_cut = packing.count_learned(
        store, store.documents._replace(length=predictions)
    )
    kept = packing.count_predictions(store, longest=sequence_length)
    learned = packing.count_learned(store, store.documents._replace(length=kept))
    longer = int((length > sequence_length + 1).sum())
    empty = int((learned == 0).sum())
    log(
        f"data: {store.name}: {len(length)} {side_name(held_out)} examples, "
        f"{learned.sum()} of {length.sum()} tokens learned; "
        f"{longer} longer than {sequence_length + 1} tokens "
        f"and cut off there ({(learned_before_cut - learned).sum()} learned tokens lost), "
        f"{empty} dropped without a learned token"
    )
    if not held_out and not learned.any():
        raise ConfigError(
            f"data source {store.name}: no example has a learned token among its first "
            f"{sequence_length + 1}. Raise batch.sequence_length, or give rows with an "
            "assistant's turn or a completion."
        )
    return int(learned.sum())
