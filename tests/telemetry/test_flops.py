"""FLOP counts: formula, jaxpr and compiled program agree on a transformer; loops are
multiplied.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.parallel.formats.fp8 import FP8
from jaxdist.telemetry import flops, hlo
from support.flops_formula import transformer_flops_per_token

L, B, S, D, F, H, K, N, V = 3, 8, 16, 32, 48, 4, 2, 8, 96  # layers ... vocabulary
TOKENS = B * S


def parameters():
    shapes = {
        "query_LDHN": (L, D, H, N),
        "key_LDKN": (L, D, K, N),
        "value_LDKN": (L, D, K, N),
        "out_LHND": (L, H, N, D),
        "gate_LDF": (L, D, F),
        "up_LDF": (L, D, F),
        "down_LFD": (L, F, D),
        "embed_VD": (V, D),
        "head_DV": (D, V),
    }
    random = np.random.default_rng(0)
    return {
        name: (0.1 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def loss(params, tokens_BS, remat=False):
    """A decoder-only transformer without norms, written by hand; layers in a scan."""

    def block(x_BSD, layer):
        q_BSHN = jnp.einsum("BSD,DHN->BSHN", x_BSD, layer["query_LDHN"])
        k_BSKN = jnp.einsum("BSD,DKN->BSKN", x_BSD, layer["key_LDKN"])
        v_BSKN = jnp.einsum("BSD,DKN->BSKN", x_BSD, layer["value_LDKN"])
        q_BSKGN = q_BSHN.reshape(B, S, K, H // K, N)
        scores = jnp.einsum("BSKGN,BTKN->BKGST", q_BSKGN, k_BSKN)
        weights = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), scores, -1e9))
        mixed_BSHN = jnp.einsum("BKGST,BTKN->BSKGN", weights, v_BSKN).reshape(
            B, S, H, N
        )
        x_BSD += jnp.einsum("BSHN,HND->BSD", mixed_BSHN, layer["out_LHND"])
        hidden_BSF = jax.nn.silu(x_BSD @ layer["gate_LDF"]) * (x_BSD @ layer["up_LDF"])
        return x_BSD + hidden_BSF @ layer["down_LFD"], None

    block = jax.checkpoint(block) if remat else block
    layers = {
        name: value for name, value in params.items() if "L" in name.split("_")[1]
    }
    x_BSD, _ = lax.scan(block, jnp.take(params["embed_VD"], tokens_BS, axis=0), layers)
    logits_BSV = x_BSD @ params["head_DV"]
    return -jnp.mean(jax.nn.log_softmax(logits_BSV)[..., 0])


def formula(convention):
    return transformer_flops_per_token(
        num_layers=L,
        d_model=D,
        d_ff=F,
        num_heads=H,
        num_kv_heads=K,
        head_dim=N,
        vocab_size=V,
        sequence_length=S,
        convention=convention,
    )


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


TOKENS_BS = np.arange(TOKENS, dtype=np.int32).reshape(B, S) % V


def test_formula_by_hand():
    matmul_params = L * (2 * D * H * N + 2 * D * K * N + 3 * D * F) + D * V
    assert formula("full") == 6 * matmul_params + 12 * L * H * N * S
    assert formula("full") - formula("causal") == 6 * L * H * N * S
    sizes = {
        "num_layers": 1,
        "d_model": 4,
        "d_ff": 8,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": 10,
    }
    gated, plain = (
        transformer_flops_per_token(
            **sizes, sequence_length=64, convention="full", gated=gated
        )
        for gated in (True, False)
    )
    assert gated - plain == 6 * 4 * 8


@pytest.mark.parametrize("remat", [False, True])
def test_jaxpr_of_the_forward_pass_equals_the_formula(remat):
    jaxpr = jax.make_jaxpr(lambda p, t: loss(p, t, remat))(parameters(), TOKENS_BS)
    assert "scan" in str(jaxpr)
    assert ("remat" in str(jaxpr)) == remat
    count = flops.jaxpr_flops(jaxpr)
    assert 3 * count == formula("full") * TOKENS


def test_compiled_training_step_equals_the_formula_and_remat_adds_to_it():
    params = parameters()
    plain_text = compiled_text(jax.grad(loss), params, TOKENS_BS)
    assert " while(" in plain_text, (
        "the layers must be a loop, or trip counts are not tested"
    )
    plain = flops.hlo_flops(plain_text)
    assert plain == formula("full") * TOKENS

    remat = flops.hlo_flops(
        compiled_text(jax.grad(lambda p, t: loss(p, t, remat=True)), params, TOKENS_BS)
    )
    blocks = (formula("full") - 6 * D * V) * TOKENS
    assert plain < remat <= plain + blocks / 3
    assert remat > plain + 0.6 * blocks / 3


def test_a_partitioned_program_counts_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.device_put(TOKENS_BS, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(parameters(), NamedSharding(mesh, PartitionSpec()))
    count = flops.hlo_flops(compiled_text(jax.grad(loss), params, split))
    assert jax.device_count() == 8
    assert 8 * count == formula("full") * TOKENS


def test_convolutions_agree_between_jaxpr_and_compiled_gradient():
    image = jnp.ones((2, 9, 8, 4))
    kernel = jnp.ones((3, 3, 2, 6))  # two groups

    def function(image, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        out = lax.conv_general_dilated(
            image,
            kernel,
            (2, 2),
            "SAME",
            dimension_numbers=layout,
            feature_group_count=2,
        )
        return jnp.sum(out**2)

    forward = flops.jaxpr_flops(jax.make_jaxpr(function)(image, kernel))
    # SAME, stride 2: 5 x 4 outputs; taps in the image: (2 + 3 + 3 + 3 + 2) x (3 + 3 + 3
    # + 2)
    assert forward == 2 * 2 * 6 * 2 * 13 * 11
    backward = jax.make_jaxpr(jax.grad(function, argnums=(0, 1)))(image, kernel)
    assert flops.jaxpr_flops(backward) == 3 * forward
    assert flops.hlo_flops(compiled_text(function, image, kernel)) == forward


def test_window_pairs_against_enumeration():
    grid = itertools.product(
        (1, 5, 7), (1, 3, 4), (1, 4, 9), (-1, 0, 2), (1, 2, 3), (1, 3), (1, 2)
    )
    for size, kernel, out, pad, stride, dilation, kernel_dilation in grid:
        places = (
            o * stride + tap * kernel_dilation - pad
            for o in range(out)
            for tap in range(kernel)
        )
        expected = sum(
            p >= 0 and p % dilation == 0 and p // dilation < size for p in places
        )
        got = flops._window_pairs(
            size, kernel, out, pad, stride, dilation, kernel_dilation
        )
        assert got == expected


X = jnp.ones((4, 4))
PRODUCT = 2 * 4**3


def test_jaxpr_loops_branches_and_wrapped_calls():
    def count(function):
        return flops.jaxpr_flops(jax.make_jaxpr(function)(X))

    known = count(lambda x: lax.fori_loop(2, 7, lambda _, x: x @ x, x))
    assert known == 5 * PRODUCT
    unknown = count(lambda x: lax.while_loop(lambda c: c.sum() < 7, lambda c: c @ c, x))
    assert unknown == PRODUCT
    branches = (lambda x: x, lambda x: x @ x @ x, lambda x: x @ x)
    assert count(lambda x: lax.switch(x[0, 0].astype(int), branches, x)) == 2 * PRODUCT

    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x,))
    assert count(lambda x: jax.jit(jax.checkpoint(square))(x)) == PRODUCT
    doubled = jax.custom_jvp(lambda x: x @ x)
    doubled.defjvp(lambda p, t: (doubled(p[0]), t[0]))
    assert count(doubled) == PRODUCT


def test_jaxpr_shard_map_counts_all_devices():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = PartitionSpec("data")
    function = jax.shard_map(
        lambda x: x @ x.T, mesh=mesh, in_specs=split, out_specs=split
    )
    count = flops.jaxpr_flops(jax.make_jaxpr(function)(jnp.ones((8, 4))))
    assert count == 8 * (2 * 2 * 2 * 4)  # also the work that the tensor axis repeats


def test_jaxpr_ragged_dot_does_not_multiply_by_groups():
    lhs, rhs, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([5, 3])
    forward = flops.jaxpr_flops(jax.make_jaxpr(lax.ragged_dot)(lhs, rhs, sizes))
    assert forward == 2 * 8 * 4 * 3
    gradient = jax.grad(lambda a, b: lax.ragged_dot(a, b, sizes).sum(), argnums=(0, 1))
    backward = flops.jaxpr_flops(jax.make_jaxpr(gradient)(lhs, rhs))
    assert backward >= 2 * forward  # the forward product itself may be dropped
    assert backward <= 3 * forward


# Spellings that this machine's compiler does not print: TPU loops without a trip count,
# cuBLAS and oneDNN calls, a conditional, a kernel with and without a cost estimate,
# operands with types.
TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[]}

%condition (p.1: (s32[], bf16[4,8])) -> pred[] {
  %p.1 = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (p.2: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.2 = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p.2), index=1
  %w = bf16[8,8]{1,0} constant({...})
  %y = bf16[4,8]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  %j = s32[] get-tuple-element(%p.2), index=0
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%j, %y)
}

%small (s: f32[4,8]) -> f32[4,4] {
  %s = f32[4,8]{1,0} parameter(0)
  ROOT %d1 = f32[4,4]{1,0} dot(f32[4,8]{1,0} %s, f32[4,8]{1,0} %s), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
}

%large (l: f32[4,8]) -> f32[4,4] {
  %l = f32[4,8]{1,0} parameter(0)
  %d2 = f32[8,8]{1,0} dot(%l, %l), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %z = f32[4,4]{1,0} slice(%d2), slice={[0:4], [0:4]}
}

ENTRY %main (a: f32[4,8], n: s32[]) -> f32[] {
  %a = f32[4,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %loop = (s32[], bf16[4,8]{1,0}) while(%start), condition=%condition, body=%body
  %either = f32[4,4]{1,0} conditional(%n, %a, %a), branch_computations={%small, %large}
  %gemm = (f32[4,4]{1,0}, s8[4194304]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$gemm", backend_config={"operation_queue_id":"0",\
"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %one = f32[8,8]{1,0} custom-call(%a, %a), custom_call_target="__onednn$matmul", \
backend_config={"onednn_matmul_config":{"transpose_a":true}}
  %kernel = f32[4,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"5"}}}
  %secret = f32[4,8]{1,0} custom-call(%a), custom_call_target="mystery"
  ROOT %r = f32[] constant(0)
}
"""


