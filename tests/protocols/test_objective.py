"""Objectives: three parts, a frozen reference, the same numbers on every layout."""

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist.checkpoint.state_dict import to_canonical
from jaxdist.config import ConfigError
from jaxdist.models import lora
from jaxdist.models.transformer import Transformer
from jaxdist.protocols.model import Loss
from jaxdist.protocols.model_spec import describe
from jaxdist.protocols.objective import (
    NextToken,
    Objective,
    TokenObjective,
    WholeModel,
)
from jaxdist.step import reduction
from jaxdist.step.first_state import first_state
from jaxdist.step.step_config import StepConfig
from support.models import TINY, Layout, fresh, rules_and_mesh, worst
from support.objectives import (
    MODEL,
    REFERENCE,
    AgainstBase,
    Preference,
    Result,
    SumObjective,
    batch_of_pairs,
    build,
    case,
    run,
    spec_for,
)

CASES = {
    "accumulation": case({"data": 2, "fsdp": 2}, accumulation=2),
    "once": case({"data": 2, "tensor": 2}, accumulation=2, reduce="once"),
    "two stages": case({"pipeline": 2, "fsdp": 2}, accumulation=2),
    "four stages": case({"pipeline": 4, "data": 2}, reduce="once"),
    "last edges": case({"pipeline": 2, "tensor": 2}, edges="last"),
    "ring": case({"context": 4, "fsdp": 2}, attention="ring"),
}


