"""Optimizers and schedules: closed forms, roles, stacks against single layers, state
sharding.
"""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, schema
from jaxdist.optim import optimizers, schedules
from jaxdist.optim import roles as optim_roles
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.roles import Role
from jaxdist.optim.schedule_table import SCHEDULES, cooling_down, ending
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.storage.untrusted import Malformed

L, D, F, H, N, V = 3, 8, 16, 2, 4, 32

# path -> (shape, logical names of the trailing dims, sharding on a (fsdp 4, tensor 2)
# mesh)
PARAMETERS = {
    "embed/table": ((V, D), ("vocab", "d_model"), P("tensor", "fsdp")),
    "embed/positions": ((V, D), ("positions", "d_model"), P(None, "fsdp")),
    "blocks/q": (
        (L, D, H, N),
        ("d_model", "heads", "head_dim"),
        P(None, "fsdp", "tensor"),
    ),
    "blocks/q_bias": ((L, H, N), ("heads", "head_dim"), P(None, "tensor")),
    "blocks/o": (
        (L, H, N, D),
        ("heads", "head_dim", "d_model"),
        P(None, "tensor", None, "fsdp"),
    ),
    "blocks/up": ((L, D, F), ("d_model", "d_ff"), P(None, "fsdp", "tensor")),
    "blocks/down": ((L, F, D), ("d_ff", "d_model"), P(None, "tensor", "fsdp")),
    "blocks/norm/scale": ((L, D), ("d_model",), P(None, "fsdp")),
    "head/kernel": ((D, V), ("d_model", "vocab"), P("fsdp", "tensor")),
}
MATRICES = {"blocks/q", "blocks/o", "blocks/up", "blocks/down"}


def nest(flat):
    tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def flatten(tree):
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, P)
    )
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


NAMES = nest({path: names for path, (_, names, _) in PARAMETERS.items()})
SPECS = nest({path: spec for path, (_, _, spec) in PARAMETERS.items()})
ABSTRACT = nest(
    {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, (s, _, _) in PARAMETERS.items()}
)


def random_like(abstract, seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), dtype), abstract
    )


def constant(rate):
    return lambda step: jnp.full((), rate)


def build(config, rate=1.0):
    return optimizers.build_optimizer(config, constant(rate), ABSTRACT, NAMES)


def test_every_field_has_a_documented_range():
    fields = schema.schema_of(OptimizerConfig)
    assert len(fields) == len(dataclasses.fields(OptimizerConfig))
    assert all(len(field.doc) > 10 for field in fields.values())
    assert schema.faults(OptimizerConfig(), "optimizer.") == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "adam"}, "optimizer.name: got 'adam', required one of adamw"),
        ({"schedule": "cosin"}, "Did you mean cosine?"),
        ({"learning_rate": 0.0}, "required float > 0"),
        ({"learning_rate": math.nan}, "required float > 0, finite"),
        ({"warmup_steps": -1}, "required int >= 0"),
        ({"warmup_steps": 51}, "must be <= train.steps = 50"),
        ({"warmup_steps": 5, "decay_steps": 4}, "must be <= optimizer.decay_steps = 4"),
        ({"decay_steps": 0, "warmup_steps": 0}, "required int >= 1 or none"),
        ({"decay_fraction": 0.0}, "> 0 and <= 1"),
        (
            {"final_learning_rate": 1.5},
            ">= 0 and <= 1. Meaning: cosine, linear, wsd: final learning rate, as a",
        ),
        ({"b2": 1.0}, ">= 0 and < 1"),
        ({"reference_batch": 0}, "required int >= 1"),
    ],
)
def test_faults_name_the_field_and_the_rule(change, text):
    legal = OptimizerConfig(warmup_steps=10)
    schedules.build_schedule(legal, 50, 1)
    with pytest.raises(ConfigError) as raised:
        schedules.build_schedule(dataclasses.replace(legal, **change), 50, 1)
    (fault,) = raised.value.faults
    assert text in fault
    assert f"optimizer.{next(iter(change))}" in fault


def test_all_faults_are_raised_at_once():
    wrong = OptimizerConfig(name="adam", b1=2.0)
    with pytest.raises(ConfigError) as raised:
        build(wrong)
    assert len(raised.value.faults) == 2
    with pytest.raises(ConfigError):
        schedules.build_schedule(OptimizerConfig(warmup_steps=11), 10, 1)


