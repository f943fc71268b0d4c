"""Adapters on a frozen base, in float32, int8 and nf4: exact, sharded, resumed, in and
out as PEFT files.
"""

import contextlib
import io
import itertools
import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from scipy.stats import norm

from jaxdist import convert, interop, train
from jaxdist.config import ConfigError, extras, trees
from jaxdist.evaluation import loading
from jaxdist.interop import peft
from jaxdist.models import lora
from jaxdist.models.lora import LoraConfig
from jaxdist.models.transformer import Transformer
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import mesh, sharding
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from jaxdist.telemetry import flops, hlo
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import (
    loop,
    model_flops,
    run_config,
    validation,
    workdir,
)
from support import paths
from support.huggingface import (
    FOLDERS,
    SMOLLM,
    flags,
    load_all,
    loaded,
    logits_of,
    run_convert,
    shapes_of,
    text_fixture,  # noqa: F401  pytest finds them here
)
from support.huggingface import (
    opened as opened_folder,
)
from support.models import (
    FAST_COMPILE,
    MIXED,
    ONE,
    OPTIMIZER,
    TINY,
    Layout,
    batch_of,
    bitwise_equal,
    fresh,
    program_of,
    rules_and_mesh,
    spec_of,
    worst,
)
from support.runs import stopping_after
from support.weight_sources import parsed

pytestmark = pytest.mark.usefixtures("shared_steps")

qwix = pytest.importorskip("qwix", reason="extra lora")

from jaxdist.models.lora_quantization import (  # noqa: E402
    TILE,
    form_of,
    table,
)

PEFT = paths.DATA / "peft"
MODEL = replace(TINY, d_model=64, d_ff=96, num_kv_heads=2)
LORA = LoraConfig(rank=4, alpha=8)
# Plain SGD: an update is the gradient itself, of which Adam's first step shows no more
# than the sign.
SGD = OptimizerConfig(
    name="sgd",
    learning_rate=0.1,
    warmup_steps=0,
    momentum=0.0,
    weight_decay=0.0,
    clip_norm=0.5,
)


# --- quantised kernels ----------------------------------------------------------------

KERNELS = {  # dims with a stack of 3, names of a kernel's own, input dims
    "query": ((3, 128, 4, 8), ("d_model", "heads", "head_dim"), 1),
    "out": ((3, 4, 8, 96), ("heads", "head_dim", "d_model"), 2),
    "unnamed": ((3, 48, 20), (), 1),
}


def quantised(name, kind):
    dims, names, contract = KERNELS[name]
    kernel = jax.random.normal(jax.random.key(0), dims)
    form = form_of(kind, names, dims[1:], contract, name)
    return kernel, form, jax.jit(form.store)(kernel)


@pytest.mark.parametrize("name", KERNELS)
def test_int8_is_what_qwix_makes_of_it(name):
    kernel, form, (codes, scales) = quantised(name, "int8")
    inputs = KERNELS[name][2]
    channels = [0, *range(1 + inputs, kernel.ndim)]
    theirs = qwix.quantize(kernel, jnp.int8, channelwise_axes=channels)
    restored = jax.jit(form.restore)(codes, scales)
    assert codes.dtype == np.int8
    assert codes.shape == kernel.shape
    assert scales.shape == tuple(kernel.shape[dim] for dim in channels)
    assert bitwise_equal(restored, qwix.dequantize(theirs))
    step = np.asarray(jnp.expand_dims(scales, range(1, 1 + inputs)))
    error = np.abs(np.asarray(restored - kernel)) / step
    assert 0.4 < error.max() <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("name", KERNELS)