@lru_cache
def one_device() -> Result:
    return run(spec_for(Preference()), case(), batch_of_pairs())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            # two stages accumulate, too
            marks=[pytest.mark.slow]
            if name in ("accumulation", "four stages", "ring", "once", "last edges")
            else [],
        )
        for name in CASES
    ],
)
def test_a_reference_gives_the_same_on_every_layout(name):
    found, wanted = (
        run(spec_for(Preference()), CASES[name], batch_of_pairs()),
        (one_device()),
    )
    for metric in ("loss", "aux/reference", "aux/spread", "margin", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(wanted.metrics[metric], rel=2e-5)
    assert worst(found.gradients, wanted.gradients) < 1e-4
    assert worst(found.trainable, wanted.trainable) < 1e-5
    assert found.evaluated[1] == wanted.evaluated[1] == 16
    np.testing.assert_allclose(found.evaluated[0], wanted.evaluated[0], rtol=1e-5)


def test_a_reference_with_a_state_of_its_layers_is_pipelined():
    model = replace(MODEL, num_experts=4, experts_per_token=2)  # with biases of choice
    spec = spec_for(Preference(), model, model)
    assert spec.modules["reference"].named_frozen()["blocks/mlp/choice_bias"]
    built = build(spec, case({"pipeline": 2, "expert": 2}))
    state = built.abstract_state.modules["reference"]["blocks"]
    for bias in (state["mlp"]["choice_bias"], state["mlp_norm"]["scale"]):
        assert bias.shape[:3] == (1, 2, 2)
        assert bias.sharding.spec[:3] == (None, "pipeline", None)
    built.evaluate.trace(built.abstract_state, built.abstract_batch(batch_of_pairs()))


@pytest.mark.parametrize(
    "place",
    [
        case(),
        pytest.param(
            case({"pipeline": 2, "fsdp": 2}, accumulation=2), marks=pytest.mark.slow
        ),
        pytest.param(case({"context": 2, "tensor": 2}), marks=pytest.mark.slow),
    ],
)
def test_the_policy_without_its_adapters_is_a_reference(place):
    """It equals a frozen copy of the base; the adapters have values here."""
    config = lora.LoraConfig(rank=2, targets=("query", "value"))
    adapted = describe(lora.adapted(lambda rngs: Transformer(MODEL, rngs=rngs), config))
    plain = describe(lambda rngs: Transformer(MODEL, rngs=rngs))
    random = np.random.default_rng(1)
    given = {
        path: 0.3 * random.standard_normal(x.shape, np.float32)
        for path, (x, _) in adapted.named_trainable().items()
    }
    base = {}
    for path, (x, _) in plain.named_parameters().items():
        base[path] = 0.1 * random.standard_normal(x.shape, np.float32)
    copies = {f"modules/reference/{path}": x for path, x in base.items()}
    without = adapted.trained_for(AgainstBase(), {})
    copied = adapted.trained_for(Preference(), {"reference": plain})
    wanted = run(copied, place, batch_of_pairs(), given={**given, **base, **copies})
    found = run(without, place, batch_of_pairs(), given={**given, **base})
    assert abs(float(wanted.metrics["margin"])) > 0.01
    for metric in ("loss", "aux/reference", "margin", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(wanted.metrics[metric], rel=1e-5)
    assert worst(found.gradients, wanted.gradients) < 1e-5
    np.testing.assert_allclose(found.evaluated[0], wanted.evaluated[0], rtol=1e-5)


def test_a_model_without_adapters_has_no_base():
    with pytest.raises(ConfigError, match="without its adapters, and it has none"):
        spec_for(AgainstBase())


def test_the_loss_of_pairs_is_that_of_a_plain_program():
    """The reference, the rows and the gradient are written out here, without ours."""
    spec, batch = spec_for(Preference()), batch_of_pairs()
    state = jax.device_get(build(spec, case()).init())
    frozen = describe(lambda rngs: Transformer(REFERENCE, rngs=rngs))

    def log_probability(model):
        logits = model.forward(batch)
        log_p = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]

    reference = log_probability(frozen.assemble({}, {}, {**state.modules["reference"]}))

    def loss(trainable):
        policy = log_probability(spec.assemble(trainable, {}, {}))
        gain = (policy - reference) * batch["weights"]
        first = (gain * (batch["segment_ids"] == 1)).sum(1)
        second = (gain * (batch["segment_ids"] == 2)).sum(1)
        return jax.nn.softplus(-0.5 * (first - second)).mean()

    with jax.default_matmul_precision("float32"):
        wanted = loss(state.trainable)
    assert one_device().metrics["loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert abs(float(wanted) - np.log(2)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    # untied: with routers' losses, below
    "tied",
    [pytest.param(False, marks=pytest.mark.slow), True],
)
def test_cross_entropy_in_three_parts_is_the_default(tied):
    """Chunks that are filled up and a soft cap: the other backward pass is the same."""
    model = replace(MODEL, tie_embeddings=tied, loss_chunk=5, logit_softcap=3.0)
    batch = batch_of_pairs()
    place = case({"data": 2, "context": 2})
    ours, three = (
        run(spec_for(objective, model), place, batch)
        for objective in (NextToken(), SumObjective())
    )
    assert three.metrics["loss"] == pytest.approx(float(ours.metrics["loss"]), rel=1e-6)
    assert worst(three.gradients, ours.gradients) < 1e-5
    np.testing.assert_allclose(three.evaluated[:2], ours.evaluated[:2], rtol=1e-6)


def test_a_frozen_module_lies_in_the_state_and_stays():
    on = CASES["two stages"]
    spec, batch = spec_for(Preference()), batch_of_pairs()
    built = build(spec, on)
    state = fresh(built)
    flat = built.views.flat(state)
    names = to_canonical(flat)
    path = "modules/reference/blocks/mlp/up"
    assert names[path].shape == (6, 16, 48)
    assert {*names} - {*to_canonical(flat._replace(modules={}))} == {
        f"modules/reference/{name}" for name in spec.modules["reference"].named_frozen()
    }
    stored = state.modules["reference"]["blocks"]["mlp"]["up"]
    assert stored.addressable_shards[0].data.size == stored.size // 4
    before = jax.device_get(flat.modules)
    again = built.views.by_stage(flat)
    placed = jax.device_put(batch, built.batch_shardings(batch))
    after, _ = built.step(again, placed)
    kept = jax.device_get(built.views.flat(after).modules)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, kept))


def test_a_reference_begins_as_the_policy_or_as_given():
    spec = spec_for(Preference(), MODEL, MODEL)
    state = jax.device_get(build(spec, case()).init())
    assert jax.tree.all(
        jax.tree.map(np.array_equal, state.modules["reference"], state.trainable)
    )
    norm = jnp.full(32, 3.0)
    given = {"modules/reference/final_norm/scale": norm}
    state = jax.device_get(build(spec, case()).init(given))
    assert (state.modules["reference"]["final_norm"]["scale"] == 3).all()
    assert (state.trainable["final_norm"]["scale"] == 1).all()


def test_a_reference_with_adapters_begins_as_the_kernels_that_are_given():
    build_adapted = lora.adapted(
        lambda rngs: Transformer(MODEL, rngs=rngs), lora.LoraConfig(rank=2)
    )
    policy = describe(build_adapted)
    spec = policy.trained_for(Preference(), {"reference": policy})
    given = {"blocks/mlp/up": jnp.full((4, 32, 48), 0.5)}
    state = build(spec, case()).init(given)
    for tree in (state.frozen, state.modules["reference"]):
        assert (tree["blocks"]["mlp"]["up"]["base"] == 0.5).all()


