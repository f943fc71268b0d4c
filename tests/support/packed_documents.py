"""Packed documents: a dataset in a token file, and a row of a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.data.dataset import Dataset, DatasetSplit
from jaxdist.data.packing import PackedDocuments, plan_packing
from jaxdist.data.token_files import TokenFile, TokenStore
from support.models import TINY


def dataset_of(folder, lengths, length_S: int) -> Dataset:
    """Returns packed documents of these lengths, with tokens of the tests' smallest
    vocabulary.
    """
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, sum(lengths))
    ids.astype("<u2").tofile(folder / "0.bin")
    length = np.array(lengths, np.int64)
    owner, groups = np.zeros(len(length), np.int32), np.zeros(len(length), np.uint8)
    start, files = np.cumsum(length) - length, (TokenFile(folder / "0.bin", "<u2"),)
    store = TokenStore(
        "test", files, owner, start, length, groups, None, max_id=63, fingerprint="test"
    )
    sides = [
        PackedDocuments(store, plan_packing(store.take(chosen), length_S), length_S)
        for chosen in (np.ones(len(length), bool), np.zeros(len(length), bool))
    ]
    return Dataset(
        [tuple(DatasetSplit("test", side, side.num_targets) for side in sides)],
        seed=1,
        fingerprint="",
    )


def packed_row(documents) -> dict[str, jax.Array]:
    """Returns the fields [1, S] of a row with these documents of ids, one after another."""
    lengths = [len(document) for document in documents]
    fields = {
        "tokens": jnp.concatenate(documents),
        "positions": jnp.concatenate([jnp.arange(length) for length in lengths]),
        "segment_ids": jnp.repeat(
            jnp.arange(1, len(documents) + 1),
            np.array(lengths),
            total_repeat_length=sum(lengths),
        ),
    }
    return {name: x[None] for name, x in fields.items()}