def test_hlo_spellings_of_other_backends():
    module = hlo.parse(TEXT)
    assert module.entry == "main"
    assert set(module.computations) >= {
        "body",
        "condition",
        "large",
    }
    count = flops.hlo_flops(TEXT)
    dots = 2 * 8 * 8 * 4  # the dearer branch
    dots += 2 * 4 * 4 * 8  # cuBLAS
    dots += 2 * 8 * 8 * 4  # oneDNN, transposed
    assert count == 6 * 2 * 4 * 8 * 8 + dots + 1000


def test_products_of_8_bit_floats_are_told_apart():
    assert flops.hlo_flops(TEXT, only=FP8.in_hlo) == 0
    codes = TEXT.replace("%a = f32[4,8]", "%a = f8e4m3fn[4,8]")
    assert flops.hlo_flops(codes) == flops.hlo_flops(TEXT)
    # cuBLAS and oneDNN
    assert flops.hlo_flops(codes, only=FP8.in_hlo) == 2 * 4 * 4 * 8 + 2 * 8 * 8 * 4


def test_a_loop_of_unknown_length_counts_once():
    text = TEXT.replace(
        "%limit = s32[]{:T(128)} constant(6)", "%limit = s32[] parameter(1)"
    )
    count = flops.hlo_flops(text)
    assert flops.hlo_flops(TEXT) - count == 5 * 2 * 4 * 8 * 8