FORMS = [  # peak 2, 10 warm-up steps, 110 steps
    ({"schedule": "constant"}, {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 1000: 2.0}),
    (
        {"schedule": "linear"},
        {0: 0.2, 9: 2.0, 10: 2.0, 60: 1.0, 109: 0.02, 110: 0, 500: 0},
    ),
    ({"schedule": "linear", "final_learning_rate": 0.5}, {60: 1.5, 110: 1.0, 500: 1.0}),
    ({"schedule": "linear", "decay_steps": 60}, {10: 2.0, 35: 1.0, 60: 0.0, 110: 0.0}),
    (
        {"schedule": "cosine"},
        {
            0: 0.2,
            9: 2.0,
            10: 2.0,
            35: 1 + math.sqrt(0.5),
            60: 1.0,
            85: 1 - math.sqrt(0.5),
            110: 0,
        },
    ),
    ({"schedule": "cosine", "final_learning_rate": 0.1}, {10: 2.0, 60: 1.1, 110: 0.2}),
    (
        {"schedule": "wsd", "decay_fraction": 0.5},
        {9: 2.0, 54: 2.0, 55: 2.0, 82.5: 1.0, 110: 0},
    ),
    ({"schedule": "wsd", "decay_fraction": 1.0}, {9: 2.0, 10: 2.0, 60: 1.0, 110: 0.0}),
    (
        {"schedule": "inverse_sqrt"},
        {0: 0.2, 9: 2.0, 10: 2 * math.sqrt(10 / 11), 39: 1.0},
    ),
    ({"schedule": "constant", "warmup_steps": 0}, {0: 2.0, 1: 2.0}),
    ({"schedule": "inverse_sqrt", "warmup_steps": 0}, {0: 2.0, 3: 1.0}),
    ({"schedule": "cosine", "warmup_steps": 110}, {0: 2 / 110, 109: 2.0, 110: 2.0}),
]


def test_each_schedule_has_a_closed_form_here():
    assert {change["schedule"] for change, _ in FORMS} == set(SCHEDULES)


@pytest.mark.parametrize(("change", "points"), FORMS)
def test_schedule_has_its_closed_form(change, points):
    config = OptimizerConfig(**({"learning_rate": 2.0, "warmup_steps": 10} | change))
    schedule = schedules.build_schedule(config, 110, 8)
    traced = jax.jit(schedule)
    for step, expected in points.items():
        assert schedule(step).dtype == jnp.float32
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-6, abs=1e-6), (
            step
        )
        assert float(traced(step)) == pytest.approx(expected, rel=1e-6, abs=1e-6), step
    assert float(schedule(0)) > 0  # the first update moves the parameters
    assert float(schedule((config.decay_steps or 110) - 1)) > 0  # and so does the last


def test_quickstart_recipe():
    """Muon 0.01, Adam at 0.3 of it, 100 warm-up steps, linear to zero over the last 60
    %.
    """
    config = OptimizerConfig(
        name="muon",
        learning_rate=0.01,
        other_learning_rate_ratio=0.3,
        schedule="wsd",
        decay_fraction=0.6,
    )
    schedule = schedules.build_schedule(config, 1000, 32)
    points = {0: 1e-4, 99: 0.01, 250: 0.01, 400: 0.01, 700: 0.005, 1000: 0.0}
    for step, expected in points.items():
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)]
)
def test_peak_follows_the_batch(scaling, factor):
    config = OptimizerConfig(
        learning_rate=0.1,
        learning_rate_scaling=scaling,
        reference_batch=64,
        warmup_steps=1,
    )
    schedule = schedules.build_schedule(config, 100, 256)
    assert float(schedule(0)) == pytest.approx(0.1 * factor)


def test_which_schedules_depend_on_the_length_of_the_run():
    for name, shape in SCHEDULES.items():
        config = OptimizerConfig(schedule=name, warmup_steps=10)
        short, long = (
            schedules.build_schedule(config, steps, 1)(190) for steps in (200, 400)
        )
        assert (
            bool(short != long)
            == schedules.depends_on_train_steps(config)
            == shape.ends
        )
    assert not schedules.depends_on_train_steps(OptimizerConfig(decay_steps=500))


# --- A schedule that is settled, and extended where train.steps is raised -------------


def rates(config, steps, until):
    """Returns the rate of the update after 0, 1, ... `until` updates, compiled op by
    op.
    """
    return np.asarray(
        schedules.build_schedule(config, until, 1, steps)(np.arange(until + 1))
    )