@pytest.mark.parametrize(
    "path", ["modules/refrence/final_norm/scale", "modules/reference/scale"]
)
def test_a_first_value_of_no_module_is_refused(path):
    built = build(spec_for(Preference()), case())
    with pytest.raises(ConfigError, match=f"no frozen module has .* {path}"):
        jax.eval_shape(built.init, {path: jnp.ones(16)})


class WithModules(nnx.Module):
    """A model of a user that calls its layers `modules`."""

    def __init__(self, rngs):
        self.modules = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

    def loss(self, batch, key):
        return self.modules[0](batch["x"]).mean()


def test_a_model_that_has_modules_of_its_own_begins_as_given():
    spec = describe(WithModules)
    (path,) = [name for name in spec.named_parameters() if name.endswith("kernel")]
    assert path.startswith("modules/")
    state = build(spec, case()).init({path: jnp.full((4, 4), 2.0)})
    assert (state.trainable["modules"][0]["kernel"] == 2).all()


def test_the_state_of_a_frozen_module_keeps_its_dtype_as_the_policys_does():
    model = replace(MODEL, num_experts=4, experts_per_token=2)
    spec = spec_for(Preference(), model, model)
    config = StepConfig(params="bfloat16")
    state = jax.eval_shape(
        lambda: first_state(spec, None, optax.sgd(0.1), config, None)
    )
    reference = state.modules["reference"]["blocks"]["mlp"]
    assert reference["router"].dtype == jnp.bfloat16
    bias = state.model_state["blocks"]["mlp"]["choice_bias"]
    assert reference["choice_bias"].dtype == bias.dtype == jnp.float32


def test_all_that_the_policy_computes_with_waits_for_the_prepared_fields():
    """Adapters' base and a moving average, too: their gathers are collectives."""
    adapted = lora.adapted(
        lambda rngs: Transformer(MODEL, rngs=rngs), lora.LoraConfig(rank=2)
    )
    reference = describe(lambda rngs: Transformer(REFERENCE, rngs=rngs))
    spec = describe(adapted).trained_for(Preference(), {"reference": reference})
    batch = batch_of_pairs()
    fields = len(batch) + 2
    frozen = len(jax.tree.leaves(spec.frozen))
    built = build(spec, case(), ema_decay=0.9)
    state = built.abstract_state
    assert frozen > 0
    for program, weights in (
        (built.step, state.trainable),
        (built.evaluate, state.ema),
    ):
        jaxpr = program.trace(state, built.abstract_batch(batch)).jaxpr
        barriers = [
            eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"
        ]
        held = len(jax.tree.leaves(weights)) + frozen + fields
        assert held in [len(eqn.invars) for eqn in barriers]


class Advantage(TokenObjective):
    """A scalar loss, of rows whose first field by name is one number."""

    def sample_loss(self, terms, sample):
        return -sample["advantage"] * terms["log_probability"].mean()


def test_a_scalar_loss_of_a_row_counts_the_row_once():
    batch = batch_of_pairs() | {"advantage": np.ones(16, np.float32)}
    total, count, _ = run(spec_for(Advantage()), case(), batch).evaluated
    assert count == 16
    plain = {**batch_of_pairs(), "weights": np.ones((16, 16), np.float32)}
    nats, tokens, _ = run(spec_for(NextToken()), case(), plain).evaluated
    assert total / count == pytest.approx(float(nats / tokens), rel=1e-6)


class Coupled(SumObjective):
    """An objective that does not say that its loss is a sum over samples."""

    sums_over_samples = False


class Contrastive(SumObjective):
    """Replaces the sum over rows, and does not say again that it is one."""

    def head_loss(self, policy, x, batch):
        scores = policy.token_terms(x, batch)["log_probability"].sum(1)
        return Loss(jax.nn.logsumexp(scores), jnp.float32(1))


class Said(Contrastive):
    """Says it again."""

    sums_over_samples = True


class Bare(Objective):
    """An objective of a user that says nothing."""

    def head_loss(self, policy, x, batch):
        return Loss(x.sum(), jnp.float32(1))

    def faults(self, policy, staged):
        yield from ()


@pytest.mark.parametrize("objective", [Coupled(), Contrastive(), Bare()])
def test_once_is_refused_for_an_objective_that_does_not_say_so(objective):
    rules, _ = rules_and_mesh(Layout(2, data=2))
    name = type(objective).__name__
    why = reduction.obstacle(spec_for(objective), rules)
    assert name in why
    assert "sums_over_samples" in why
    assert not reduction.obstacle(spec_for(Said()), rules)
    assert not reduction.obstacle(spec_for(SumObjective()), rules)


