"""Remat policies: what they refuse, and that gradients do not depend on them, on the
host or not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from jaxdist.models.latent_attention import LatentOptions
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.ops.attention import attention
from jaxdist.parallel import execution, remat, sharding
from jaxdist.parallel import mesh as meshes
from jaxdist.protocols.model import staged_loss
from jaxdist.telemetry.flops import jaxpr_flops
from support.models import FAST_COMPILE

POLICIES = (
    "full",
    "dots",
    "save:attention_residuals,mlp_up",
    "offload:block_input,query,key,value,attention_projection",
    "save:attention_residuals+offload:block_input,mlp_gate,mlp_up",
)
CONFIG = TransformerConfig(
    num_layers=3, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=16
)


def batch(size: int = 8, length: int = 32) -> dict[str, jax.Array]:
    tokens = jax.random.randint(
        jax.random.key(1), (size, length + 1), 0, CONFIG.vocab_size
    )
    positions = jnp.broadcast_to(jnp.arange(length), (size, length))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": jnp.ones((size, length)),
        "positions": positions,
    }


def gradients(
    policy: remat.RematConfig | str,
    model: TransformerConfig = CONFIG,
    length: int = 32,
    **sizes: int,
):
    """Returns the jitted gradient function of a small model and its argument."""
    graph, state = nnx.split(Transformer(model, rngs=nnx.Rngs(0)))
    config = meshes.MeshConfig(data=1, **(sizes or {"fsdp": 4, "tensor": 2}))
    mesh = meshes.build_mesh(config)
    rules = sharding.build_rules(config, meshes.resolve_mesh(config, mesh.size))

    def loss(state):
        with execution.activate(mesh, rules):
            return staged_loss(
                nnx.merge(graph, state),
                batch(length=length),
                None,
                remat.recompute(policy),
            ).sum

    return jax.jit(jax.grad(loss)), state


@functools.cache
def reference() -> list[np.ndarray]:
    function, state = gradients("none")
    return [np.asarray(leaf) for leaf in jax.tree.leaves(function(state))]


@pytest.mark.parametrize(
    "policy",
    [
        # the last policy saves names, too
        pytest.param(policy, marks=[pytest.mark.slow] if policy == POLICIES[2] else [])
        for policy in POLICIES
    ],
)
def test_gradients_do_not_depend_on_the_policy(policy):
    function, state = gradients(policy)
    moved = str(function.trace(state).jaxpr).count("device_put[")
    assert (moved > 0) == ("offload" in policy)
    for found, expected in zip(
        jax.tree.leaves(function(state)), reference(), strict=True
    ):
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )


PARTS = (
    remat.RematConfig("full", every=3),
    remat.RematConfig("dots", layers=1),
    remat.RematConfig("save:mlp_up+offload:block_input", layers=2),
)


@pytest.mark.parametrize(
    "config",
    [
        PARTS[0],
        pytest.param(PARTS[1], marks=pytest.mark.slow),
        PARTS[2],  # in the last layers, too
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_which_layers_are_computed_again(config):
    function, state = gradients(config)
    for found, expected in zip(
        jax.tree.leaves(function(state)), reference(), strict=True
    ):
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )


@functools.cache
def products(policy: remat.RematConfig | str) -> float:
    """Returns the FLOPs of a gradient's products, on one device."""
    function, state = gradients(policy, fsdp=8)
    return jaxpr_flops(function.trace(state).jaxpr)


def test_layers_that_save_more_compute_less_again():
    full, dots = products("full"), products("dots")
    assert products("none") <= dots < full
    for layers in (1, 2):
        mixed = products(remat.RematConfig("dots", layers=layers))
        assert mixed == pytest.approx(full + (dots - full) * layers / 3, rel=1e-12)
    # A group's forward pass runs once more; that of its layers, too, if they keep
    # inputs alone.
    assert products(remat.RematConfig("none", every=3)) < products(
        remat.RematConfig("full", every=3)
    )
    again = products(remat.RematConfig("full", every=3)) - full
    # of three layers but their last products, which nobody reads
    forward = full - products("none")
    assert forward <= again < 1.35 * forward


@pytest.mark.slow
def test_a_group_keeps_its_first_layers_input():
    """Of 12 layers: 12 inputs of 2,048 tokens, or 4 + 3 of them, or 3 + 4; weights of a
    group take less.
    """
    deep = dataclasses.replace(CONFIG, num_layers=12, vocab_size=64)
    sizes = {}
    for every in (1, 3, 4):
        function, state = gradients(
            remat.RematConfig("full", every=every), deep, 2048, fsdp=8
        )
        sizes[every] = (
            function.lower(state)
            .compile(FAST_COMPILE)
            .memory_analysis()
            .temp_size_in_bytes
        )
    assert max(sizes[3], sizes[4]) < sizes[1], sizes