def extended(config, first, then, done, saved=()):
    steps = schedules.settle(config, first)
    return schedules.extend(
        config, steps, done=done, train_steps=then, saved=lambda n: n in saved
    )


@pytest.mark.parametrize(
    ("options", "train_steps", "warmup"),
    [
        ({}, 20, 2),
        ({}, 9, 0),
        ({}, 5000, 100),
        ({"decay_steps": 50}, 800, 5),
        ({"warmup_steps": 7}, 20, 7),
    ],
)
def test_a_warm_up_that_is_not_set_is_a_tenth_of_the_run(options, train_steps, warmup):
    config = OptimizerConfig(**options)
    steps = schedules.settle(config, train_steps)
    assert steps.warmup_steps == warmup
    assert (rates(config, steps, train_steps) == rates(config, None, train_steps)).all()
    # A longer run has the same, whatever the schedule.
    longer = schedules.extend(
        config, steps, done=5, train_steps=6000, saved=lambda n: False
    )
    assert longer.warmup_steps == warmup


@pytest.mark.parametrize("name", sorted({*ending()} - {*cooling_down()}))
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_a_decay_is_extended_from_the_rate_it_has(name, final):
    config = OptimizerConfig(
        schedule=name, learning_rate=2.0, final_learning_rate=final
    )
    before, after = (
        rates(config, None, 100),
        rates(config, extended(config, 100, 200, 60), 200),
    )
    assert (after[:60] == before[:60]).all()
    assert after[60] == pytest.approx(before[60], rel=1e-6)
    assert (np.diff(after[60:]) < 0).all()
    assert after[199] > after[200] == pytest.approx(2 * final, abs=1e-6)
    half_way = float(SCHEDULES[name].descent(jnp.float32(0.5)))
    middle = before[60] + (2 * final - before[60]) * half_way
    assert after[130] == pytest.approx(middle, rel=1e-5)


def test_a_decay_that_has_come_to_nothing_begins_again_with_a_short_warm_up():
    config = OptimizerConfig(schedule="cosine", learning_rate=2.0)
    steps = extended(config, 100, 200, 100)
    (part,) = steps.extensions
    assert (part.start, part.end, part.share, part.rewarm_steps) == (100, 200, 0.0, 10)
    after, anew = (
        rates(config, steps, 200),
        rates(config, schedules.ScheduleSteps(10, 200), 200),
    )
    assert (np.diff(after[100:110]) > 0).all()
    assert after[109] == pytest.approx(anew[100], rel=1e-5)
    assert (np.diff(after[110:]) < 0).all()
    assert after[200] == pytest.approx(0, abs=1e-6)
    # such a rate is one to go on at
    kept = dataclasses.replace(config, final_learning_rate=0.1)
    assert rates(kept, extended(kept, 100, 200, 100), 200)[100:] == pytest.approx(
        0.2, rel=1e-6
    )


@pytest.mark.parametrize("name", cooling_down())
def test_a_cool_down_is_put_off_from_where_it_began(name):
    config = OptimizerConfig(schedule=name, learning_rate=2.0)
    assert schedules.decay_start(config, schedules.settle(config, 100)) == 80
    straight = rates(config, schedules.ScheduleSteps(10, 200), 200)
    for done, saved in ((60, ()), (80, ()), (95, (80,)), (100, (80,))):
        steps = extended(config, 100, 200, done, saved)
        assert [part.start for part in steps.extensions] == [min(done, 80)]
        assert (rates(config, steps, 200) == straight).all()
    steps = extended(config, 100, 200, 100)  # the step is not there
    assert steps.extensions == (
        schedules.Extension(100, 200, 0.0, rewarm_steps=10, peak=1.0),
    )
    after = rates(config, steps, 200)
    assert (after[:100] == rates(config, None, 100)[:100]).all()
    assert (np.diff(after[100:110]) > 0).all()
    assert (after[109:161] == 2.0).all()
    assert schedules.decay_start(config, steps) == 160
    assert after[180] == pytest.approx(1.0)