def test_nf4_is_what_qwix_makes_of_it_and_within_the_codes_gaps(name):
    kernel, form, (codes, scales) = quantised(name, "nf4")
    axis = kernel.ndim + form.axis
    size, tile = kernel.shape[axis], kernel.shape[axis] // scales.shape[axis]
    assert tile == {128: TILE, 96: 32, 48: 16}[size]
    others = [dim for dim in range(kernel.ndim) if dim != axis]
    theirs = qwix.quantize(
        kernel, "nf4", channelwise_axes=others, tiled_axes={axis: tile}
    )
    restored = np.asarray(jax.jit(form.restore)(codes, scales))
    assert codes.dtype == np.uint8
    assert 2 * codes.nbytes == kernel.size
    assert bitwise_equal(restored, qwix.dequantize(theirs))
    # By numpy, from the paper's definition alone (QLoRA, equation 4 and appendix E).
    high, low = (
        norm.ppf(np.linspace(0.9677083, 0.5, 9)),
        norm.ppf(np.linspace(0.9677083, 0.5, 8)),
    )
    values = np.sort(np.concatenate([high[:-1], -low]))
    values /= values.max()
    np.testing.assert_allclose(table(), values, atol=2e-5)
    rows = np.moveaxis(np.asarray(kernel, np.float64), axis, -1).reshape(-1, tile)
    largest = np.abs(rows).max(1, keepdims=True)
    nearest = (
        values[np.abs(rows[..., None] / largest[..., None] - values).argmin(-1)]
        * largest
    )
    found = np.moveaxis(restored, axis, -1).reshape(-1, tile)
    np.testing.assert_allclose(found, nearest, atol=5e-5 * largest.max())
    gap = np.diff(values).max() / 2
    assert 0.9 * gap < (np.abs(found - rows) / largest).max() <= gap * (1 + 1e-4)


def test_all_codes_of_nf4_give_the_bits_of_the_table():
    codes = jnp.arange(16, dtype=jnp.uint8)
    packed = codes[:, None] | codes[None, :] << 4  # all bytes
    form = form_of("nf4", (), (32, 16), 1, "kernel")
    kernel = jax.jit(form.restore)(packed, jnp.ones((1, 16)))
    wanted = np.empty((32, 16), np.float32)
    wanted[::2] = table()[:, None]
    wanted[1::2] = table()[None, :]
    # as integers: 0.0 and -0.0 differ
    np.testing.assert_array_equal(
        np.asarray(kernel).view(np.int32), wanted.view(np.int32)
    )


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_loop_over_layers_gets_codes_and_no_other_array_of_a_kernels_size(kind):
    """`jax.lax.scan` moves what does not depend on the layer out of its loop."""
    _, form, stored = quantised("unnamed", kind)
    kernel_size = math.prod(KERNELS["unnamed"][0][1:])

    def loss(x):
        @jax.checkpoint
        def layer(x, stored):
            y = x @ form.restore(*stored)
            return jnp.tanh(x + y.sum(1, keepdims=True)), None

        return jax.lax.scan(layer, x, stored)[0].sum()

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 48)))
    scans = [step for step in program.eqns if step.primitive.name == "scan"]
    assert len(scans) == 2  # forward and backward
    for scan in scans:
        constants = scan.invars[: scan.params["num_consts"]]
        assert all(x.aval.size < kernel_size / 2 for x in constants)


# --- what is adapted ------------------------------------------------------------------


def build(rngs):
    return Transformer(MODEL, rngs=rngs)


@lru_cache
def spec_with(config=LORA):
    return describe(lora.adapted(build, config))