def test_text_that_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        flops.hlo_flops("module @jit_f {}")


def test_loops_that_nobody_can_count_are_known():
    x = jnp.ones((4, 4))

    def loop(product):
        return lambda x, n: jax.lax.while_loop(
            lambda c: c[1] < n,
            lambda c: (c[0] @ c[0] if product else c[0] + 1, c[1] + 1),
            (x, 0),
        )

    assert flops.is_uncounted(jax.make_jaxpr(loop(True))(x, 3))
    assert flops.is_uncounted(jax.make_jaxpr(jax.jit(loop(True)))(x, 3))
    assert not flops.is_uncounted(jax.make_jaxpr(loop(False))(x, 3))
    assert not flops.is_uncounted(
        jax.make_jaxpr(lambda x: jax.lax.map(lambda y: x @ y, x))(x)
    )


def test_cudnn_s_attention_counts_its_products(monkeypatch):
    """As XLA's attention does, in full; the backward pass computes the scores again."""
    # traced without the library and a GPU
    for name, found in (
        ("check_cudnn_version", 91002),
        ("check_compute_capability", True),
        ("is_cuda_compute_capability_equal", False),
    ):
        monkeypatch.setattr(
            f"jax._src.cudnn.fused_attention_stablehlo.{name}",
            lambda *_, found=found: found,
        )
    query = jnp.zeros((2, 64, 8, 32), jnp.bfloat16)
    key = jnp.zeros((2, 128, 4, 32), jnp.bfloat16)

    def jaxpr_of(implementation, transform):
        def attend(*arrays):
            return jax.nn.dot_product_attention(
                *arrays, implementation=implementation
            ).sum()

        return jax.make_jaxpr(transform(attend))(query, key, key)

    forward = jaxpr_of("cudnn", lambda f: f)
    assert "dot_product_attention_fwd_wrapper" in str(forward)
    assert not flops.is_uncounted(forward)
    product = 2 * 2 * 8 * 64 * 128 * 32
    assert flops.jaxpr_flops(forward) == 2 * product
    assert flops.jaxpr_flops(forward) == flops.jaxpr_flops(jaxpr_of("xla", lambda f: f))
    both = jaxpr_of("cudnn", lambda f: jax.grad(f, (0, 1, 2)))
    assert flops.jaxpr_flops(both) == 7 * product
    # at the rate of bfloat16, whatever the products around it are computed in
    assert flops.jaxpr_flops(both, only=FP8.in_jaxpr) == 0