def test_an_extension_counts_once_a_step_of_it_is_kept():
    config = OptimizerConfig(schedule="cosine")
    steps = extended(config, 100, 200, 60)

    def again(done, train_steps):
        return schedules.extend(
            config, steps, done=done, train_steps=train_steps, saved=lambda n: False
        )

    assert again(60, 200) == again(70, 200) == again(40, 200) == steps
    # ends the run earlier, and moves nothing
    assert again(70, 150) == again(70, 100) == steps
    assert again(60, 100) == schedules.settle(config, 100)  # as if it had never been
    assert again(60, 300) == extended(config, 100, 300, 60)
    twice = again(70, 300)
    assert [(part.start, part.end) for part in twice.extensions] == [
        (60, 200),
        (70, 300),
    ]
    assert (rates(config, twice, 300)[:70] == rates(config, steps, 200)[:70]).all()
    assert (
        schedules.ScheduleSteps.from_json(json.loads(json.dumps(twice.to_json())))
        == twice
    )


@pytest.mark.parametrize(
    "options",
    [{"schedule": "constant"}, {"schedule": "inverse_sqrt"}, {"decay_steps": 90}],
)
def test_a_schedule_that_does_not_end_with_the_run_is_not_extended(options):
    config = OptimizerConfig(**options)
    assert extended(config, 100, 200, 60) == schedules.settle(config, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"warmup_steps": -1},
        {"decay_steps": 1e3},
        {"extensions": 3},
        {"extensions": [3]},
        {"extensions": [{}]},
    ],
)
def test_a_stored_schedule_of_another_shape_is_refused(change):
    with pytest.raises(Malformed):
        schedules.ScheduleSteps.from_json(
            {"warmup_steps": 1, "decay_steps": 9, "extensions": []} | change
        )
    part = {"start": 1, "end": 20, "share": 2.0, "rewarm_steps": 0, "peak": 1.0}
    with pytest.raises(Malformed, match="required 0 to 1"):
        schedules.ScheduleSteps.from_json(
            {"warmup_steps": 1, "decay_steps": 9, "extensions": [part]}
        )


def test_roles_follow_names_not_ranks():
    roles = flatten(optim_roles.roles(ABSTRACT, NAMES))
    assert {path for path, role in roles.items() if role.kind == "matrix"} == MATRICES
    assert roles["blocks/q"] == Role("matrix", 3, (-3,), (-2, -1))
    assert roles["blocks/o"] == Role("matrix", 3, (-3, -2), (-1,))
    assert roles["blocks/down"] == Role("matrix", 2, (-2,), (-1,))
    assert roles["embed/table"].kind == roles["embed/positions"].kind == "embedding"
    assert roles["head/kernel"].kind == "head"
    assert roles["blocks/norm/scale"] == Role("vector", 1)
    assert roles["blocks/q_bias"].kind == "vector"


@pytest.mark.parametrize(
    ("path", "shape", "names", "expected"),
    [
        (
            "blocks/moe/up",
            (L, 4, D, F),
            ("experts", "d_model", "d_ff"),
            ("matrix", (-2,), (-1,)),
        ),
        ("blocks/moe/bias", (L, 4, F), ("experts", "d_ff"), ("vector", (), ())),
        (
            "blocks/moe/router",
            (L, D, 4),
            ("d_model", "experts"),
            ("matrix", (-2,), (-1,)),
        ),
        (
            "patch",
            (4, 4, 3, D),
            (None, None, None, "d_model"),
            ("matrix", (-4, -3, -2), (-1,)),
        ),
        ("dense/kernel", (D, F), None, ("matrix", (-2,), (-1,))),
        ("dense/bias", (F,), (), ("vector", (), ())),
        ("blocks/dense/kernel", (L, D, F), None, ("matrix", (-2,), (-1,))),
        ("blocks/norm/scale", (L, D), None, ("vector", (), ())),
        ("token_embedding/weight", (V, D), None, ("embedding", (), ())),
        ("blocks/gain", (L,), (), ("vector", (), ())),
        ("temperature", (), None, ("vector", (), ())),
        (
            "blocks/up",
            (2, 4, 1, D, F),
            ("chunks", "stages", "layers", "d_model", "d_ff"),
            ("matrix", (-2,), (-1,)),
        ),
        (
            "blocks/norm/scale",
            (2, 4, 1, D),
            ("chunks", "stages", "layers", "d_model"),
            ("vector", (), ()),
        ),
    ],
)
def test_role_of(path, shape, names, expected):
    role = optim_roles.role_of(path.split("/"), shape, names)
    assert (role.kind, role.reduction, role.output) == expected


