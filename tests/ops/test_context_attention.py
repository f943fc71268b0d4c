"""Attention over a sequence that devices share out: every form, wherever it is called,
equals one device.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.ops import context_attention, splash
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_backends import BACKENDS
from jaxdist.ops.attention_costs import attention_cost
from jaxdist.ops.attention_reference import reference, reference_pieces
from jaxdist.ops.attention_request import Options, Pieces, Request, Result
from jaxdist.parallel import execution
from support.experts import rules_and_mesh

B, S, N = 4, 64, 8


def _arrays(heads: int, kv_heads: int, size: int = N, length: int = S, batch: int = B):
    rng = np.random.default_rng(0)
    shapes = ((batch, length, n, size) for n in (heads, kv_heads, kv_heads, heads))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def _segments(batch: int = B, length: int = S):
    """Three documents and padding in every row, whose ends are no multiple of
    a shard.
    """
    ids = np.zeros((batch, length), np.int32)
    for row in range(batch):
        cuts = [length // 5 + row, length // 2 + row, length - 3]
        for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            ids[row, start:stop] = number
    return jnp.asarray(ids)


def _results(function, arrays):
    """Returns the output and the gradients of a weighted sum of it."""
    *qkv, weight = arrays

    def loss(*qkv):
        out = function(*qkv)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
        *qkv
    )
    return [out, *gradients]


def _worst(got, wanted) -> float:
    return max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(got, wanted, strict=True)
    )


def _sharded(form: str, sizes: dict, **options):
    rules, mesh = rules_and_mesh(attention=form, **sizes)

    def run(q, k, v):
        with execution.activate(mesh, rules):
            return _named(q, k, v, **options)

    return run


def _named(q, k, v, **options):
    q = execution.shard(q, "batch", "sequence", "heads", None)
    k, v = (execution.shard(x, "batch", "sequence", "kv_heads", None) for x in (k, v))
    return execution.shard(
        attention(q, k, v, **options), "batch", "sequence", "heads", None
    )


# sizes of the axes, heads, kv heads, forms
LAYOUTS = {
    "context": ({"context": 8}, 8, 4, ("heads", "gather", "ring")),
    "one_kv_head": ({"context": 8}, 8, 1, ("heads", "gather")),
    "mixed": (
        {"fsdp": 2, "context": 2, "tensor": 2},
        8,
        4,
        ("heads", "gather", "ring"),
    ),
    "copied_kv_heads": ({"context": 4, "tensor": 2}, 24, 6, ("heads", "gather")),
    "indivisible": ({"data": 2, "context": 4}, 6, 3, ("gather", "auto")),
    "tensor_does_not_divide": ({"context": 2, "tensor": 4}, 6, 2, ("heads", "gather")),
}
OPTIONS = {
    "packed": {"segment_ids_BS": _segments(), "softcap": 2.0},
    "window": {"window": 20, "scale": 0.3},
    "not_causal": {"causal": False, "segment_ids_BS": _segments()},
}
QUICK = ("context", "mixed")
CASES = [
    pytest.param(
        sizes,
        H,
        K,
        form,
        id=f"{name}-{form}",
        marks=[] if name in QUICK else pytest.mark.slow,
    )
    for name, (sizes, H, K, forms) in LAYOUTS.items()
    for form in forms
]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("sizes", "heads", "kv_heads", "form"), CASES)
def test_layouts_equal_one_device(sizes, heads, kv_heads, form, options):
    arrays = _arrays(heads, kv_heads)
    wanted = _results(functools.partial(attention, **options), arrays)
    got = _results(_sharded(form, sizes, **options), arrays)
    assert _worst(got, wanted) < 2e-6
    devices = 8 // sizes.get("tensor", 1) if heads % sizes.get("tensor", 1) else 8
    # each has its own part
    assert got[0].addressable_shards[0].data.size * devices == got[0].size


@pytest.mark.parametrize("form", ["heads", "gather", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_region_of_other_axes(form, dtype):
    """As a pipeline's stages call it, which take gradients inside."""
    *qkv, weight = _arrays(8, 4)
    arrays = [*(x.astype(dtype) for x in qkv), weight]
    wanted = _results(functools.partial(attention, **OPTIONS["packed"]), arrays)
    rules, mesh = rules_and_mesh(attention=form, pipeline=2, context=2, tensor=2)
    local = functools.partial(_results, functools.partial(_named, **OPTIONS["packed"]))

    def run(arrays):
        with execution.activate(mesh, rules):
            return execution.region(local, ("pipeline",), in_specs=P(), out_specs=P())(
                arrays
            )

    assert _worst(jax.jit(run)(arrays), wanted) < (2e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("options", [{}, {"window": 130, "softcap": 2.0}], ids=str)
def test_the_kernel_of_a_part_interpreted_equals_the_reference(options):
    """Tables of the kernel's blocks are cut by parts; the first has the fewest."""
    shaped = Options(64**-0.5, True, None, None)._replace(**options)
    q, k, v, weight = _arrays(2, 1, 64, 512, 1)
    ids = _segments(1, 512)

    def of_parts(function, count, **more):
        def run(q, k, v):
            size = 512 // count
            outs = []
            for number in range(count):
                own = q[:, number * size : (number + 1) * size]
                request = Request(own, own, own, None, shaped)
                request = request.of_part(jnp.int32(number), k, v, ids)
                outs.append(function(request, **more))
            return jnp.concatenate(outs, 1)

        return _results(run, (q, k, v, weight))

    wanted = _results(
        functools.partial(attention, segment_ids_BS=ids, **options), (q, k, v, weight)
    )
    assert _worst(of_parts(reference, 4), wanted) < 2e-6
    assert _worst(of_parts(splash.splash_attention, 2, interpret=True), wanted) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_pieces_of_the_kernel_interpreted_equal_the_reference(causal):
    shaped = Options(0.2, causal, 2.0, None)
    q, k, v, grad = _arrays(2, 1, 64, 256, 1)
    ids, others = _segments(1, 256), jnp.roll(_segments(1, 256), 40, axis=1)
    others = ids if causal else others
    request = Request(q, k, v, others, shaped, ids)
    out, lse = reference_pieces.forward(request)
    # As if other keys had a part in the softmax, too.
    result = Result(grad, jnp.sum(out * grad, -1), lse + 0.1)
    wanted = out, lse, *reference_pieces.backward(request, result)
    got = (
        *splash.piece(request, interpret=True),
        *splash.piece_gradients(request, result, interpret=True),
    )
    # where a query sees none of the keys, what comes out has no weight
    seen = lse > -1e20
    masked = [jnp.where(seen[..., None], x[0], 0) for x in (got, wanted)]
    assert (
        _worst(
            [masked[0], jnp.where(seen, got[1], 0)],
            [masked[1], jnp.where(seen, lse, 0)],
        )
        < 1e-5
    )
    assert _worst(got[2:], wanted[2:]) < 1e-5
    assert bool(jnp.all(got[1][~seen] < -1e20))


def test_a_ring_of_an_odd_number_of_devices():
    arrays = _arrays(4, 2, length=48)
    wanted = _results(attention, arrays)
    assert _worst(_results(_sharded("ring", {"context": 3}), arrays), wanted) < 2e-6


def _counted(seen, direction, function):
    """Returns a function of pieces that also notes (direction, device, pairs that a
    query sees) in a list.
    """

    def run(request, *result):
        queries = request.q.shape[1]
        pairs = queries * request.k.shape[1]
        if request.options.causal:
            pairs = queries * (queries + 1) // 2

        def note(
            device,
        ):  # by the threads of all devices: an append is whole, a sum that is read first is not
            seen.append((direction, int(device), pairs))

        jax.debug.callback(note, jax.lax.axis_index("context"))
        return function(request, *result)

    return run


def test_all_devices_of_a_ring_have_equal_work(monkeypatch):
    """In both directions, and none of it is masked: what is computed is the
    triangle.
    """
    seen: list = []
    backend = BACKENDS["reference"]
    kinds = ("forward", "backward")
    pieces = Pieces(
        *(_counted(seen, kind, getattr(backend.pieces, kind)) for kind in kinds)
    )
    monkeypatch.setitem(
        BACKENDS, "reference", dataclasses.replace(backend, pieces=pieces)
    )
    jax.block_until_ready(
        _results(_sharded("ring", {"context": 8}), _arrays(2, 1, batch=1))
    )
    jax.effects_barrier()
    for kind in kinds:
        work = [
            sum(pairs for *of, pairs in seen if of == [kind, device])
            for device in range(8)
        ]
        assert max(work) <= 1.01 * min(work)
        assert sum(work) == S * (S + 1) // 2


def test_the_last_device_of_gather_has_nearly_twice_the_mean():
    """Blocks that the TPU kernel computes; `heads` and `ring` have equal work."""
    kernel = splash._kernel(8192, 2, Options(1.0, True, None, None), True, 8)
    blocks = [
        int((part != 0).sum())
        for part in np.split(kernel.fwd_mask_info.block_mask, 8, axis=1)
    ]
    assert blocks == [3, 7, 11, 15, 19, 23, 27, 31]


def _rules(form: str, **sizes):
    return rules_and_mesh(attention=form, **sizes)[0]


def test_heads_that_do_not_divide_are_refused_with_what_auto_takes():
    rules, mesh = rules_and_mesh(attention="heads", context=4, tensor=2)
    (text,) = context_attention.faults(rules, 64, 12)
    assert "12 query heads" in text
    assert "mesh.context=4 x mesh.tensor=2" in text
    assert "takes gather" in text
    with (
        pytest.raises(ConfigError, match="multiple of 8"),
        execution.activate(mesh, rules),
    ):
        attention(*_arrays(12, 12)[:3])
    assert not [*context_attention.faults(_rules("auto", context=4, tensor=2), 64, 12)]
    assert not [*context_attention.faults(_rules("heads", context=4, tensor=2), 64, 16)]


def test_the_choice_is_explained_in_bytes():
    sizes = {"width": 4096, "head_size": 128, "length": 8192}
    cost = attention_cost(heads=32, kv_heads=8, **sizes)
    assert not cost.explain(_rules("auto"), 2)  # bytes of bfloat16
    (text,) = cost.explain(_rules("auto", context=8), 2)
    # A device's 1,024 places: 32 + 32 + 8 + 8 heads of 256 bytes, 7 / 8 of them for
    # others.
    assert "by heads" in text
    assert f"heads sends {1024 * 80 * 256 * 7 / 8 / 1e6:,.1f} MB" in text
    assert f"gather sends {1024 * 16 * 256 * 7 / 1e6:,.1f} MB" in text
    assert f"holds all of {8192 * 16 * 256 / 1e6:,.1f} MB" in text
    (text,) = cost.explain(_rules("ring", context=8), 2)
    # Queries, results, keys and values once to where work is equal; keys and values to
    # seven others.
    assert f"ring sends {1024 * (80 + 16 * 7) * 256 / 1e6:,.1f} MB" in text
    assert f"holds parts of {2 * 1024 * 16 * 256 / 1e6:,.1f} MB" in text
    indivisible = attention_cost(heads=12, kv_heads=4, **sizes)
    (text,) = indivisible.explain(_rules("auto", context=8), 2)
    assert "by gather: 12 query heads are not divisible" in text


def test_a_sequence_that_does_not_divide_stays_whole():
    arrays = _arrays(4, 2, length=30)
    wanted = _results(attention, arrays)
    assert (
        _worst(_results(_sharded("heads", {"context": 4, "data": 2}), arrays), wanted)
        < 2e-6
    )
