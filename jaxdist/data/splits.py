"""The training and the held-out part of a source: which documents are in which, as
which samples.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.data import arrays, packing, sliding, token_files
from jaxdist.data.sources import DataConfig
from jaxdist.data.token_cache import Log
from jaxdist.data.token_files import TokenStore


@dataclasses.dataclass(frozen=True)
class DatasetSplit:
    """The training or the held-out part of one source, cut into samples."""

    name: str
    samples: packing.Windows | packing.PackedDocuments | arrays.ArrayRows
    num_tokens: int  # of arrays: samples
    num_bytes: float | None = None  # of their text, UTF-8; None: unknown
    scanned: bool = True  # whether all token ids are known to be in the vocabulary


def array_splits(name: str, *parts: arrays.ArrayRows) -> tuple[DatasetSplit, ...]:
    """Returns parts of a source of arrays, each of whose samples counts as one
    token.
    """
    return tuple(DatasetSplit(name, part, part.num_rows) for part in parts)


def split_all(
    stores: list[TokenStore], config: DataConfig, log: Log
) -> Iterator[list[tuple[TokenStore, np.ndarray]]]:
    """Yields of each source (store, chosen documents) twice: those of training and
    those held out.
    """
    if config.validation_path:
        yield [(store, np.ones(len(store.length), bool)) for store in stores]
        return
    for store in stores:
        store, held = split(store, config.validation_share, log)
        yield [(store, ~held), (store, held)]


def cut(
    config: DataConfig,
    store: TokenStore,
    chosen: np.ndarray,
    length_S: int,
    log: Log,
    held_out: bool = False,
    stride: int | None = None,
) -> DatasetSplit:
    """Returns the chosen documents as samples, and says what becomes of those longer
    than a sequence.

    Raises:
      ConfigError: training has too little.
    """
    length = store.length[chosen]
    truncates = stride is None and config.truncates
    kept = (
        np.minimum(length, length_S + 1) if truncates and not store.weights else length
    )
    num_tokens = int(kept.sum())
    if store.weights:
        longest = length_S if truncates else int(length.max(initial=0))
        num_tokens = _count_examples(store, chosen, longest, log, held_out)
    elif not held_out and num_tokens <= length_S:
        raise ConfigError(
            f"data source {store.name}: {num_tokens} training tokens, but one sample needs {length_S + 1}. "
            "Give more text, lower batch.sequence_length or data.validation_share."
        )
    limit = config.validation_tokens if held_out else 0
    samples: packing.Windows | packing.PackedDocuments
    if stride is not None:
        packed = config.packing == "documents"
        samples = sliding.SlidingWindows(
            store, chosen, length_S, stride=stride, limit=limit, packed=packed
        )
    elif config.packing == "window":
        samples = packing.Windows(
            store, chosen, length_S, limit=limit, partial=held_out
        )
    else:
        if not store.weights:
            _log_longer(store.name, length, kept, length_S, log, held_out)
        plan = packing.open_packing(
            store,
            chosen,
            length_S,
            limit=limit,
            truncate=truncates,
            folder=config.cache_folder(),
            log=log,
        )
        samples = packing.PackedDocuments(store, plan, length_S)
    share = kept / np.maximum(length, 1)
    num_bytes = (
        None if store.num_bytes is None else (store.num_bytes[chosen] * share).sum()
    )
    return DatasetSplit(
        store.name, samples, num_tokens, num_bytes, store.max_id is not None
    )


def _log_longer(
    name: str,
    length: np.ndarray,
    kept: np.ndarray,
    length_S: int,
    log: Log,
    held_out: bool,
) -> None:
    """Says what becomes of documents that are longer than a sequence, if there
    are any.
    """
    longer, left_out = int((length > length_S + 1).sum()), int((length - kept).sum())
    fate = "split, and go on in other rows"
    if left_out:
        fate = f"cut off there: {left_out} of {length.sum()} tokens are left out"
    if longer:
        of = f"{len(length)} {'held-out' if held_out else 'training'} documents"
        log(
            f"data: {name}: {longer} of {of} are longer than {length_S + 1} tokens and {fate}"
        )


def _count_examples(
    store: TokenStore, chosen: np.ndarray, length_S: int, log: Log, held_out: bool
) -> int:
    """Returns the learned tokens of the chosen examples, and says which are cut off or
    left out. Raises ConfigError where training has none."""
    length, learned = (
        store.length[chosen],
        packing.learned_targets(store, chosen, length_S),
    )
    whole = packing.learned_targets(store, chosen, int(length.max(initial=0)))
    longer, empty = int((length > length_S + 1).sum()), int((learned == 0).sum())
    log(
        f"data: {store.name}: {len(length)} {'held-out' if held_out else 'training'} examples, "
        f"{learned.sum()} of {length.sum()} tokens learned; {longer} longer than {length_S + 1} tokens "
        f"and cut off there ({(whole - learned).sum()} learned tokens lost), "
        f"{empty} left out with no learned token"
    )
    if not held_out and not learned.any():
        raise ConfigError(
            f"data source {store.name}: no example has a learned token among its first {length_S + 1}. Raise "
            "batch.sequence_length, or give rows with an assistant's turn or a completion."
        )
    return int(learned.sum())


def split(store: TokenStore, share: int, log: Log) -> tuple[TokenStore, np.ndarray]:
    """Returns the store and which documents are held out, [documents] bool.

    Documents whose id hashes below `share` (of 256) are held out. Where that takes none
    or all of them (a corpus of one file), each document is first cut into blocks of
    BLOCK_TOKENS, which are then documents.
    """
    held = store.group < share
    if not share or (held.any() and not held.all()):
        return store, held
    if store.weights:  # examples stay whole: those of the smallest hash, but not all
        held = store.group == store.group.min(initial=255)
        held &= len(store.group) > held.sum()
        log(
            f"data: {store.name}: few examples, so {held.sum()} of {len(held)} are held out"
        )
        return store, held
    blocks = -(-store.length // token_files.BLOCK_TOKENS)
    document, number = (
        np.repeat(np.arange(len(blocks)), blocks),
        packing.count_up(blocks),
    )
    offset = number * token_files.BLOCK_TOKENS
    length = np.minimum(token_files.BLOCK_TOKENS, store.length[document] - offset)
    scale = length / np.maximum(store.length[document], 1)
    pairs = zip(document.tolist(), number.tolist(), strict=True)
    group = token_files.group_of(f"{d}#{n}" for d, n in pairs)
    num_bytes = None if store.num_bytes is None else store.num_bytes[document] * scale
    file, start = store.file[document], store.start[document] + offset
    store = dataclasses.replace(
        store, file=file, start=start, length=length, group=group, num_bytes=num_bytes
    )
    held = store.group < share
    log(
        f"data: {store.name}: few documents, so blocks of {token_files.BLOCK_TOKENS} tokens are held "
        f"out: {held.sum()} of {len(held)}"
    )
    return store, held