def test_more_names_than_dims_are_refused():
    with pytest.raises(
        ValueError, match="a/b: logical names .* at most one name per dim"
    ):
        optim_roles.role_of(["a", "b"], (4,), ("d_model", "d_ff"))


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_weight_decay_touches_what_it_should(name, decay_embeddings):
    """With zero gradients, only decay moves a parameter: by rate * ratio * decay *
    itself.
    """
    config = OptimizerConfig(
        name=name,
        weight_decay=0.5,
        decay_embeddings=decay_embeddings,
        other_learning_rate_ratio=0.3,
    )
    params = random_like(ABSTRACT, 0)
    transform = build(config, rate=0.1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(transform.update)(zeros, transform.init(params), params)
    for path, update in flatten(updates).items():
        decays = path in MATRICES | {"head/kernel"} or (
            "embed" in path and decay_embeddings
        )
        ratio = 0.3 if name == "muon" and path not in MATRICES else 1.0
        expected = -0.1 * ratio * 0.5 * decays * flatten(params)[path]
        np.testing.assert_allclose(update, expected, rtol=1e-6, atol=1e-8, err_msg=path)


RATES = {"adamw": 0.05, "lion": 0.05, "adafactor": 0.05, "sgd": 0.05, "muon": 0.1}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_optimizer_lowers_a_quadratic(name, dtype):
    target, params = random_like(ABSTRACT, 1), random_like(ABSTRACT, 2, dtype)
    config = OptimizerConfig(
        name=name,
        learning_rate=RATES[name],
        weight_decay=0.0,
        schedule="linear",
        warmup_steps=5,
    )
    schedule = schedules.build_schedule(config, 100, 1)
    transform = optimizers.build_optimizer(config, schedule, ABSTRACT, NAMES)

    def losses(params):
        return jax.tree.map(
            lambda x, t: 0.5 * jnp.sum((x.astype(jnp.float32) - t) ** 2), params, target
        )

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: sum(jax.tree.leaves(losses(p))))(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before, state = flatten(losses(params)), transform.init(params)
    structure = jax.tree.structure(state)
    for _ in range(100):
        params, state = step(params, state)
    assert jax.tree.structure(state) == structure
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert {x.dtype for x in floats} <= {jnp.dtype(jnp.float32)}
    # each leaf, so each part of an optimizer
    for path, after in flatten(losses(params)).items():
        assert after < 0.5 * before[path], path


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_momentum_dtype_is_that_of_the_first_moment_only(name):
    transform = build(OptimizerConfig(name=name, momentum_dtype="bfloat16"))
    paths = jax.tree_util.tree_leaves_with_path(
        jax.eval_shape(transform.init, ABSTRACT)
    )
    names = [[getattr(key, "name", "") for key in path] for path, _ in paths]
    moments = [
        n
        for n, (_, leaf) in zip(names, paths, strict=True)
        if leaf.dtype == jnp.bfloat16
    ]
    assert len(moments) == len(PARAMETERS)
    assert all("mu" in n or "trace" in n for n in moments)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        (
            "adamw",
            lambda mask: optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask),
        ),
        ("lion", lambda mask: optax.lion(0.1, 0.9, 0.95, weight_decay=0.1, mask=mask)),
    ],
)
def test_same_as_the_optax_alias(name, theirs):
    config, params = OptimizerConfig(name=name), random_like(ABSTRACT, 3)
    mask = optim_roles.decay_mask(config, optim_roles.roles(ABSTRACT, NAMES))
    assert len(set(jax.tree.leaves(mask))) == 2
    transforms = build(config, rate=0.1), theirs(mask)
    states = [transform.init(params) for transform in transforms]
    for seed in range(3):
        grads = random_like(ABSTRACT, 10 + seed)
        ours, states[0] = transforms[0].update(grads, states[0], params)
        expected, states[1] = transforms[1].update(grads, states[1], params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, expected
        )


def matrix_of(path, layer):
    """Returns one layer's [inputs, outputs] matrix, written out by hand for each
    kernel.
    """
    shape = {"q": (D, H * N), "o": (H * N, D), "up": (D, F), "down": (F, D)}
    return np.asarray(layer).reshape(shape[path.rsplit("/")[-1]])


