"""The transformer with experts: a dense reference, balance, padding, layouts, decoding,
what is refused.
"""

import math
import shutil
from dataclasses import asdict, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.interop import hf_config
from jaxdist.models import experts
from jaxdist.models.experts import Experts
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.optimizers import build_optimizer
from jaxdist.optim.roles import role_of
from jaxdist.parallel import execution, sharding
from jaxdist.protocols.model import BlockInfo
from jaxdist.protocols.model_spec import describe
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.trainer import run_config, step_lines, validation
from jaxdist.verification import runner
from support.models import FAST_COMPILE, TINY, fresh, model_of, worst
from support.pipelines import Case, batch_for, build
from support.runs import losses, train, train_and_kill

E, K = 8, 2
MOE = replace(
    TINY,
    num_kv_heads=2,
    num_experts=E,
    experts_per_token=K,
    expert_d_ff=24,
    router_z_loss=1e-2,
)
VARIANTS = {
    "mixtral": replace(MOE, balance="none"),
    "olmoe": replace(MOE, balance="batch", balance_weight=0.5, normalise_top_k=False),
    "deepseek": replace(
        MOE,
        scores="sigmoid",
        route_scale=2.5,
        expert_groups=4,
        expert_top_groups=2,
        num_shared_experts=2,
    ),
    "qwen2": replace(
        MOE,
        balance="none",
        normalise_top_k=False,
        num_shared_experts=2,
        shared_expert_gate=True,
    ),
    "plain": replace(
        MOE, balance="sequence", balance_weight=0.5, gated=False, activation="gelu"
    ),
}


# --- one part against all experts on all tokens ---------------------------------------


def part_of(config: TransformerConfig) -> Experts:
    """Returns the feed-forward part of the first layer, its state moved."""
    graph, state = nnx.split(model_of(config).blocks)
    part = nnx.merge(graph, jax.tree.map(lambda x: x[0], state)).mlp
    shift = jnp.sin(jnp.arange(E, dtype=jnp.float32))
    if config.balance == "bias":
        part.choice_bias.set_value(0.2 * shift)
    if config.balance == "batch":
        part.last_load.set_value((2 + shift) / (2 + shift).sum())
    return part