class Headless(nnx.Module):
    """A model of a user with a loss of its own."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def loss(self, batch, key):
        return self.dense(batch["x"]).mean()


def test_a_user_model_is_an_objective_as_a_whole():
    spec = describe(lambda rngs: Headless(rngs))
    assert spec.objective == WholeModel()
    with pytest.raises(ConfigError, match="Headless needs embed"):
        build(spec.trained_for(SumObjective(), {}), case())


ROUTED = replace(
    MODEL,
    num_experts=4,
    experts_per_token=2,
    balance="sequence",
    balance_weight=0.1,
    router_z_loss=0.1,
)


@lru_cache
def routed_default() -> Result:
    return run(spec_for(NextToken(), ROUTED), case(), batch_of_pairs(), evaluates=False)


@lru_cache
def routed_pairs() -> Result:
    return run(spec_for(Preference(), ROUTED), case(), batch_of_pairs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        case({"data": 2, "expert": 2}, accumulation=2),
        pytest.param(
            case({"pipeline": 2, "context": 2}, microbatches=2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_of_routers_weigh_as_in_the_default_where_targets_are_counted(place):
    default = routed_default()
    found = run(
        spec_for(SumObjective(), ROUTED), place, batch_of_pairs(), evaluates=False
    )
    for metric in ("loss", "aux/balance", "aux/router_z_loss", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(
            float(default.metrics[metric]), rel=2e-5
        )
    assert default.metrics["aux/router_z_loss"] > 0.01
    assert worst(found.gradients, default.gradients) < 1e-4


@pytest.mark.slow
def test_losses_of_routers_weigh_as_in_the_default_where_pairs_are_counted():
    batch = batch_of_pairs()
    default = routed_default()
    found = routed_pairs()
    for term in ("aux/balance", "aux/router_z_loss"):
        wanted = pytest.approx(float(default.metrics[term]), rel=1e-5)
        assert found.metrics[term] == wanted
        total, count = found.evaluated[2][term]
        assert count == batch["weights"].sum()
        assert total / count == wanted
    # the loss of pairs, and its own aux terms, are those by the count of pairs
    total, count, others = found.evaluated
    assert count == 16
    assert found.metrics["loss"] == pytest.approx(float(total / count), rel=1e-5)
    total, count = others["aux/spread"]
    assert count == 16
    assert found.metrics["aux/spread"] == pytest.approx(float(total / count), rel=1e-5)
    # metrics are means over pairs, whatever the rows count
    total, count = others["margin"]
    assert count == 16
    assert found.metrics["margin"] == pytest.approx(float(total / count), rel=1e-5)


@pytest.mark.slow
def test_gradients_of_pairs_and_of_routers_are_divided_by_their_own_counts():
    """The gradient is linear in the aux terms' weights, and so is that of a default."""
    free = replace(ROUTED, balance="none", router_z_loss=0)

    def of_routers(whole, objective):
        spec = spec_for(objective, free)
        alone = run(spec, case(), batch_of_pairs(), evaluates=False)
        return jax.tree.map(np.subtract, whole.gradients, alone.gradients)

    ours = of_routers(routed_pairs(), Preference())
    assert worst(ours, of_routers(routed_default(), NextToken())) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            case({"data": 2, "expert": 2}, accumulation=2), marks=pytest.mark.slow
        ),
        # summed once: the loss of pairs above, routers in tests/step/test_experts_step.py
        pytest.param(
            case({"data": 2, "fsdp": 2}, accumulation=2, reduce="once"),
            marks=pytest.mark.slow,
        ),
        case({"pipeline": 2, "context": 2}, microbatches=2),
    ],
)
def test_layouts_agree_on_losses_of_routers_beside_pairs(place):
    spec = spec_for(Preference(), ROUTED)
    found = run(spec, place, batch_of_pairs(), evaluates=False)
    for metric in ("loss", "aux/balance", "aux/router_z_loss", "grad_norm"):
        assert found.metrics[metric] == pytest.approx(
            float(routed_pairs().metrics[metric]), rel=2e-5
        )
    assert worst(found.gradients, routed_pairs().gradients) < 1e-4


def test_losses_of_routers_are_refused_where_no_target_can_be_counted():
    batch = batch_of_pairs()
    with pytest.raises(
        ConfigError, match=r"aux terms \(balance, router_z_loss\): Bare divides"
    ):
        trace_step(spec_for(Bare(), ROUTED), batch)