def test_muon_on_stacks_equals_muon_on_each_layer():
    config = OptimizerConfig(name="muon", weight_decay=0.0, momentum=0.9)
    transform, params = build(config, rate=1.0), random_like(ABSTRACT, 4)
    grads = [random_like(ABSTRACT, seed) for seed in (5, 6)]
    update = jax.jit(transform.update)
    state = transform.init(params)
    for grad in grads:
        updates, state = update(grad, state, params)
    single = optax.contrib.muon(1.0, beta=0.9)  # its own rule: rank 2 gets Muon
    update_single = jax.jit(single.update)
    for path in MATRICES:
        for layer in range(L):
            flat = [
                jnp.asarray(matrix_of(path, flatten(grad)[path][layer]))
                for grad in grads
            ]
            state = single.init(flat[0])
            for grad in flat:
                expected, state = update_single(grad, state, flat[0])
            ours = matrix_of(path, flatten(updates)[path][layer])
            np.testing.assert_allclose(
                ours, expected, rtol=1e-4, atol=1e-5, err_msg=path
            )


def test_muon_moves_no_expert_to_another_device():
    # layers, experts
    abstract = {"up": jax.ShapeDtypeStruct((2, 8, D, F), jnp.float32)}
    names, gradient = {"up": ("experts", "d_model", "d_ff")}, random_like(abstract, 7)
    config = OptimizerConfig(name="muon", weight_decay=0.0)
    transform = optimizers.build_optimizer(config, constant(1.0), abstract, names)
    where = NamedSharding(
        Mesh(np.asarray(jax.devices()[:8]), ("expert",)), P(None, "expert")
    )

    def update(gradient):
        return transform.update(gradient, transform.init(gradient), gradient)[0]

    compiled = (
        jax.jit(update, out_shardings=where)
        .lower(on := jax.device_put(gradient, where))
        .compile()
    )
    assert "f32[2,1," in (text := compiled.as_text())  # each device has one
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
    np.testing.assert_allclose(
        compiled(on)["up"], update(gradient)["up"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rms", [0.0, 0.2])
def test_muon_updates_are_orthogonal_and_scaled_by_shape(rms):
    config = OptimizerConfig(name="muon", weight_decay=0.0, muon_update_rms=rms)
    transform, params = build(config, rate=1.0), random_like(ABSTRACT, 7)
    updates, _ = transform.update(
        random_like(ABSTRACT, 8), transform.init(params), params
    )
    scales = set()
    for path in MATRICES:
        for layer in range(L):
            inputs, outputs = matrix_of(path, flatten(params)[path][layer]).shape
            scale = rms * math.sqrt(max(inputs, outputs)) or math.sqrt(
                max(1, outputs / inputs)
            )
            values = (
                np.linalg.svd(matrix_of(path, flatten(updates)[path][layer]))[1] / scale
            )
            assert values.min() > 0.65, path
            assert values.max() < 1.25, path
            scales.add(round(scale, 3))
    assert len(scales) > 1  # the convention is visible at these shapes


def test_muon_gives_adam_its_own_rate_elsewhere():
    params, grads = random_like(ABSTRACT, 9), random_like(ABSTRACT, 10)

    def updates(config):
        transform = build(config, rate=0.01)
        return flatten(transform.update(grads, transform.init(params), params)[0])

    muon = updates(OptimizerConfig(name="muon", other_learning_rate_ratio=0.25))
    adam = updates(OptimizerConfig(name="adamw"))
    for path in PARAMETERS:
        equal = np.allclose(muon[path], 0.25 * adam[path], rtol=1e-5, atol=1e-8)
        assert equal == (path not in MATRICES), path


def test_adafactor_on_stacks_equals_adafactor_on_each_layer():
    shape, names = (2, 128, 128), {"blocks": {"w": ("d_model", "d_ff")}}
    params = {
        "blocks": {"w": random_like(jax.ShapeDtypeStruct(shape, jnp.float32), 11)}
    }
    # so that layers' RMS differ
    params["blocks"]["w"] *= jnp.asarray([1.0, 5.0])[:, None, None]
    grads = random_like(params, 12)
    config = OptimizerConfig(name="adafactor", weight_decay=0.0)
    transform = optimizers.build_optimizer(config, constant(0.1), params, names)
    state = transform.init(params)
    assert max(x.size for x in jax.tree.leaves(state)) == 2 * 128  # it is factored
    updates, _ = transform.update(grads, state, params)
    single = optax.adafactor(0.1)
    for layer in range(2):
        param, grad = params["blocks"]["w"][layer], grads["blocks"]["w"][layer]
        expected, _ = single.update(grad, single.init(param), param)
        np.testing.assert_allclose(
            updates["blocks"]["w"][layer], expected, rtol=1e-5, atol=1e-8
        )


# Adafactor factors matrices whose dims are both 128 or more.
STACKS_OF_EXPERTS = pytest.mark.parametrize(
    ("shape", "is_factored"),
    [
        pytest.param((128, 8, 24), False, id="many experts with small matrices"),
        pytest.param((2, 130, 4, 24), False, id="layers of many experts"),
        pytest.param((130, 128, 24), False, id="matrices with one small dim"),
        pytest.param((160, 130, 128), True, id="matrices with two large dims"),
    ],
)


def adafactor_of_experts(shape):
    names = ("experts", "d_model", "d_ff")[-min(len(shape), 3) :]
    config = OptimizerConfig(name="adafactor", weight_decay=0.0)
    return optimizers.build_optimizer(
        config, constant(0.1), {"w": jnp.ones(shape)}, {"w": names}
    )


@STACKS_OF_EXPERTS
def test_adafactor_factors_experts_only_if_their_matrices_are_large(shape, is_factored):
    params = {"w": jnp.ones(shape)}
    state = adafactor_of_experts(shape).init(params)
    stacked = [None] * (len(shape) - 3)
    specs = state_specs(state, params, {"w": P(*stacked, "expert", None, None)})

    moments = specs[0][0]
    expected = P("expert", None) if is_factored else P()
    assert moments.v_row["w"] == expected
    assert moments.v_col["w"] == expected


@STACKS_OF_EXPERTS
def test_adafactor_updates_an_expert_of_a_stack_like_its_matrix_alone(
    shape, is_factored
):
    params = {"w": random_like(jax.ShapeDtypeStruct(shape, jnp.float32), 11)}
    last_expert = (*[0] * (len(shape) - 3), shape[-3] - 1)
    matrix = {"w": params["w"][last_expert]}
    of_stack, of_matrix = adafactor_of_experts(shape), adafactor_of_experts(shape[-2:])
    update_stack, update_matrix = jax.jit(of_stack.update), jax.jit(of_matrix.update)
    stack_state, matrix_state = of_stack.init(params), of_matrix.init(matrix)

    for seed in (12, 13):
        grads = random_like(params, seed)
        updates, stack_state = update_stack(grads, stack_state, params)
        expected, matrix_state = update_matrix(
            {"w": grads["w"][last_expert]}, matrix_state, matrix
        )
        np.testing.assert_allclose(
            updates["w"][last_expert], expected["w"], rtol=2e-5, atol=1e-8
        )


def mesh_4x2():
    assert len(jax.devices()) >= 8
    return Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))