def sample(length: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [B, S, D] and weights [B, S], of which some are 0 and some are
    not 1.
    """
    random = np.random.default_rng(5)
    x = random.normal(size=(4, length, TINY.d_model)).astype(np.float32)
    weights = random.choice(np.array([0, 0.5, 1, 2], np.float32), x.shape[:2])
    weights[3] = 0
    return x, weights


def objective(part: Experts, x, weights, dense: bool):
    """Returns a loss of output and aux, and the output, aux terms and stats."""
    info = BlockInfo(None, jnp.int32(0), {experts.WEIGHTS: weights})
    y, aux, stats = (reference if dense else Experts.__call__)(part, x, info)
    return jnp.sum(y * y) + sum(aux.values()), (y, aux, stats)


def reference(part: Experts, x, info):
    """Returns what all experts on all tokens give, weighted, and the sums as their
    definitions have them.
    """
    c, weights = part.config, info.fields[experts.WEIGHTS]
    logits = x @ part.router[...]
    scores = jax.nn.softmax(logits) if c.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores + (
        part.choice_bias[...].reshape(1, 1, E) if c.balance == "bias" else 0
    )
    if c.expert_groups:
        grouped = choice.reshape(*choice.shape[:2], c.expert_groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), c.expert_top_groups)[
            1
        ]
        mask = jax.nn.one_hot(best, c.expert_groups).sum(-2) > 0
        choice = jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)
    chosen = jax.nn.one_hot(jax.lax.top_k(choice, K)[1], E).sum(-2)
    gates = scores * chosen
    gates = c.route_scale * (
        gates / gates.sum(-1, keepdims=True) if c.normalise_top_k else gates
    )
    up = jnp.einsum("bsd,edf->bsef", x, part.up[...])
    if c.gated:
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, part.gate[...])) * up
    else:
        hidden = jax.nn.gelu(up)
    y = jnp.einsum("bsef,efd,bse->bsd", hidden, part.down[...], gates)
    if c.num_shared_experts:
        s = part.shared
        shared = (jax.nn.silu(x @ s.gate[...]) * (x @ s.up[...])) @ s.down[...]
        if c.shared_expert_gate:
            shared *= jax.nn.sigmoid(x @ part.shared_gate[...])
        y += shared
    aux, shares = {}, scores / scores.sum(-1, keepdims=True)
    if c.balance == "sequence":
        total = 0.0
        for b in range(3):  # the fourth has no weight
            w = weights[b] / weights[b].sum()
            f, p = E / K * (w @ chosen[b]), w @ shares[b]
            total += weights[b].sum() * (f * p).sum()
        aux["balance"] = c.balance_weight * total
    if c.balance == "batch":
        tokens = weights.sum()
        mean = jnp.einsum("bs,bse->e", weights, shares) / tokens
        aux["balance"] = (
            c.balance_weight * tokens * E * (part.last_load[...] * mean).sum()
        )
    z = jax.nn.logsumexp(logits, -1)
    aux["router_z_loss"] = c.router_z_loss * (weights * z**2).sum()
    return y, aux, {experts.LOAD: jnp.einsum("bs,bse->e", 1.0 * (weights > 0), chosen)}


@pytest.mark.parametrize("name", VARIANTS)
def test_output_gradients_and_sums_are_those_of_all_experts_on_all_tokens(name):
    part, (x, weights) = part_of(VARIANTS[name]), sample()
    graph, parameters, rest = nnx.split(part, nnx.Param, ...)

    def loss(parameters, x, dense):
        return objective(nnx.merge(graph, parameters, rest), x, weights, dense)

    both = [
        jax.jit(
            jax.value_and_grad(
                lambda p, x, d=d: loss(p, x, d), argnums=(0, 1), has_aux=True
            )
        )(parameters, x)
        for d in (False, True)
    ]
    (
        ((value, (y, aux, stats)), gradients),
        ((expected, (dense, terms, counts)), of_dense),
    ) = both
    assert abs(value - expected) < 1e-6 * abs(expected)
    assert worst(y, dense) < 2e-6
    assert aux.keys() == terms.keys()
    assert worst(aux, terms) < 1e-6
    assert set(aux) == {"router_z_loss"} | (
        {"balance"} if VARIANTS[name].balance in ("sequence", "batch") else set()
    )
    assert worst(gradients, of_dense) < 2e-6
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(of_dense))
    np.testing.assert_array_equal(stats[experts.LOAD], counts[experts.LOAD])
    assert stats[experts.LOAD].sum() == K * (weights > 0).sum()
    assert stats[experts.DROPS] == 0


def test_router_logits_are_float32_whatever_the_compute_dtype():
    part, (x, _) = part_of(VARIANTS["mixtral"]), sample()
    with execution.activate(compute="bfloat16"):
        text = str(
            jax.make_jaxpr(lambda x: part.route(x)[0])(jnp.asarray(x, jnp.bfloat16))
        )
        assert "bf16[4,12,32]" in text
        assert "Precision.HIGHEST" in text
        logits = part.route(jnp.asarray(x, jnp.bfloat16))[0]
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), np.float64)
    assert logits.dtype == jnp.float32
    assert worst(logits, rounded @ np.asarray(part.router[...], np.float64)) < 1e-6


# --- state, padding, capacity ---------------------------------------------------------


def test_a_bias_moves_against_the_load_and_a_share_follows_it():
    load = np.array([[4, 0, 2, 2, 2, 2, 2, 2], [2] * 8], np.float32)
    part = model_of(VARIANTS["deepseek"]).blocks.mlp
    part.update({experts.LOAD: load})
    bias, rate = np.asarray(part.choice_bias[...]), VARIANTS["deepseek"].balance_rate
    np.testing.assert_allclose(
        bias[0], rate * np.array([-1, 1, 0, 0, 0, 0, 0, 0]), atol=1e-9
    )
    assert part.choice_bias[...].dtype == jnp.float32
    assert not part.choice_bias[...].weak_type
    assert not bias[1].any()
    part = model_of(VARIANTS["olmoe"]).blocks.mlp
    # the second layer saw no token
    part.update({experts.LOAD: load * np.array([[1], [0]])})
    np.testing.assert_allclose(part.last_load[...], [load[0] / 16, np.full(8, 1 / 8)])


@pytest.mark.parametrize("name", ["olmoe", "plain", "deepseek"])
def test_tokens_of_weight_0_count_nowhere(name):
    config = VARIANTS[name]
    spec, batch = (
        describe(lambda rngs: Transformer(config, rngs=rngs)),
        batch_for(Case(model=config)),
    )
    arrays = spec.init_params(jax.random.key(0))
    # causal: what is padded there is seen by nobody before it
    batch["weights"][:, 10:] = 0
    other = batch | {"tokens": batch["tokens"].copy()}
    other["tokens"][:, 10:] = 7

    @jax.jit
    def gradient(trainable, batch):
        def loss(trainable):
            found = spec.assemble(trainable, *arrays[1:]).loss(batch, jax.random.key(1))
            return found.sum + sum(found.aux.values()), found

        return jax.grad(loss, has_aux=True)(trainable)

    (one, loss), (two, again) = gradient(arrays[0], batch), gradient(arrays[0], other)
    assert (batch["tokens"] != other["tokens"]).any()
    assert worst(one, two) < 1e-6
    assert worst(loss, again._replace(stats=loss.stats)) < 1e-6
    np.testing.assert_array_equal(loss.stats[experts.LOAD], again.stats[experts.LOAD])
    assert (
        loss.stats[experts.LOAD].sum()
        == config.num_layers * K * (batch["weights"] > 0).sum()
    )


def test_a_capacity_drops_in_training_alone():
    config = replace(VARIANTS["mixtral"], capacity_factor=0.5)
    model, batch = model_of(config), batch_for(Case(model=config))
    loss = nnx.jit(lambda model, key: model.loss(batch, key))
    trained, evaluated, whole = (
        loss(model, jax.random.key(0)),
        loss(model, None),
        loss(model_of(VARIANTS["mixtral"]), None),
    )
    assert trained.stats[experts.DROPS].sum() > 0
    assert evaluated.stats[experts.DROPS].sum() == 0
    assert abs(evaluated.sum - whole.sum) < 1e-3
    figures = experts.metrics(trained.stats)
    load, drops = trained.stats[experts.LOAD], trained.stats[experts.DROPS]
    np.testing.assert_allclose(figures["dropped"], drops / load.sum(-1), rtol=1e-6)
    assert figures["dropped"].min() > 0.2
    assert figures["dropped"].max() < 0.8
    np.testing.assert_allclose(
        figures["load_max_over_mean"], load.max(-1) / load.mean(-1), rtol=1e-6
    )
    dead = experts.metrics(trained.stats | {experts.LOAD: load.at[0, 3].set(0)})
    assert not figures["dead_experts"].any()
    assert dead["dead_experts"].tolist() == [1, 0]
    tall = experts.metrics(trained.stats | {experts.LOAD: load.at[1, 3].set(1000)})
    assert tall["fullest_layer"] == 1
    assert tall["expert_load"].shape == load.shape
    even = experts.metrics(trained.stats | {experts.LOAD: jnp.ones_like(load)})
    np.testing.assert_allclose(even["load_entropy"], 1, rtol=1e-6)


# --- layouts --------------------------------------------------------------------------

LAYERS = {name: replace(config, z_loss=1e-4) for name, config in VARIANTS.items()}
LAYOUTS = {
    "data 8, accumulation 2": Case(stages=1, data=8, accumulation=2),
    "fsdp 2 x tensor 2 x data 2": Case(stages=1, data=2, fsdp=2, tensor=2),
    "fsdp 4 x data 2, zero 1, accumulation 2": Case(
        stages=1, data=2, fsdp=4, zero=1, accumulation=2
    ),
    "pipeline 2 x data 2": Case(stages=2, data=2),
    "pipeline 2 x fsdp 2 x tensor 2": Case(stages=2, fsdp=2, tensor=2),
    "pipeline 2 x data 4, accumulation 2": Case(
        stages=2, microbatches=2, data=4, accumulation=2
    ),
}


ORDERS = 8  # orders of a batch whose gradients are averaged


@lru_cache
def observed(case: Case, orders: int = 1):
    """Returns metrics, gradients and flat state after a step, from a state that was
    moved.

    With several orders, the gradients are a mean over steps on the rows of the batch in
    other orders. The exact sum is the same, and rounding is less.
    """
    built = build(case)
    flat = built.views.flat(fresh(built))
    moved = jax.tree.map(
        lambda x: (
            np.asarray(x)
            + 0.01 * np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
        ),
        flat.model_state,
    )
    flat = jax.device_get(flat._replace(model_state=moved))
    state = built.views.by_stage(
        jax.device_put(flat, jax.tree.map(lambda x: x.sharding, built.views.abstract))
    )
    batch = batch_for(case)
    placed = jax.device_put(batch, built.batch_shardings(batch))
    compiled = built.inspect.lower(state, placed).compile(FAST_COMPILE)
    after, metrics, gradients = compiled(state, placed)
    summed = built.views.flat(after._replace(trainable=gradients)).trainable
    every = [jax.device_get(summed)]
    random = np.random.default_rng(0)
    for _ in range(1, orders):
        order = random.permutation(len(batch["tokens"]))
        other = {name: x[order] for name, x in batch.items()}
        every.append(jax.device_get(compiled(state, other)[2]))
    mean = jax.tree.map(lambda *xs: np.mean(np.float64(xs), 0), *every)
    return jax.device_get((metrics, mean, built.views.flat(after), flat.model_state))


def check_layout(layout: str, name: str, packed: bool) -> None:
    config = LAYERS[name]
    case = LAYOUTS[layout]._replace(model=config, packed=packed)
    metrics, gradients, state, start = observed(case)
    one = Case(stages=1, model=config, packed=packed)
    expected, of_one, after, _ = observed(one, ORDERS)
    assert abs(metrics["loss"] - expected["loss"]) < 1e-6 * expected["loss"]
    assert worst(gradients, of_one) < 2e-6
    assert all(
        np.all(np.abs(metrics[n] - x) <= 1e-6 * np.abs(x) + 1e-7)
        for n, x in expected.items()
        if n[:4] in ("aux/", "stat")
    )
    assert jax.tree.structure(state.model_state) == jax.tree.structure(
        after.model_state
    )
    for own, one, before in zip(
        *map(jax.tree.leaves, (state.model_state, after.model_state, start)),
        strict=True,
    ):
        np.testing.assert_array_equal(own, one)
        assert (np.asarray(one) != before).any()
    state_leaves = len(jax.tree.leaves(after.model_state))
    assert state_leaves == (config.balance in ("bias", "batch"))


# By default tests/step/test_expert_balance.py splits a packed batch of such a model
# over `fsdp`, `expert` and the parts of a step.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data 8, accumulation 2"])
@pytest.mark.parametrize("name", ["olmoe"])
def test_a_layout_changes_nothing(layout, name):
    check_layout(layout, name, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_anything(layout, name, packed):
    check_layout(layout, name, packed)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "save:mlp_out"])
def test_sums_are_counted_once_whatever_is_computed_again(remat):
    case = Case(stages=1, model=LAYERS["plain"])
    built = build(case, remat=remat)
    state, batch = fresh(built), batch_for(case)
    _, metrics, gradients = jax.device_get(built.inspect(state, batch))
    _, expected, of_dots = jax.device_get(build(case).inspect(state, batch))
    assert worst(metrics, expected) < 1e-6
    assert worst(gradients, of_dots) < 2e-6
    assert metrics["stats/exchange_rounds/max"] == 1


# --- the axis expert ------------------------------------------------------------------


def run_on(**changes):
    """Returns a run of eight experts with more values changed by path."""
    config = run_config.default_config()
    small = {
        "model.num_experts": E,
        "model.expert_d_ff": 48,
        "model.d_model": 64,
        "model.num_layers": 2,
    }
    config.update_from_flattened_dict(
        small | {name.replace("__", "."): x for name, x in changes.items()}
    )
    return run_config.from_config(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mesh__expert": 8, "model__num_experts": 0, "model__expert_d_ff": 0},
            "Transformer has no experts",
        ),
        (
            {"mesh__expert": 8, "model__num_experts": 12},
            "dim experts=12 is not divisible by mesh.expert=8",
        ),
        (
            {"mesh__expert": 4, "mesh__fsdp": 2, "model__d_model": 68},
            "d_model=68 is not divisible by mesh.fsdp x ",
        ),
        (
            {"mesh__expert": 8, "mesh__dcn__expert": 2, "mesh__dcn__data": 1},
            "expert talks inside every layer",
        ),
    ],
)
def test_what_an_axis_of_experts_cannot_be(changes, said):
    with pytest.raises(ConfigError) as raised:
        validation.validate_on(
            run_on(**changes), 8, changes.get("mesh__dcn__expert", 1), with_data=False
        )
    assert said in str(raised.value)
    assert all(len(fault) < 300 for fault in raised.value.faults)


@pytest.mark.parametrize("zero", [3, 2, 1])
def test_nothing_but_vectors_is_held_twice_over_fsdp_and_expert(zero):
    run = run_on(mesh__expert=4, mesh__fsdp=2, mesh__zero=zero)
    composition = validation.validate_on(run, 8, with_data=False)
    rules = composition.rules
    kinds = set()
    for path, (x, names) in composition.spec.named_trainable().items():
        stored, state = (use(names, x.shape) for use in (rules.stored, rules.state))
        if sharding.is_vector(names, x.shape):
            assert "norm" in path
            assert not any(state)
            continue
        experts_own = "experts" in names
        parts = math.prod(x.shape) // math.prod(rules.shard_dims(state, x.shape))
        assert parts == 8, path
        kept = math.prod(x.shape) // math.prod(rules.shard_dims(stored, x.shape))
        assert kept == (8 if zero == 3 else 4 if experts_own else 1), path
        kinds.add(experts_own)
    assert kinds == {True, False}
    assert rules.stored(("d_model", "d_ff"), (64, 48)) == (
        P(("fsdp", "expert"), None) if zero == 3 else P(None, None)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balance", "packing"),
    [("bias", "window"), ("sequence", "documents"), ("batch", "documents")],
)
def test_devices_that_share_out_experts_have_the_numbers_of_one(balance, packing):
    run = run_on(
        model__balance=balance, data__packing=packing, model__num_shared_experts=1
    )
    report = runner.verify_layouts(
        run, jax.devices(), precisions=("float32",), only="expert"
    )
    # each with an uneven load, too
    assert len(report.layouts) == 2 * 8
    assert not report.skipped
    for result in report.layouts:
        assert result.passed, result
        assert result.loss_error < 1e-6, result
        assert result.grad_error < 2e-6, result


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise_and_goes_on_without_the_axis(tmp_path):
    moe = {
        "model__num_experts": 8,
        "model__expert_d_ff": 32,
        "model__dropout": 0.0,
        "train__steps": 20,
    }
    mesh = {"mesh__expert": 4, "mesh__fsdp": 2, "mesh__data": 1}
    train(tmp_path / "straight", 8, **moe, **mesh)
    straight = losses(tmp_path / "straight")
    train_and_kill(tmp_path / "killed", 9, 8, **moe, **mesh)
    shutil.copytree(tmp_path / "killed", tmp_path / "one")
    shutil.copytree(tmp_path / "killed", tmp_path / "pipeline")
    assert "resumed after step" in train(tmp_path / "killed", 8, **moe, **mesh).stdout
    assert losses(tmp_path / "killed") == straight
    staged = {
        "mesh__pipeline": 2,
        "mesh__expert": 2,
        "mesh__data": 1,
        "pipeline__microbatches": 4,
    }
    others = {"one": (1, {}), "pipeline": (4, staged)}
    for name, (devices, layout) in others.items():
        assert (
            "resumed after step"
            in train(tmp_path / name, devices, **moe, **layout).stdout
        )
        own = losses(tmp_path / name)
        assert own.keys() == straight.keys()
        assert own != straight
        assert max(abs(own[step] - loss) for step, loss in straight.items()) < 1e-5


# --- work, decoding, optimizer, what is refused ---------------------------------------


def test_flops_are_those_of_the_active_experts():
    config = replace(VARIANTS["deepseek"], loss_chunk=0, layer_pattern=("global",))
    wide = replace(config, num_experts=64, expert_groups=8, expert_top_groups=2)
    router = 6 * config.num_layers * config.d_model
    assert wide.flops_per_token(16, "full") - config.flops_per_token(
        16, "full"
    ) == router * (64 - E)
    dense = replace(TINY, num_kv_heads=2, d_ff=(K + 2) * 24)
    assert (
        config.flops_per_token(16, "full")
        == dense.flops_per_token(16, "full") + router * E
    )
    model, batch = model_of(config), batch_for(Case(model=config))
    traced = jaxpr_flops(jax.make_jaxpr(lambda: model.loss(batch, None).sum)())
    tokens = batch["tokens"].size
    # Blocks of rows are padded, at these sizes by as much again; all experts would be 4
    # x those chosen.
    assert traced < config.flops_per_token(16, "full") * tokens


def test_cached_logits_are_those_of_the_whole_forward_pass():
    config = replace(VARIANTS["deepseek"], capacity_factor=0.5, init_std=0.4)
    model, batch = model_of(config), batch_for(Case(model=config))
    forward = nnx.jit(lambda model, batch: model.forward(batch))(model, batch)
    cache = model.init_cache(16, 16)
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    first, cache = decode(model, jnp.asarray(batch["tokens"][:, :9]), cache)
    parts = [first]
    for at in range(9, 12):
        logits, cache = decode(
            model, jnp.asarray(batch["tokens"][:, at : at + 1]), cache
        )
        parts.append(logits)
    assert worst(np.concatenate(parts, 1), forward[:, :12]) < 1e-5


def test_to_an_optimizer_each_expert_is_a_matrix_and_so_is_the_router():
    spec = describe(lambda rngs: Transformer(MOE, rngs=rngs))
    parameters = spec.named_trainable()
    for name, dims in {
        "gate": (2, E, 32, 24),
        "down": (2, E, 24, 32),
        "router": (2, 32, E),
    }.items():
        x, names = parameters[f"blocks/mlp/{name}"]
        role = role_of(("blocks", "mlp", name), x.shape, names)
        assert x.shape == dims
        assert (role.kind, role.dims) == ("matrix", 2)
        assert (role.reduction, role.output) == ((-2,), (-1,))


@pytest.mark.parametrize(
    ("size", "exchange"), [(1, "no exchange"), (4, "exchange by rounds over expert 4")]
)
def test_a_run_says_what_computes_its_experts_and_how_tokens_reach_them(size, exchange):
    config = run_config.default_config()
    config.model.update(num_experts=E, experts_per_token=K)
    config.mesh.update(data=8 // size, expert=size)
    run = run_config.from_config(config)
    composition = validation.validate_on(run, 8, with_data=False)
    lines = step_lines.step_lines(composition, composition.build_step())
    said = [line for line in lines if line.startswith("experts:")]
    assert len(said) == 2
    assert "matmuls by" in said[0]
    assert exchange in said[1]


def test_muon_treats_every_expert_by_itself():
    names, random = {"gate": ("experts", "d_model", "d_ff")}, np.random.default_rng(0)
    gradient = random.normal(size=(2, 3, 16, 24)).astype(np.float32)  # layers, experts
    config = OptimizerConfig(name="muon", weight_decay=0.0)

    def update(g, own):
        transform = build_optimizer(config, lambda _: 1.0, {"gate": g}, own)
        return transform.update({"gate": g}, transform.init({"gate": g}), {"gate": g})[
            0
        ]["gate"]

    stacked = update(gradient, names)
    alone = update(gradient[1, 2], {"gate": ("d_model", "d_ff")})
    assert worst(stacked[1, 2], alone) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tiny_variant_keeps_every_choice(name):
    config = VARIANTS[name]
    large = replace(
        config,
        num_experts=256,
        experts_per_token=8,
        expert_d_ff=2048,
        num_layers=60,
        d_model=4096,
    )
    if config.expert_groups:
        large = replace(large, expert_groups=8, expert_top_groups=4)
    tiny = replace(large, **large.tiny(32))
    assert not faults(large)
    assert not faults(tiny)
    assert tiny.num_experts == 8
    assert tiny.experts_per_token == 2
    assert tiny.balance == config.balance
    assert bool(tiny.num_shared_experts) == bool(config.num_shared_experts)
    assert (
        0 < tiny.expert_top_groups < tiny.expert_groups
        if config.expert_groups
        else not tiny.expert_groups
    )
    assert "expert_d_ff" in tiny.tensor_parallel_dims


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 0, "scores": "sigmoid"}, "model.expert_d_ff=24 needs experts"),
        (
            {
                "num_experts": 0,
                "expert_d_ff": 0,
                "balance": "none",
                "router_z_loss": 0.0,
            },
            "set model.num_experts",
        ),
        (
            {"experts_per_token": 9},
            "model.experts_per_token=9 of model.num_experts=8; set it to at most 8",
        ),
        ({"expert_groups": 3, "expert_top_groups": 1}, "set a divisor of 8 up to 4"),
        (
            {"expert_groups": 8, "expert_top_groups": 2},
            "groups are equal, of two experts or more",
        ),
        (
            {"expert_groups": 0, "expert_top_groups": 2},
            "or expert_groups and expert_top_groups to 0",
        ),
        (
            {"expert_groups": 2, "expert_top_groups": 3},
            "set it between 1 and model.expert_groups=2",
        ),
        (
            {"expert_groups": 4, "expert_top_groups": 1, "experts_per_token": 3},
            "set it between 2 and",
        ),
        (
            {"bias": "all"},
            "experts have no biases; set model.bias to none, qkv or attention",
        ),
        (
            {"balance_weight": 0.1},
            "model.balance_weight=0.1 has no effect with model.balance=bias",
        ),
        (
            {"balance": "none", "balance_rate": 0.1},
            "model.balance_rate=0.1 has no effect with",
        ),
        ({"capacity_factor": -1.0}, "model.capacity_factor: got -1.0"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(changes, said):
    assert not faults(MOE)
    (fault,) = faults(replace(MOE, **changes), "model.")
    assert said in fault
    assert "\n" not in fault


def test_a_family_whose_layers_all_have_experts_takes_no_model_with_dense_ones():
    config = replace(TINY, num_kv_heads=2, num_experts=E)
    assert hf_config.fields_of(asdict(config))[0].model_type == "mixtral"
    with pytest.raises(ConfigError) as raised:
        hf_config.fields_of(asdict(replace(config, first_dense_layers=1)))
    assert "model.first_dense_layers=1" in str(raised.value)