def test_targets_are_kernels_by_the_ends_of_their_paths():
    spec = spec_with(replace(LORA, targets=("query", "mlp/.*")))
    shapes, names = shapes_of(spec.trainable), spec.named_parameters()
    kernels = ("attention/query", "mlp/gate", "mlp/up", "mlp/down")
    assert set(shapes) == {
        f"blocks/{k}/{f}" for k in kernels for f in ("lora_a", "lora_b")
    }
    assert shapes["blocks/attention/query/lora_a"] == (2, 64, 4)
    assert shapes["blocks/attention/query/lora_b"] == (2, 4, 4, 8)
    assert names["blocks/attention/query/lora_a"][1] == ("d_model", None)
    assert names["blocks/attention/query/lora_b"][1] == (None, "heads", "head_dim")
    assert names["blocks/attention/query/base"][1] == ("d_model", "heads", "head_dim")
    assert "embedding" in spec.frozen
    assert "out" in spec.frozen["blocks"]["attention"]
    everything = shapes_of(spec_with().trainable)
    assert everything["blocks/attention/out/lora_a"] == (2, 4, 8, 4)
    assert everything["blocks/attention/out/lora_b"] == (2, 4, 64)
    assert len(everything) == 14


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora.rank": -1}, "lora.rank: got -1, required int >= 0"),
        ({"lora.alpha": 0.0}, "lora.alpha: got 0.0, required float > 0"),
        ({"lora.targets": ("(",)}, "is no regular expression"),
        ({"lora.targets": ()}, "lora.targets is empty"),
        (
            {"lora.rank": 0, "lora.base": "int8"},
            "needs adapters to train; set lora.rank",
        ),
        (
            {"lora.targets": ("queri",)},
            "'queri': finds no parameter; kernels that adapters fit: blocks/att",
        ),
        (
            {"lora.targets": ("query", "embedding")},
            "'embedding': embedding: rows of a table are looked up",
        ),
        ({"lora.targets": ("output",)}, "'output': output: rows of a table"),
        ({"lora.targets": ("attention_norm/scale",)}, "it is no matrix"),
        ({"lora.from_peft": "there"}, "lora.from_peft needs the model that it adapts"),
        ({"lora.rank": 0, "lora.dropout": 0.1}, "lora.dropout=0.1: needs adapters"),
        ({"lora.dropout": 1.0}, "lora.dropout: got 1.0, required float >= 0 and < 1"),
        ({"lora.base": "nf4", "model.d_model": 40}, "40 weights do not cut into tiles"),
    ],
)
def test_what_cannot_be_is_said(changes, said):
    config = run_config.default_config()
    config.update_from_flattened_dict({"lora.rank": 4} | changes)
    with pytest.raises(ConfigError) as raised:
        validation.validate(
            run_config.from_config(config), jax.devices()[:1], with_data=False
        )
    assert said in str(raised.value)


def test_without_qwix_a_quantised_base_names_the_extra(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    assert not list(LORA.faults())  # adapters alone do without it
    (fault,) = replace(LORA, base="nf4").faults()
    assert extras.install_command("lora") in fault


class Foreign(nnx.Module):
    """A model that knows nothing of adapters: flax's own layers."""

    def __init__(self, rngs):
        self.inner, self.outer = (
            nnx.Linear(48, 32, rngs=rngs),
            nnx.Linear(32, 1, rngs=rngs),
        )

    def __call__(self, x):
        return self.outer(jax.nn.relu(self.inner(x)))


def test_layers_of_others_read_the_merged_kernel():
    x = jax.random.normal(jax.random.key(1), (5, 48))
    plain = Foreign(nnx.Rngs(0))
    model = lora.adapt(
        Foreign(nnx.Rngs(0)), replace(LORA, targets=("inner/kernel",)), nnx.Rngs(7)
    )
    assert bitwise_equal(model(x), plain(x))
    model.inner.kernel.lora_b.set_value(jax.random.normal(jax.random.key(2), (4, 32)))
    factors = model.inner.kernel.lora_a[...] @ model.inner.kernel.lora_b[...]
    plain.inner.kernel.set_value(plain.inner.kernel[...] + 2.0 * factors)
    np.testing.assert_allclose(model(x), plain(x), atol=1e-5)
    assert set(
        shapes_of(describe(lambda r: lora.adapt(Foreign(r), LORA, r)).trainable)
    ) == {
        f"{layer}/kernel/{factor}"
        for layer in ("inner", "outer")
        for factor in ("lora_a", "lora_b")
    }


def test_dropout_drops_what_adapters_read_and_nothing_else():
    model, config = (
        replace(MODEL, num_layers=1),
        replace(LORA, dropout=0.5, targets=("query", "down")),
    )
    spec = describe(lora.adapted(lambda rngs: Transformer(model, rngs=rngs), config))
    fast = {"compiler_options": FAST_COMPILE}
    trainable, model_state, frozen = jax.jit(spec.init_params, **fast)(
        jax.random.key(0)
    )
    batch = jax.tree.map(jnp.asarray, batch_of(model))
    loss = jax.jit(
        lambda t, key: spec.assemble(t, model_state, frozen).loss(batch, key).sum,
        **fast,
    )
    keys = jax.random.split(jax.random.key(1), 2)
    assert loss(trainable, keys[0]) == loss(trainable, keys[1]), "B is 0"
    moved = jax.tree.map(lambda x: x + 0.2, trainable)
    one, again, other = (float(loss(moved, keys[i])) for i in (0, 0, 1))
    assert one == again
    assert abs(one - other) > 1e-5 * one


def test_dropout_is_refused_where_layouts_would_change_it():
    config = replace(LORA, dropout=0.5)
    with pytest.raises(ConfigError, match="inner/kernel is not in a stack of blocks"):
        lora.adapt(Foreign(nnx.Rngs(0)), config, nnx.Rngs(7))
    model = nnx.eval_shape(lambda: lora.adapt(build(nnx.Rngs(0)), config, nnx.Rngs(7)))
    with pytest.raises(ConfigError, match="reads its whole kernel"):
        model.blocks.attention.query[...]


# --- the step -------------------------------------------------------------------------


@lru_cache
def step_with(config=LORA, layout=ONE, step=StepConfig(), stages=1, optimizer=SGD):  # noqa: B008 (frozen)
    spec, schedule = spec_with(config), build_schedule(optimizer, 1000, 8)
    if stages == 1:
        return build_train_step(
            spec, optimizer, schedule, *rules_and_mesh(layout)[::-1], step
        )
    sizes = mesh.MeshConfig(data=1, fsdp=2, tensor=2, pipeline=stages)
    rules = sharding.build_rules(sizes, mesh.resolve_mesh(sizes, 8))
    cut = Staging(PipelineConfig(microbatches=4), MODEL.num_layers, stages)
    return build_train_step(
        spec,
        optimizer,
        schedule,
        mesh.build_mesh(sizes),
        rules,
        replace(step, staging=cut),
    )


@lru_cache
def start(config=LORA):
    """Returns parameters on the host, with B not 0: then A has gradients too."""
    trainable, _, frozen = jax.jit(spec_with(config).init_params)(jax.random.key(0))
    keys = itertools.count()

    def filled(path, x):
        noise = 0.1 * jax.random.normal(jax.random.key(next(keys)), x.shape)
        return x + noise if trees.join(path).endswith("lora_b") else x

    return jax.device_get((jax.tree_util.tree_map_with_path(filled, trainable), frozen))


def one_step(config, *where, **how):
    """Returns state, metrics and mean gradients of a step from `start`, on the host."""
    built = step_with(config, *where, **how)
    trainable, frozen = start(config)
    where = built.views.abstract
    given = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        (trainable, frozen),
        where[1:3],
    )
    given = trees.flatten_names(given[0]) | trees.flatten_names(given[1])
    state = built.init.lower(given).compile(FAST_COMPILE)(given)
    batch = batch_of(MODEL)
    placed = jax.device_put(batch, built.batch_shardings(batch))
    inspect = built.inspect.lower(state, placed).compile(FAST_COMPILE)
    state, metrics, gradients = inspect(state, placed)
    return (
        jax.device_get((built.views.flat(state).trainable, metrics, gradients)),
        state,
        inspect,
    )