def test_a_term_of_the_head_s_loss_is_refused_where_the_loss_is_another():
    model = replace(MODEL, z_loss=1e-4)
    build(spec_for(NextToken(), model), case())
    # a reference may have been trained with it
    build(spec_for(Preference(), MODEL, model), case())
    with pytest.raises(ConfigError, match="model.z_loss=0.0001 has no effect"):
        build(spec_for(Preference(), model), case())


@dataclass
class Mutable(TokenObjective):
    """A dataclass that is not frozen: it has no hash."""

    weight: float = 1.0

    def sample_loss(self, terms, sample):
        raise AssertionError("it is refused before")


def test_an_objective_that_may_change_is_refused():
    with pytest.raises(ConfigError, match="'Mutable'; make it a frozen dataclass"):
        spec_for(Mutable())


def test_modules_are_those_that_the_objective_names():
    spec = describe(lambda rngs: Transformer(TINY, rngs=rngs))
    with pytest.raises(ConfigError, match="'reference' is missing"):
        spec.trained_for(Preference(), {})
    with pytest.raises(ConfigError, match="'teacher' is unknown"):
        spec.trained_for(SumObjective(), {"teacher": spec})
    other = describe(lambda rngs: Headless(rngs))
    with pytest.raises(ConfigError, match="frozen module 'reference': Headless"):
        spec.trained_for(Preference(), {"reference": other})


class Misnamed(TokenObjective):
    """Prepares what the batch has already, or what is no field of tokens."""

    def __init__(self, name, dims):
        self.name = name
        self.dims = dims

    def prepare(self, modules, batch):
        return {self.name: jnp.zeros(self.dims)}

    def sample_loss(self, terms, sample):
        return Loss(terms["log_probability"].sum(), jnp.float32(1))


class Narrow(Transformer):
    """Gives terms in another dtype, or of rows where terms are of tokens."""

    def __init__(self, config, rngs, *, of_rows):
        super().__init__(config, rngs=rngs)
        self.of_rows = of_rows

    def token_terms(self, x, batch):
        terms = super().token_terms(x, batch)
        if self.of_rows:
            return {name: term.sum(1) for name, term in terms.items()}
        return {name: term.astype("bfloat16") for name, term in terms.items()}


def trace_step(spec, batch):
    built = build(spec, case())
    built.step.trace(built.abstract_state, built.abstract_batch(batch))


def test_terms_of_the_policy_are_float32_and_checked_as_those_of_a_module():
    seen = []

    class Seeing(SumObjective):
        def sample_loss(self, terms, sample):
            seen.append(terms["log_probability"].dtype)
            return super().sample_loss(terms, sample)

    policies = [
        describe(lambda rngs, of_rows=of_rows: Narrow(MODEL, rngs, of_rows=of_rows))
        for of_rows in (False, True)
    ]
    trace_step(policies[0].trained_for(Seeing(), {}), batch_of_pairs())
    assert {*seen} == {jnp.dtype("float32")}
    with pytest.raises(ConfigError, match=r"log_probability float32\[16\]: required"):
        trace_step(policies[1].trained_for(Seeing(), {}), batch_of_pairs())


def test_a_field_of_samples_before_the_tokens_is_not_taken_for_them():
    batch = batch_of_pairs() | {"answers": np.ones((16, 3), np.float32)}
    trace_step(spec_for(Preference()), batch)


class Measured(Transformer):
    """Has metrics that read a prepared field."""

    def metrics(self, batch):
        return {"reference": (batch["reference"] * batch["weights"]).sum()}


def test_metrics_may_read_prepared_fields():
    spec, batch = spec_for(Preference(), model_class=Measured), batch_of_pairs()
    trace_step(spec, batch)
    built = build(spec, case())
    found = built.evaluate.eval_shape(built.abstract_state, batch)
    assert "reference" in found[2]


@pytest.mark.parametrize(
    ("name", "dims", "text"),
    [
        ("weights", (16, 16), "prepare returned weights"),
        ("margin", (16, 4), r"margin float32\[16, 4\]"),
        ("margin", (16, 16, 2, 2), "required float"),
    ],
)
def test_prepared_fields_that_do_not_fit_are_refused(name, dims, text):
    built = build(spec_for(Misnamed(name, dims)), case())
    with pytest.raises(ConfigError, match=text):
        built.step.lower(built.abstract_state, built.abstract_batch(batch_of_pairs()))