def shardings(mesh, specs):
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "muon"])
def test_moments_are_sharded_like_their_parameters(name):
    mesh, params = mesh_4x2(), random_like(ABSTRACT, 13)
    transform = build(OptimizerConfig(name=name), rate=0.1)
    abstract_state = jax.eval_shape(transform.init, ABSTRACT)
    specs = state_specs(abstract_state, ABSTRACT, SPECS)
    params_on = jax.device_put(params, shardings(mesh, SPECS))
    grads = random_like(ABSTRACT, 14)
    grads_on = jax.device_put(grads, shardings(mesh, SPECS))
    places = shardings(mesh, specs)
    state = jax.jit(transform.init, out_shardings=places)(params_on)
    updates, state = jax.jit(
        transform.update, out_shardings=(shardings(mesh, SPECS), places)
    )(grads_on, state, params_on)
    owned = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = [getattr(key, "key", None) for key in path]
        owner = next(
            (p for p in PARAMETERS if keys[-len(p.split("/")) :] == p.split("/")), None
        )
        # counters, coefficients, Adafactor's placeholders
        if owner is None or leaf.shape == (1,):
            assert leaf.sharding.is_fully_replicated
        else:
            owned.add(owner)
            assert leaf.sharding.spec == PARAMETERS[owner][2]
            assert not leaf.sharding.is_fully_replicated
    assert owned == set(PARAMETERS)
    expected, _ = transform.update(grads, transform.init(params), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        updates,
        expected,
    )