@pytest.fixture(
    scope="module",
    params=["none", pytest.param("int8", marks=pytest.mark.slow), "nf4"],
)
def reference(request):
    config = replace(
        LORA, base=request.param, dropout=0.25 if request.param == "none" else 0.0
    )
    return config, *one_step(config)


def test_at_first_adapters_change_nothing():
    trainable, model_state, frozen = jax.jit(spec_with().init_params)(jax.random.key(0))
    plain = spec_of(MODEL)
    whole = jax.jit(plain.init_params)(jax.random.key(0))[0]
    batch = jax.tree.map(jnp.asarray, batch_of(MODEL))
    adapted = jax.jit(
        lambda t, f: spec_with().assemble(t, model_state, f).forward(batch)
    )(trainable, frozen)
    assert bitwise_equal(
        adapted, jax.jit(lambda t: plain.assemble(t, {}).forward(batch))(whole)
    )
    a = np.asarray(trainable["blocks"]["mlp"]["up"]["lora_a"])
    # uniform, as kaiming with a = sqrt(5)
    assert a.std() == pytest.approx((1 / 3 / 64) ** 0.5, rel=0.1)


def test_a_step_moves_adapters_alone_and_keeps_no_more_in_memory(reference):
    config, (trained, _metrics, gradients), state, _inspect = reference
    before, frozen = start(config)
    assert bitwise_equal(jax.device_get(state.frozen), frozen)
    for path, gradient in trees.flatten_names(gradients).items():
        assert np.abs(gradient).max() > 0, path
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), trained, before))
    )
    adapter_bytes, kernels = (
        trees.tree_bytes(trained),
        2 * (2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * 96),
    )
    moments = step_with(config, optimizer=OPTIMIZER).abstract_state.opt_state  # Adam's
    assert trees.tree_bytes(moments) == pytest.approx(2 * adapter_bytes, abs=64)
    tables = 4 * (2 * 64 * 64 + 5 * 64)
    # a float32 scale for each; nf4: for each 64 weights
    channels = 2 * (32 + 16 + 16 + 64 + 96 + 96 + 64)
    wanted = {
        "none": 4 * kernels,
        "int8": kernels + 4 * channels,
        "nf4": kernels // 2 + 4 * kernels // 64,
    }
    assert trees.tree_bytes(frozen) == tables + wanted[config.base]


