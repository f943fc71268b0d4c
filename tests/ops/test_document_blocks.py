"""What TPU kernels leave out of a packed sequence: the blocks between documents, and
nothing else.
"""

import functools

import jax
import numpy as np
import pytest

from jaxdist.ops import splash
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_request import Options, Request
from jaxdist.ops.document_blocks import shared_blocks, skip_unshared_blocks

S, BLOCK = 640, 128  # 5 x 5 blocks
# of documents: the second begins within a block and ends with one
LENGTHS = (140, 116, 200, 30, 154)
IDS = np.repeat(np.arange(5), LENGTHS).astype(np.int32)
OPTIONS = {
    "causal": Options(64**-0.5, True, None, None),
    "window": Options(64**-0.5, True, None, 150),
    "whole": Options(64**-0.5, False, None, None),
}


def computed(tables, *, by_keys: bool = False) -> tuple[set[tuple[int, int]], int]:
    """Returns the (query, key) blocks that a kernel computes, and how many others it
    fetches.
    """
    steps = 1 if by_keys else 2
    fetched, kept = (
        np.moveaxis(np.asarray(x), steps, 2)[0]
        for x in (tables.data_next, tables.block_mask)
    )
    blocks = {(i, int(fetched[i, j])) for i, j in np.argwhere(kept > 0)}
    others = {(i, int(x)) for i, row in enumerate(fetched) for x in row} - blocks
    return {block[::-1] for block in blocks} if by_keys else blocks, len(others)


def seen(options: Options, ids: np.ndarray) -> set[tuple[int, int]]:
    """Returns the blocks in which a query sees a key."""
    place = np.arange(S)
    distance = place[:, None] - place[None]
    mask = ids[:, None] == ids[None]
    if options.causal:
        mask &= (distance >= 0) & (distance < (options.window or S))
    return {(int(i), int(j)) for i, j in np.argwhere(mask) // BLOCK}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("by_keys", [False, True])
def test_the_blocks_between_documents_are_neither_computed_nor_fetched(name, by_keys):
    options = OPTIONS[name]
    kernel = splash._kernel(S, 1, options, True)
    tables = kernel.dkv_mask_info if by_keys else kernel.fwd_mask_info
    skip = functools.partial(
        skip_unshared_blocks, tables, sizes=(BLOCK, BLOCK), by_keys=by_keys
    )
    one = np.zeros(S, np.int32)
    assert computed(skip(one, one), by_keys=by_keys)[0] == seen(options, one)
    found, others = computed(jax.jit(skip)(IDS, IDS), by_keys=by_keys)
    assert found == seen(options, IDS)
    assert others == 0
    assert len(found) < len(seen(options, one))
    shuffled = np.random.default_rng(0).permutation(IDS)
    assert computed(skip(shuffled, shuffled), by_keys=by_keys)[0] >= seen(
        options, shuffled
    )


def test_chunks_share_a_document_where_a_query_sees_a_key():
    shared = shared_blocks(IDS, IDS, (BLOCK, BLOCK))
    assert {(int(i), int(j)) for i, j in np.argwhere(shared)} == seen(
        OPTIONS["whole"], IDS
    )


def test_keys_of_which_a_query_sees_none_are_not_computed():
    """As in a pair of chunks: gradients of queries and keys of different documents are
    0.
    """
    tables = splash._kernel(
        S, 1, OPTIONS["whole"], True, fused_keys=BLOCK
    ).dkv_mask_info
    found, _ = computed(
        skip_unshared_blocks(tables, IDS, IDS + 9, (BLOCK, BLOCK), by_keys=True),
        by_keys=True,
    )
    assert not found


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("causal", 128),
        ("window", 0),
        *(
            pytest.param(name, chunk, marks=pytest.mark.slow)
            for name in OPTIONS
            for chunk in (0, 128)
            if (name, chunk) not in (("causal", 128), ("window", 0))
        ),
    ],
)
def test_attention_and_gradients_equal_the_reference(name, chunk, monkeypatch):
    options = OPTIONS[name]
    monkeypatch.setattr(splash, "_LEAST_TOKENS", BLOCK)
    if chunk:
        monkeypatch.setattr(splash, "_CHUNK", chunk)
        monkeypatch.setattr(splash, "_FUSED_KEYS", chunk)
    assert bool(splash._chunk(S, options)) == bool(chunk and options.window is None)
    q, k, v, w = (
        jax.random.normal(jax.random.key(i), (1, S, heads, 64))
        for i, heads in enumerate((2, 1, 1, 2))
    )
    ids = IDS[None]

    def outputs(function):
        return jax.jit(
            jax.value_and_grad(lambda *arrays: (function(*arrays) * w).sum(), (0, 1, 2))
        )(q, k, v)

    def kernel(*arrays):
        request = Request(*arrays, ids, options)
        return splash.splash_attention(request, interpret=True)

    def reference(*arrays):
        return attention(
            *arrays, segment_ids_BS=ids, causal=options.causal, window=options.window
        )

    np.testing.assert_allclose(jax.jit(kernel)(q, k, v), reference(q, k, v), atol=1e-5)
    (_, found), (_, wanted) = outputs(kernel), outputs(reference)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