FACTORED = pytest.mark.parametrize(
    ("shape", "names", "spec", "row_spec", "column_spec"),
    [
        pytest.param(
            (128, 256),
            ("d_model", "d_ff"),
            P("fsdp", "tensor"),
            P("fsdp"),
            P("tensor"),
            id="wide matrix",
        ),
        pytest.param(
            (256, 128),
            ("d_model", "d_ff"),
            P("fsdp", "tensor"),
            P("tensor"),
            P("fsdp"),
            id="tall matrix",
        ),
        pytest.param(
            (256, 256),
            ("d_model", "d_ff"),
            P("fsdp", "tensor"),
            P("fsdp"),
            P("tensor"),
            id="square matrix, where only the field tells rows from columns",
        ),
        pytest.param(
            (2, 128, 256),
            ("d_model", "d_ff"),
            P(None, "fsdp"),
            P(None, "fsdp"),
            P(None, None),
            id="stack of wide matrices",
        ),
        pytest.param(
            (2, 256, 256),
            ("d_model", "d_ff"),
            P(None, "fsdp", "tensor"),
            P(None, "fsdp"),
            P(None, "tensor"),
            id="stack of square matrices",
        ),
        pytest.param(
            (128, 2, 256),
            ("d_model", "heads", "d_ff"),
            P("fsdp", "tensor"),
            P("fsdp", "tensor"),
            P("tensor", None),
            id="heads between rows and columns",
        ),
    ],
)


def adafactor_of(params, names):
    config = OptimizerConfig(name="adafactor")
    return optimizers.build_optimizer(config, constant(0.1), params, {"w": names})


@FACTORED
def test_factored_moments_keep_the_axes_of_the_dims_they_keep(
    shape, names, spec, row_spec, column_spec
):
    params = {"w": jnp.ones(shape)}
    state = jax.eval_shape(adafactor_of(params, names).init, params)
    moments = state_specs(state, params, {"w": spec})[0][0]

    assert moments.v_row["w"] == row_spec
    assert moments.v_col["w"] == column_spec
    assert moments.v["w"] == P(), "a placeholder"
    assert moments.count == P()


@FACTORED
def test_a_factored_moment_varies_along_the_dims_whose_axes_it_has(
    shape, names, spec, row_spec, column_spec
):
    """Shows by values that the table above has the right dims."""
    params = {"w": jnp.ones(shape)}
    transform = adafactor_of(params, names)
    sharded_dims = [(dim, axis) for dim, axis in enumerate(spec) if axis]
    assert sharded_dims

    for dim, axis in sharded_dims:
        grads = {"w": growing_along(dim, shape)}
        moments = transform.update(grads, transform.init(params), params)[1][0][0]
        assert varies(moments.v_row["w"]) == (axis in row_spec)
        assert varies(moments.v_col["w"]) == (axis in column_spec)


def growing_along(dim, shape):
    others = [other for other in range(len(shape)) if other != dim]
    growing = jnp.expand_dims(jnp.arange(1.0, shape[dim] + 1), others)
    return jnp.broadcast_to(growing, shape)


def varies(moment):
    return float(moment.max() / moment.min()) > 1.5


def test_paths_that_end_alike():
    params = {"w": jnp.ones((4,)), "a": {"w": jnp.ones((4,))}, "count": jnp.ones((4,))}
    specs = {"w": P("x"), "a": {"w": P("y")}, "count": P("z")}
    state = jax.eval_shape(optax.scale_by_adam().init, params)
    result = state_specs(state, params, specs)
    assert result.mu == result.nu == specs
    assert result.count == P()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, "the rate rises again in at most 100 steps, then decays to the new end"),
        (
            {"final_learning_rate": 0.1},
            "the rate goes from where it is then to 0.1 at the new end",
        ),
        ({"schedule": "wsd"}, "the run goes back to the step where the decay began"),
        ({"decay_steps": 50}, None),
        ({"schedule": "constant"}, None),
    ],
)
def test_a_schedule_says_what_a_later_rise_of_the_steps_does(changes, rule):
    config = OptimizerConfig(learning_rate=1.0, **changes)
    steps = schedules.settle(config, 100)
    lines = schedules.describe(config, steps, train_steps=100, global_size=8)
    if rule is None:
        assert len(lines) == 1
        return
    _, said = lines
    assert said.startswith("learning rate: if train.steps is raised later, ")
    assert rule in said
    # It is said at a start. An extended run says what happened.
    longer = schedules.extend(
        config, steps, done=90, train_steps=200, saved=lambda step: True
    )
    lines = schedules.describe(config, longer, train_steps=200, global_size=8)
    assert not any("raised later" in line for line in lines)