def test_no_stack_of_restored_kernels_and_no_gradient_of_a_frozen_one(reference):
    config, _, _state, inspect = reference
    text_of = inspect.as_text()
    stacks = [
        f"f32[2,{dims}]" for dims in ("64,4,8", "64,2,8", "4,8,64", "64,96", "96,64")
    ]
    assert any(stack in text_of for stack in stacks) == (config.base == "none")
    gradients = ("f32[64,96]", "f32[96,64]")  # of gate, up and down, as products
    products = [line for line in text_of.splitlines() if " dot(" in line]
    assert products
    assert not any(f"= {dims}" in line for line in products for dims in gradients)


def test_flops_of_frozen_kernels_are_not_counted(reference):
    """The formula's difference to training in full is that of the compiled programs."""
    config, *_, inspect = reference
    if config.base != "none":
        return  # the same products
    options = vars(MODEL) | {"target": "jaxdist.models.transformer:Transformer"}
    run = run_config.RunConfig(
        model=options, batch=run_config.BatchConfig(8, 16), lora=config
    )
    plain = replace(run, lora=LoraConfig())
    specs = ((run, spec_with()), (plain, spec_of(MODEL)))
    formula = [model_flops.model_flops(run, spec)["full"] for run, spec in specs]
    programs = (hlo.parse(inspect.as_text()), program_of(ONE, MODEL).module)
    done = [flops.hlo_flops(module) / (8 * 16) for module in programs]
    assert done[0] < 0.9 * done[1]
    # Under remat=dots the program makes some products with B again: done, and not
    # needed.
    again = (formula[1] - formula[0]) - (done[1] - done[0])
    b = sum(
        x.size
        for path, x in trees.flatten_names(spec_with().trainable).items()
        if path.endswith("_b")
    )
    assert 0 <= again <= 2 * b


WAYS = {
    "mesh": ((MIXED, StepConfig(accumulation=2)), {}),
    "tensor": ((Layout(8, fsdp=2, tensor=4, sequence_parallel=True),), {}),
    "pipeline": ((), {"stages": 2}),
}