@pytest.mark.parametrize(("every", "kept"), [(1, {4: 2}), (2, {4: 1})])
def test_a_group_of_layers_of_unequal_parameters_keeps_one_input(every, kept):
    """A stack of four groups of two layers: the scan gives the input of each layer, or
    of the first alone.
    """
    model = dataclasses.replace(
        CONFIG,
        num_layers=8,
        num_experts=2,
        expert_d_ff=32,
        feed_forward_pattern=("dense", "sparse"),
    )
    graph, state = nnx.split(Transformer(model, rngs=nnx.Rngs(0)))
    again = remat.recompute(remat.RematConfig("full", every=every))

    def loss(state):
        return staged_loss(nnx.merge(graph, state), batch(), None, again).sum

    program = str(jax.make_jaxpr(jax.grad(loss))(state))
    found = {count: program.count(f"f32[{count},8,32,64]") for count in (2, 4, 8)}
    assert {count: stacks for count, stacks in found.items() if stacks} == kept


@pytest.mark.parametrize(
    ("config", "layers", "group", "fault"),
    [
        (
            remat.RematConfig("full", every=3),
            8,
            1,
            "must divide the 8 layers of the stack; set it to one of 1, 2, 4, 8",
        ),
        (
            remat.RematConfig("full", every=2),
            12,
            3,
            "groups of the 3 that repeat; set it to one of 1, 3, 6, 12",
        ),
        (
            remat.RematConfig("full", every=2, layers=1),
            12,
            1,
            "groups are of layers of one policy",
        ),
        (remat.RematConfig("fit"), 12, 1, "`jaxdist plan --fix` resolve it"),
    ],
)
def test_layers_are_cut_up_evenly(config, layers, group, fault):
    (found,) = [*config.faults(), *config.stack_faults(layers, "the stack", group)]
    assert fault in found


@pytest.mark.slow
def test_experts_have_the_same_gradients_with_activations_on_the_host():
    experts = {"num_experts": 4, "expert_d_ff": 32, "num_shared_experts": 1}
    model = dataclasses.replace(CONFIG, num_layers=2, **experts)
    policies = ("none", "save:attention_residuals,mlp_up+offload:block_input,mlp_out")
    kept, moved = (gradients(policy, model, fsdp=2, expert=4) for policy in policies)
    # to the host, and back
    assert str(moved[0].trace(moved[1]).jaxpr).count("device_put[") >= 2
    for found, expected in zip(
        jax.tree.leaves(moved[0](moved[1])),
        jax.tree.leaves(kept[0](kept[1])),
        strict=True,
    ):
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=2e-6 * np.abs(expected).max()
        )


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("offlaod:query", "must be none, full, dots, save:NAME,NAME"),
        ("save:query+save:key", "must be"),
        ("offload:query+save:key", "must be"),
        ("offload:querry", "Did you mean query"),
        ("save:key+offload:query,key", "key is named twice"),
        ("save:", "no activation is named ''"),
    ],
)
def test_faults_say_what_to_write(policy, fault):
    (found,) = remat.RematConfig(policy).faults()
    assert fault in found


def test_names_are_those_that_the_model_gives():
    latent = dataclasses.replace(
        CONFIG,
        layer_pattern=("latent",),
        latent=LatentOptions(query_rank=12, kv_rank=16, nope_dim=8, rope_dim=8),
    )
    text = ""
    for config in (CONFIG, latent):
        function, state = gradients("offload:block_input", config)
        text += str(function.trace(state).jaxpr)
    for name in remat.NAMES:
        assert f"name={name}" in text, name


@pytest.mark.parametrize(
    "policy", ["none", *POLICIES, remat.RematConfig("full", every=3)], ids=str
)
def test_a_layer_sorts_the_rows_of_its_experts_once(policy):
    function, state = gradients(
        policy, dataclasses.replace(CONFIG, num_experts=8), fsdp=4, expert=2
    )
    assert str(function.trace(state).jaxpr).count("= sort[") == 1


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        ("full", 2),
        ("dots", 1),
        ("save:attention_residuals,mlp_up", 1),
        ("save:mlp_up", 2),
    ],
)
def test_what_cudnns_backward_pass_reads_is_kept(policy, forwards, monkeypatch):
    """Its kernels need a GPU: here they are traced, as a GPU's step is."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(
        fused_attention_stablehlo, "check_compute_capability", lambda capability: True
    )
    x = jax.ShapeDtypeStruct((1, 64, 4, 16), jnp.bfloat16)

    def layer(scale, x):
        return jnp.sin(attention(scale * x, x, x, implementation="cudnn"))

    def loss(scale, x):
        return remat.rematerialised(layer, policy)(scale, x).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(jnp.bfloat16(1), x))
    assert program.count("= dot_product_attention_bwd_wrapper") == 1
    assert program.count("= dot_product_attention_fwd_wrapper") == forwards
