"""cuDNN's attention against the reference in float32: segments, windows, both; a soft
cap falls back.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.attention import attention
from jaxdist.parallel import remat
from support.gpu import IS_GPU, accelerator, cpus

pytestmark = pytest.mark.gpu

B, S, H, K, N = 2, 512, 8, 2, 64
CASES = {
    "causal": {},
    "not_causal": {"causal": False},
    "segments": {"segments": True},
    "window": {"window": 100},
    "window_and_segments": {"window": 100, "segments": True},
    "scale": {"scale": 0.3},
}


def arrays(device: jax.Device, dtype=jnp.bfloat16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((B, S, H, N), (B, S, K, N), (B, S, K, N), (B, S, H, N))
    rounded = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    return [jax.device_put(x.astype(dtype), device) for x in rounded]


def segment_ids(device: jax.Device) -> jax.Array:
    ids = np.repeat([1, 2, 3, 0], [S // 5, S // 2, S - S // 5 - S // 2 - 7, 7])
    return jax.device_put(np.stack([ids, np.roll(ids, 30)]).astype(np.int32), device)


def results(device: jax.Device, dtype, options, implementation: str):
    """Returns output and gradients of q, k, v as float32 numpy arrays, and the compiled
    program's text.
    """
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids_BS"] = segment_ids(device)
    q, k, v, w = arrays(device, dtype)
    forward = functools.partial(attention, implementation=implementation, **options)

    def loss(q, k, v):
        out = forward(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * w.astype(jnp.float32)), out

    program = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        .lower(q, k, v)
        .compile()
    )
    (_, out), gradients = program(q, k, v)
    return [np.asarray(x, np.float32) for x in (out, *gradients)], program.as_text()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_bfloat16_equals_the_reference(options):
    ours, program = results(accelerator(), jnp.bfloat16, options, "auto")
    wanted, _ = results(cpus(1)[0], jnp.float32, options, "reference")
    assert ("__cudnn$fmha" in program) == IS_GPU
    for a, b in zip(ours, wanted, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


@pytest.mark.parametrize(
    "options", [{"softcap": 20.0}, {"softcap": 20.0, "window": 100, "segments": True}]
)
def test_a_soft_cap_is_computed_by_xla(options):
    device = accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, program = results(device, jnp.bfloat16, options, "auto")
    assert (
        any(
            "a softcap is set, so the cudnn kernel is not used" in str(w.message)
            for w in caught
        )
        == IS_GPU
    )
    assert "__cudnn$fmha" not in program
    wanted, _ = results(cpus(1)[0], jnp.float32, options, "reference")
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


@pytest.mark.parametrize(("policy", "forwards"), [("dots", 1), ("full", 2)])
def test_remat_runs_the_forward_kernel_as_often_as_it_says(policy, forwards):
    q, k, v, _ = arrays(accelerator())

    def layer(scale, q):
        return attention(scale * q, k, v)

    def loss(scales, q):
        def body(x, scale):
            return remat.rematerialised(layer, policy)(scale, x), None

        return jax.lax.scan(body, q, scales)[0].astype(jnp.float32).sum()

    scales = jnp.ones(3, jnp.bfloat16)
    program = jax.jit(jax.grad(loss)).lower(scales, q).compile().as_text()
    backward = program.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"')
    forward = program.count('custom_call_target="__cudnn$fmhaSoftmax"')
    assert (forward, backward) == ((forwards, 1) if IS_GPU else (0, 0))