def test_a_layout_changes_nothing(reference):
    compare(
        {"none": "tensor", "int8": "pipeline", "nf4": "mesh"}[reference[0].base],
        reference,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_layout_changes_anything(reference, way):
    compare(way, reference)


def compare(way, reference):
    config, (trained, metrics, gradients), *_ = reference
    where, how = WAYS[way]
    (found, told, slopes), state, _ = one_step(config, *where, **how)
    spread = {str(x.sharding.spec) for x in jax.tree.leaves(state.frozen)}
    assert any("fsdp" in spec for spec in spread)
    assert any("tensor" in spec for spec in spread)
    for name in ("loss", "grad_norm"):
        assert told[name] == pytest.approx(metrics[name], rel=1e-6)
    if how:  # by stage
        slopes = (
            step_with(config, **how)
            .views.flat(state._replace(trainable=slopes))
            .trainable
        )
    assert worst(jax.device_get(slopes), gradients) < 1e-5
    assert worst(found, trained) < 1e-6


@pytest.mark.slow
def test_in_bfloat16_losses_fall():
    how = StepConfig(compute="bfloat16", remat="full")
    built = step_with(replace(LORA, base="nf4"), ONE, how, optimizer=OPTIMIZER)
    state, batch = fresh(built), batch_of(MODEL)
    placed, losses = jax.device_put(batch, built.batch_shardings(batch)), []
    for _ in range(8):
        state, metrics = built.step(state, placed)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


# --- whole runs -----------------------------------------------------------------------

RUN = {
    "lora__rank": 4,
    "lora__alpha": 8.0,
    "lora__base": "nf4",
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
    "train__ema_decay": 0.0,
    "train__steps": 6,
    "checkpoint__every_steps": 3,
    "optimizer__learning_rate": 0.1,
    "optimizer__schedule": "constant",
}


def test_a_quantised_base_is_read_and_converted_layer_by_layer():
    changes = {
        "lora.rank": 4,
        "lora.base": "nf4",
        "mesh.data": 1,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
    }
    at = opened_folder(SMOLLM, changes, devices=4)
    kernels = at.target.stored_by_layer
    assert len(kernels) == 7
    layers = {path: at.wanted[path].shape[0] for path in kernels}
    assert min(layers.values()) > 1
    sizes = {path: [] for path in at.wanted}

    def store(path, kernel):
        sizes[path].append(kernel.shape[0])
        return at.target.store(path, kernel)

    by_layer = at.tensors.load(at.wanted, store, kernels)
    for path, seen in sizes.items():
        whole_dim = at.wanted[path].shape[0]
        assert seen == ([1] * layers[path] if path in kernels else [whole_dim]), path
    whole = at.tensors.load(at.wanted, at.target.store)
    assert bitwise_equal(by_layer, whole)
    for found, expected in zip(
        jax.tree.leaves(by_layer), jax.tree.leaves(whole), strict=True
    ):
        assert found.sharding == expected.sharding


DOCS = paths.DOCS / "how-to/lora.md"
COUNTS = "trainable 2,784 of 12,816 parameters (22 %), adapters 11,136 bytes, base 21,408 bytes (nf4)"


def test_the_page_can_be_followed(text):
    """Its commands resolve (the next test runs what they stand for), and its library
    part runs.
    """
    page = DOCS.read_text()
    pattern = r"(?:```|<!-- setup: )(\w+)\n(.*?)(?:```|-->)"
    blocks = re.findall(pattern, page, re.DOTALL)
    commands = [
        shlex.split(line)
        for kind, block in blocks
        if kind == "sh"
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert [command[:2] for command in commands] == [
        ["jaxdist", "train"],
        ["jaxdist", "plan"],
        ["jaxdist", "convert"],
        ["jaxdist", "convert"],
    ]
    arguments = [part.replace("models/llama", str(SMOLLM)) for part in commands[0][2:]]
    corpus = ["--config.data.source=text", f"--config.data.path={text}"]
    run = parsed([*arguments, *corpus])
    assert run.lora == LoraConfig(rank=16, alpha=32, base="nf4")
    assert validation.validate(run, jax.devices()[:1])
    assert [
        convert._parser().parse_args(command[2:]).adapters for command in commands[2:]
    ] == [False, True]
    scope: dict = {}
    for kind, block in blocks:
        if kind == "python":
            exec(block, scope)
    assert len(shapes_of(scope["spec"].trainable)) == 4
    assert COUNTS in page


def trained(text, base, folder, **changes) -> list[float]:
    """Trains, and returns the losses of all steps in the folder."""
    words = flags(text, base, **RUN | changes)
    assert train.main([*words, "--workdir", str(folder)]) == 0
    return [row["loss"] for row in read_rows(folder).train]


def trained_in_parts(text, folder) -> list[float]:
    """Trains for 3 steps, and for 3 more without the model that it began with."""
    base = shutil.copytree(SMOLLM, folder.parent / "base")
    with stopping_after(3):
        assert len(trained(text, base, folder)) == 3
    shutil.rmtree(base)  # the checkpoint has all
    return trained(text, base, folder)


def opened(folder):
    return loading.load_run(folder, devices=jax.devices()[:2], log=lambda line: None)


class Parts(NamedTuple):
    """A run that was stopped half way and went on."""

    folder: Path
    losses: list[float]
    printed: str


@pytest.fixture(scope="module")
def parts(text, tmp_path_factory, shared_steps) -> Parts:
    folder = tmp_path_factory.mktemp("parts") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = trained_in_parts(text, folder)
    return Parts(folder, losses, printed.getvalue())


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(text, parts, tmp_path):
    whole = tmp_path / "whole"
    assert trained(text, SMOLLM, whole) == parts.losses
    again, run = opened(parts.folder), opened(whole)
    assert bitwise_equal(again.state.trainable, run.state.trainable)
    assert bitwise_equal(again.state.frozen, run.state.frozen)


@pytest.mark.slow
def test_a_run_resumes_and_goes_out_merged_and_as_peft(
    text, parts, tmp_path, monkeypatch
):
    whole, losses = parts.folder, parts.losses
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert COUNTS in parts.printed
    run = opened(whole)
    (sample,) = run.generate(["the in"], max_tokens=3)[0]
    assert sample.text.startswith("the in")

    out, factors = tmp_path / "merged", tmp_path / "adapter"
    assert run_convert(whole, out, "huggingface") == 0
    assert run_convert(whole, factors, "huggingface", "--adapters") == 0
    tokens = np.load(SMOLLM / "tokens.npy")
    spec, state = run.spec, run.state
    adapted = logits_of(spec, state.trainable, state.frozen, tokens)
    np.testing.assert_allclose(logits_of(*loaded(out), {}, tokens), adapted, atol=1e-5)
    assert np.abs(adapted - np.load(SMOLLM / "logits.npy")).max() > 0.1  # it has learnt
    about = json.loads((factors / peft.CONFIG).read_text())
    assert (about["r"], about["lora_alpha"], len(about["target_modules"])) == (
        4,
        8.0,
        7,
    )
    family = interop.FAMILIES["llama"]
    found = peft.read(factors, family, run.config.lora, shapes_of(spec.trainable))
    for path, x in trees.flatten_names(jax.device_get(state.trainable)).items():
        np.testing.assert_array_equal(found[path], x)
    begun, real = [], loop.Trainer.train

    def noted(session, state):
        begun.append(jax.device_get(session.built.views.flat(state)))
        return real(session, state)

    monkeypatch.setattr(loop.Trainer, "train", noted)
    on = flags(text, SMOLLM, **RUN | {"lora__from_peft": factors, "train__steps": 1})
    assert train.main([*on, "--workdir", str(tmp_path / "on")]) == 0
    assert bitwise_equal(begun[0].trainable, run.state.trainable)
    assert bitwise_equal(begun[0].frozen, run.state.frozen)

    (tmp_path / "plain").mkdir()
    workdir.write_json(
        tmp_path / "plain" / workdir.CONFIG, run_config.default_config().to_dict()
    )
    with pytest.raises(ConfigError, match="without adapters"):
        run_convert(tmp_path / "plain", tmp_path / "none", "huggingface", "--adapters")


# --- adapters that PEFT wrote (tests/data/peft) ---------------------------------------

FOREIGN = {
    "llama": LoraConfig(rank=4, alpha=8, targets=("query", "value", "down")),
    # one layer there: c_attn
    "gpt2": LoraConfig(rank=2, alpha=6, targets=("query", "key", "value")),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_adapter_that_peft_wrote_gives_pefts_logits_and_comes_back(name, tmp_path):
    config, family, folder = FOREIGN[name], interop.FAMILIES[name], PEFT / name
    plain, base = loaded(FOLDERS / name)
    spec = describe(lora.adapted(plain.first_arrays.build, config))
    shapes = shapes_of(spec.trainable)
    factors = peft.read(folder, family, config, shapes)
    given = trees.flatten_names(base) | factors
    trainable, _, frozen = jax.jit(spec.init_params)(jax.random.key(0), given)
    tokens = np.load(FOLDERS / name / "tokens.npy")
    theirs = np.load(folder / "logits.npy")
    assert np.abs(theirs - np.load(FOLDERS / name / "logits.npy")).max() > 0.1
    np.testing.assert_allclose(
        logits_of(spec, trainable, frozen, tokens), theirs, atol=1e-5
    )

    peft.write(tmp_path, family, config, factors, shapes_of(base), base="")
    back = peft.read(tmp_path, family, config, shapes)
    assert bitwise_equal(back, factors)
    if name == "llama":  # where a layer is a kernel the very tensors come back
        before, after = load_all(folder), load_all(tmp_path)
        assert before.keys() == after.keys()
        assert all(bitwise_equal(before[key], after[key]) for key in before)
    else:
        about = json.loads((tmp_path / peft.CONFIG).read_text())
        assert about["rank_pattern"] == {"attn.c_attn": 6}
        assert about["alpha_pattern"] == {"attn.c_attn": 18}


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({"use_dora": True}, {}, "use_dora=True is not supported; required False"),
        (
            {"modules_to_save": ["lm_head"]},
            {},
            "lm_head was trained in full, and the run does not train it",
        ),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa'"),
        ({}, {"rank": 8, "alpha": 16.0}, "has rank 4, lora.rank is 8; set lora.rank=4"),
        ({}, {"alpha": 4.0}, "set lora.alpha=8"),
        ({"use_rslora": True}, {}, "set lora.alpha=16"),
        ({"lora_alpha": "8"}, {}, "lora_alpha='8': a number is required"),
        ({"alpha_pattern": 3}, {}, "alpha_pattern=3: a mapping is required"),
        (
            {"alpha_pattern": {"(q": 2.0}},
            {},
            "alpha_pattern: '(q' is no regular expression",
        ),
        (
            {"alpha_pattern": {r"(q)\1": 2.0}},
            {},
            r"alpha_pattern: '(q)\\1' has a reference to a group",
        ),
        (
            {},
            {"targets": ("query",)},
            "blocks/attention/value is no target; name it in lora.targets",
        ),
    ],
)
def test_an_adapter_that_is_another_is_refused(changes, config, said, tmp_path):
    folder = shutil.copytree(PEFT / "llama", tmp_path / "adapter")
    about = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(about | changes))
    config = replace(FOREIGN["llama"], **config)
    shapes = shapes_of(
        describe(
            lora.adapted(loaded(FOLDERS / "llama")[0].first_arrays.build, config)
        ).trainable
    )
    with pytest.raises(ConfigError) as raised:
        peft.read(folder, interop.FAMILIES["llama"], config, shapes)
    assert said in str(raised.value)
    (folder / peft.WEIGHTS).write_bytes(b"")
    with pytest.raises(ConfigError, match="no adapter that PEFT wrote"):
        peft.read(folder, interop.FAMILIES["llama"], config, shapes)


