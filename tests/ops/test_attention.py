"""Attention against its definition: forward, gradients, masks, packing, layouts,
decoding.
"""

import functools
import itertools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import attention_reference
from jaxdist.ops import splash as splash_module
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_backends import BACKENDS, choose
from jaxdist.ops.attention_request import Options, Request
from jaxdist.ops.cached_attention import cached_attention
from jaxdist.ops.splash import block_size, splash_attention
from jaxdist.parallel import execution, sharding
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh


def _arrays(B, S, H, K, N, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, S, H, N), (B, S, K, N), (B, S, K, N), (B, S, H, N))
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def _segments(B, S):
    """Three documents and padding (0) per row, cut at different places."""
    ids = np.zeros((B, S), np.int32)
    for b in range(B):
        cuts = [S // 5 + b, S // 2 + b, S - 3]
        for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            ids[b, start:stop] = number
    return jnp.asarray(ids)


def _naive(
    q, k, v, *, causal=True, segment_ids_BS=None, scale=None, softcap=None, window=None
):
    """Returns the definition, head by head, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, S, H, N = q.shape
    seen = np.ones((B, S, S), bool)
    distance = np.arange(S)[:, None] - np.arange(S)[None, :]
    seen &= (distance >= 0)[None] | (not causal)
    if window is not None:
        seen &= (distance < window)[None]
    if segment_ids_BS is not None:
        ids = np.asarray(segment_ids_BS)
        seen &= ids[:, :, None] == ids[:, None, :]
    out = np.zeros_like(q)
    for b, h in itertools.product(range(B), range(H)):
        group = h // (H // k.shape[2])
        s = q[b, :, h] @ k[b, :, group].T * (scale or N**-0.5)
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        p = np.where(seen[b], np.exp(s - s.max()), 0)
        out[b, :, h] = p / p.sum(-1, keepdims=True) @ v[b, :, group]
    return out


def _plain(
    q, k, v, *, causal=True, segment_ids_BS=None, scale=None, softcap=None, window=None
):
    """Returns attention as plain jnp, for autodiff to differentiate."""
    _B, S, H, N = q.shape
    k, v = (jnp.repeat(x, H // k.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bshn,bthn->bhst", q, k) * (scale or N**-0.5)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    distance = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
    seen = jnp.ones((1, S, S), bool) & ((distance >= 0) | (not causal))[None]
    if window is not None:
        seen &= (distance < window)[None]
    if segment_ids_BS is not None:
        seen &= segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    return jnp.einsum(
        "bhst,bthn->bshn", jax.nn.softmax(jnp.where(seen[:, None], s, -1e30)), v
    )


def _gradients(function, q, k, v, w, **options):
    return jax.jit(
        jax.grad(
            lambda q, k, v: jnp.sum(function(q, k, v, **options) * w), argnums=(0, 1, 2)
        )
    )(q, k, v)


CASES = {
    "one_head": ((1, 32, 1, 1, 8), {}),
    "many_heads": ((2, 96, 4, 4, 16), {}),
    "grouped": ((2, 256, 8, 4, 32), {}),
    "one_kv_head_odd_length": ((2, 203, 6, 1, 8), {}),
    "not_causal": ((2, 130, 4, 2, 16), {"causal": False}),
    "softcap": ((2, 160, 4, 2, 16), {"softcap": 2.0}),
    "window": ((2, 256, 4, 2, 16), {"window": 40}),
    "window_of_two": ((1, 128, 2, 2, 16), {"window": 2}),
    "scale": ((2, 64, 4, 2, 16), {"scale": 0.7}),
    "packed": ((2, 160, 4, 2, 16), {"packed": True}),
    "packed_not_causal": ((2, 160, 4, 2, 16), {"packed": True, "causal": False}),
    "all": (
        (2, 192, 4, 2, 16),
        {"packed": True, "window": 50, "softcap": 3.0, "scale": 0.3},
    ),
}


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
def test_reference_equals_definition(shape, options):
    options = dict(options)
    if options.pop("packed", False):
        options["segment_ids_BS"] = _segments(*shape[:2])
    q, k, v, w = _arrays(*shape)
    out = jax.jit(functools.partial(attention, **options))(q, k, v)
    np.testing.assert_allclose(out, _naive(q, k, v, **options), atol=1e-5, rtol=1e-5)
    got, wanted = (
        _gradients(attention, q, k, v, w, **options),
        _gradients(_plain, q, k, v, w, **options),
    )
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(b).max() > 0.01
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_blocks_cover_queries_once_and_causal_skips_keys():
    options = Options(1.0, True, None, None)
    for length in (1, 63, 130, 203, 512, 4096):
        rows = [
            rows for rows, _ in attention_reference._blocks(length, length, options)
        ]
        assert [r.start for r in rows] == [0] + [r.stop for r in rows[:-1]]
        assert rows[-1].stop == length
    blocks = attention_reference._blocks(512, 512, options)
    work = sum((r.stop - r.start) * (c.stop - c.start) for r, c in blocks)
    assert work <= 0.65 * 512**2


def test_bfloat16_output_and_band():
    q, k, v, _ = _arrays(2, 128, 4, 2, 32, jnp.bfloat16)
    out = attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), _naive(q, k, v), atol=3e-2)


def test_packed_documents_equal_separate_ones():
    q, k, v, w = _arrays(1, 96, 4, 2, 16)
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 44, 32])[None], jnp.int32)
    packed = jax.jit(functools.partial(attention, segment_ids_BS=ids))(q, k, v)
    assert np.abs(packed - attention(q, k, v)).max() > 0.01
    gradients = _gradients(attention, q, k, v, w, segment_ids_BS=ids)
    for start, stop in ((0, 20), (20, 64), (64, 96)):
        alone = [x[:, start:stop] for x in (q, k, v, w)]
        np.testing.assert_allclose(
            attention(*alone[:3]), packed[:, start:stop], atol=1e-6
        )
        for a, b in zip(_gradients(attention, *alone), gradients, strict=True):
            np.testing.assert_allclose(a, b[:, start:stop], atol=1e-5)


def _saved(policy) -> tuple[int, list[tuple[int, ...]]]:
    """Returns how often a rematerialised layer's backward computes exp, and the shapes
    it keeps.
    """
    q, k, v, _ = _arrays(1, 64, 2, 2, 8)

    def layer(q):
        return jnp.sum(jnp.sin(attention(q, k, v)))

    _, back = jax.vjp(jax.checkpoint(layer, policy=policy), q)
    text = str(jax.make_jaxpr(back)(1.0))
    return text.count(" exp "), [x.shape for x in jax.tree.leaves(back)]


def test_saving_attention_residuals_spares_the_second_forward():
    policies = jax.checkpoint_policies
    again, kept_again = _saved(policies.nothing_saveable)
    saved, kept = _saved(policies.save_only_these_names("attention_residuals"))
    # probabilities: forward again and backward; backward alone
    assert (again, saved) == (2, 1)
    assert len(kept) > len(kept_again)
    assert all(shape.count(64) <= 1 for shape in kept)  # nothing of size S x S


LAYOUTS = {
    "tensor_divides_kv": ({"data": 4, "tensor": 2}, 8, 4),
    "kv_heads_copied": ({"data": 1, "tensor": 8}, 8, 4),
    "kv_heads_copied_in_part": ({"data": 1, "tensor": 8}, 24, 6),
    "fsdp": ({"data": 2, "fsdp": 4}, 4, 2),
}


def layout_cases():
    """Each layout with packed documents; without, the first by default."""
    for name, (sizes, H, K) in LAYOUTS.items():
        for packed in (False, True):
            default = packed or name == "tensor_divides_kv"
            marks = [] if default else [pytest.mark.slow]
            kind = "packed" if packed else "plain"
            yield pytest.param(sizes, H, K, packed, id=f"{name}-{kind}", marks=marks)


@pytest.mark.parametrize(("sizes", "H", "K", "packed"), layout_cases())
def test_layouts_equal_one_device(sizes, H, K, packed):
    assert jax.device_count() == 8
    q, k, v, w = _arrays(8, 128, H, K, 8)
    options = {"segment_ids_BS": _segments(8, 128)} if packed else {}
    config = MeshConfig(**sizes)
    mesh = build_mesh(config)
    rules = sharding.build_rules(config, resolve_mesh(config, mesh.size))

    def sharded(q, k, v, **options):
        with execution.activate(mesh, rules):
            q = execution.shard(q, "batch", "sequence", "heads", None)
            k, v = (
                execution.shard(x, "batch", "sequence", "kv_heads", None)
                for x in (k, v)
            )
            return execution.shard(
                attention(q, k, v, **options), "batch", "sequence", "heads", None
            )

    out = jax.jit(functools.partial(sharded, **options))(q, k, v)
    # every device has its own part
    assert out.addressable_shards[0].data.size * 8 == out.size
    np.testing.assert_allclose(out, attention(q, k, v, **options), atol=1e-5)
    got, wanted = (
        _gradients(sharded, q, k, v, w, **options),
        _gradients(attention, q, k, v, w, **options),
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 7}])
def test_cached_attention_equals_attention(options):
    q, k, v, _ = _arrays(2, 24, 4, 2, 8)
    whole = attention(q, k, v, **options)
    padding = ((0, 0), (0, 8), (0, 0), (0, 0))
    # slots not filled yet
    k, v = (jnp.pad(x, padding, constant_values=9.0) for x in (k, v))
    positions = jnp.asarray([[3, 4, 5], [10, 11, 12]])
    new = jnp.take_along_axis(q, positions[:, :, None, None], 1)
    wanted = jnp.take_along_axis(whole, positions[:, :, None, None], 1)
    out = jax.jit(functools.partial(cached_attention, **options))(new, k, v, positions)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


FAULTS = {
    "heads": ((1, 8, 6, 4, 8), {}, "6 query heads do not group over 4 kv heads"),
    "window": (
        (1, 8, 2, 2, 8),
        {"window": 4, "causal": False},
        "window=4, causal=False",
    ),
    "name": ((1, 8, 2, 2, 8), {"implementation": "flash"}, "'flash'; choose one of"),
}


@pytest.mark.parametrize(("shape", "options", "text"), FAULTS.values(), ids=FAULTS)
def test_faults_name_value_and_cure(shape, options, text):
    q, k, v, _ = _arrays(*shape)
    with pytest.raises(ValueError, match=text):
        attention(q, k, v, **options)


def test_splash_blocks_divide():
    assert [block_size(s) for s in (128, 256, 384, 512, 640, 1024, 2176, 4096)] == [
        128,
        256,
        384,
        512,
        128,
        512,
        128,
        512,
    ]


@pytest.mark.parametrize(
    ("S", "packed", "options"),
    [
        pytest.param(128, False, {}, marks=pytest.mark.slow),
        (100, True, {}),
        (256, False, {"scale": 0.3, "softcap": 2.0, "window": 100}),
    ],
)
def test_splash_interpreted_equals_reference(S, packed, options):
    q, k, v, w = _arrays(1, S, 2, 1, 64)
    ids = _segments(1, S) if packed else None

    def splash(q, k, v):
        shaped = Options(64**-0.5, True, None, None)._replace(**options)
        return splash_attention(Request(q, k, v, ids, shaped), interpret=True)

    wanted = functools.partial(attention, segment_ids_BS=ids, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_allclose(jax.jit(splash)(q, k, v), wanted(q, k, v), atol=1e-5)
        gradients = _gradients(splash, q, k, v, w)
    assert bool(S % 128) == any(f"{S} is padded" in str(c.message) for c in caught)
    for a, b in zip(gradients, _gradients(wanted, q, k, v, w), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "options", [{}, {"causal": False, "softcap": 2.0, "scale": 0.3}], ids=str
)
def test_gradients_chunk_by_chunk_equal_the_reference(options, monkeypatch):
    """Long sequences have one backward kernel for each pair of chunks."""
    monkeypatch.setattr(splash_module, "_CHUNK", 256)
    monkeypatch.setattr(splash_module, "_FUSED_KEYS", 128)
    q, k, v, w = _arrays(1, 768, 2, 1, 64)
    ids, shaped = (
        _segments(1, 768),
        Options(64**-0.5, True, None, None)._replace(**options),
    )
    assert splash_module._chunk(768, shaped) == 256

    def splash(q, k, v):
        return splash_attention(Request(q, k, v, ids, shaped), interpret=True)

    wanted = functools.partial(attention, segment_ids_BS=ids, **options)
    np.testing.assert_allclose(jax.jit(splash)(q, k, v), wanted(q, k, v), atol=1e-5)
    for a, b in zip(
        _gradients(splash, q, k, v, w), _gradients(wanted, q, k, v, w), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_is_asked_for_the_window(packed, monkeypatch):
    """Its kernels need a GPU: here jax computes what it was asked for, as plain XLA."""
    asked = []

    def plain(*arrays, implementation, **options):
        asked.append(
            (implementation, options["mask"] is not None, options["local_window_size"])
        )
        return original(*arrays, **options, implementation="xla")

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    q, k, v, _ = _arrays(2, 96, 4, 2, 16)
    options = {
        "window": 20,
        "scale": 0.3,
        "segment_ids_BS": _segments(2, 96) if packed else None,
    }
    with jax.numpy_rank_promotion("allow"):
        out = attention(q, k, v, implementation="cudnn", **options)
    # Before 9.10.2 cuDNN refuses a window beside a mask.
    assert asked == [("cudnn", packed, None if packed else (19, 0))]
    np.testing.assert_allclose(out, attention(q, k, v, **options), atol=1e-5)


def _request(shape, dtype, *, packed: bool = False, **options) -> Request:
    """Makes a request without arrays."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32) if packed else None
    shaped = Options(1.0, True, None, None)._replace(**options)
    return Request(x, x, x, ids, shaped)


# of cuDNN: shape and dtype of q, options, the reason (None: it computes it)
REFUSALS = {
    "none": ((1, 128, 2, 64), jnp.bfloat16, {"window": 16}, None),
    "softcap": ((1, 128, 2, 64), jnp.bfloat16, {"softcap": 50.0}, "a softcap is set"),
    "head": (
        (1, 128, 2, 256),
        jnp.bfloat16,
        {},
        "head size 256 is not a multiple of 8 up to 128",
    ),
    "dtype": ((1, 128, 2, 64), jnp.float32, {}, "float32 is not bfloat16 or float16"),
    "length": (
        (1, 127, 2, 64),
        jnp.bfloat16,
        {},
        "sequence length 127 is not a multiple of 2",
    ),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "reason"), REFUSALS.values(), ids=REFUSALS
)
def test_what_cudnn_cannot_compute_falls_back_with_the_reason(
    shape, dtype, options, reason, monkeypatch
):
    monkeypatch.setattr(execution.Execution, "platform", "gpu")
    request = _request(shape, dtype, packed=True, **options)
    assert BACKENDS["cudnn"].refusal(request) == reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = choose(request)
    assert backend is BACKENDS["reference" if reason else "cudnn"]
    assert bool(reason) == any(
        f"{reason}, so the cudnn kernel is not used" in str(w.message) for w in caught
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("Tesla T4", "reference"), ("NVIDIA L4", "cudnn")]
)
@pytest.mark.filterwarnings("ignore:attention")
def test_cudnn_is_not_for_gpus_before_ampere(kind, name, monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "gpu")
    monkeypatch.setattr(
        execution.Execution, "device", SimpleNamespace(platform="gpu", device_kind=kind)
    )
    request = _request((1, 128, 2, 64), jnp.float16)
    assert choose(request) is BACKENDS[name]


@pytest.mark.parametrize(
    ("platform", "name"), [("tpu", "splash"), ("gpu", "cudnn"), ("cpu", "reference")]
)
def test_each_platform_has_its_backend(platform, name, monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", platform)
    request = _request((1, 128, 2, 64), jnp.bfloat16)
    assert choose(request) is BACKENDS[name]
    others = [
        b.refusal(request) for n, b in BACKENDS.items() if n not in (name, "reference")
    ]
    assert all(f"not {platform}" in (reason or "") for reason in others)


def test_a_window_of_the_whole_sequence_is_none():
    q, k, v, _ = _arrays(1, 64, 2, 2, 8)
    text = str(jax.make_jaxpr(attention)(q, k, v))
    assert str(jax.make_jaxpr(functools.partial(attention, window=64))(q, k, v)) == text
    assert str(jax.make_jaxpr(functools.partial(attention, window=63))(q, k, v)) != text