def test_alphas_are_those_of_pefts_patterns_and_none_takes_long(tmp_path):
    folder = shutil.copytree(PEFT / "llama", tmp_path / "adapter")
    about = json.loads((folder / peft.CONFIG).read_text())
    about["alpha_pattern"] = {
        "(([a-z_.0-9]+)+)+!": 3.0,  # `re` would not end
        r"layers\.(?!0\b)\d+\..*q_proj": 16.0,
    }
    (folder / peft.CONFIG).write_text(json.dumps(about))
    config = FOREIGN["llama"]
    model = lora.adapted(loaded(FOLDERS / "llama")[0].first_arrays.build, config)
    with pytest.raises(ConfigError) as raised:
        peft.read(
            folder,
            interop.FAMILIES["llama"],
            config,
            shapes_of(describe(model).trainable),
        )
    modules = [fault.split()[1] for fault in raised.value.faults]
    assert modules == [f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 2)]
    assert "alpha / rank = 4, lora.alpha=8 makes it 2" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lora_B", None, "has no lora_B"),
        (
            "lora_B",
            np.zeros((16, 3), np.float32),
            "required [rank, in] and [out, rank]",
        ),
        ("lora_A", np.zeros(4, np.float32), "has lora_A (4,)"),
        (
            "lora_A",
            np.zeros((4, 5), np.float32),
            "maps 5 values to 16; 3 layers of (16, 16) are required",
        ),
        ("lora_B", np.zeros((5, 4), np.float32), "maps 16 values to 5"),
    ],
)
def test_an_adapters_tensors_that_fit_no_kernel_are_named(name, value, said, tmp_path):
    folder = shutil.copytree(PEFT / "llama", tmp_path / "adapter")
    tensors = load_all(folder)
    key = f"base_model.model.model.layers.1.self_attn.q_proj.{name}.weight"
    del tensors[key]
    save_file(
        tensors if value is None else tensors | {key: value}, folder / peft.WEIGHTS
    )
    shapes = shapes_of(
        describe(
            lora.adapted(
                loaded(FOLDERS / "llama")[0].first_arrays.build, FOREIGN["llama"]
            )
        ).trainable
    )
    with pytest.raises(ConfigError, match="model.layers.1.self_attn.q_proj") as raised:
        peft.read(folder, interop.FAMILIES["llama"], FOREIGN["llama"], shapes)
    assert said in str(raised.value)
