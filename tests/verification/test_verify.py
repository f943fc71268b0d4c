"""`verify`: layouts that are equal are found equal, one that is not is found out."""

import dataclasses
import json
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import verify
from jaxdist.config import EXIT_CONFIG, ConfigError, files, schema
from jaxdist.models import experts
from jaxdist.ops.experts import route
from jaxdist.trainer import compose, exit_code, run_config, validation
from jaxdist.verification import cases, comparison, runner
from jaxdist.verification.comparison import BANDS, Observed, compare, rounding_alone

TARGET = f"{__name__}:"


class Bigram(nnx.Module):
    """A foreign model without logical names; with `mean` its loss depends on
    accumulation.
    """

    def __init__(self, width: int = 32, mean: bool = True, *, rngs: nnx.Rngs):
        self.mean = mean
        self.table = nnx.Param(jax.random.normal(rngs.params(), (256, width)))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (width, 256)))

    def loss(self, batch, key):
        logits = self.table[...][batch["tokens"]] @ self.head[...]
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], -1
        )
        total, count = (
            -(picked[..., 0] * batch["weights"]).sum(),
            batch["weights"].sum(),
        )
        return total / count if self.mean else (total, count)


class Summed(Bigram):
    """The same with sums alone; its table is looked up by index, whatever it is split
    over.
    """

    sums_over_samples = True

    def __init__(self, width: int = 32, *, rngs: nnx.Rngs):
        super().__init__(width, False, rngs=rngs)


class Narrow(Bigram):
    """The same with a Config that can be tiny, and with none of our options."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int = 32

        def tiny(self, sequence_length: int) -> dict[str, int]:
            return {"width": 16}

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config.width, rngs=rngs)


def quickstart(**changes) -> run_config.RunConfig:
    run = run_config.from_config(
        files.load("quickstart", folders=files.packaged_folders())
    )
    return compose.with_overrides(run, changes)


def command(capsys, *words: str) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr of the command, run in this process."""
    return exit_code.exit_code(lambda: verify.main(list(words))), *capsys.readouterr()


# --- what is verified -----------------------------------------------------------------


def test_shrinking_keeps_the_variants():
    run = quickstart(
        **{
            "model.dropout": 0.1,
            "model.bias": "qkv",
            "data.packing": "documents",
            "remat.layers": 3,
        }
    )
    small, lines = cases.shrink_config(run, 8)
    assert small.data.packing == "documents"
    changed = {
        change.path for change in schema.diff(*map(schema.to_config_dict, (run, small)))
    }
    changed -= {path for path in changed if path.startswith("data.")}  # nothing is read
    sizes = {f"model.{name}" for name in run.model_config.tiny(32)}
    others = {
        "batch.global_size",
        "batch.sequence_length",
        "optimizer.warmup_steps",
        "train.sample_tokens",
    }
    assert changed <= sizes | others | {"remat.layers"}
    assert "remat: layers 3 -> 0" in lines
    assert not small.remat.layers
    assert small.model["num_kv_heads"] == 4
    assert small.model["num_heads"] == 8
    assert small.model["qk_norm"] == "head"
    assert small.model["dropout"] == 0.1
    assert any("num_layers 4 -> 2" in line for line in lines)
    learned, _ = cases.shrink_config(
        quickstart(**{"model.positions": "learned", "model.max_positions": 128}), 8
    )
    # a sample would be too long
    validation.validate_on(compose.with_overrides(learned, cases.ONE_DEVICE), 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "small"), [(12, 12, 8), (12, 1, 1), (16, 8, 4)]
)
def test_kv_heads_keep_their_kind(heads, kv_heads, small):
    run = quickstart(**{"model.num_heads": heads, "model.num_kv_heads": kv_heads})
    assert cases.shrink_config(run, 8)[0].model["num_kv_heads"] == small


def test_the_matrix_of_layouts():
    names = list(cases.layouts_for(quickstart(), 8))
    assert names == [
        "data 8",
        "fsdp 8",
        "fsdp 8, zero 0",
        "fsdp 8, zero 1",
        "fsdp 8, zero 2",
        "fsdp 8, accumulation 4",
        "tensor 2 x fsdp 4",
        "tensor 2 x fsdp 4, sequence parallel",
        "2 slices x fsdp 4",
        "data 8, accumulation 4",
        "data 2 x fsdp 4, accumulation 4",
        "data 2 x fsdp 4, accumulation 4, zero 2",
        "data 2 x fsdp 4, accumulation 4, zero 1",
        "data 2 x fsdp 4, accumulation 4, zero 0",
        "data 2 x fsdp 2 x tensor 2",
        "pipeline 2 x data 4",
        "pipeline 4 x data 2, 2 chunks",
        "pipeline 2 x fsdp 2 x tensor 2",
        "pipeline 2 x data 2 x fsdp 2, accumulation 4",
        "pipeline 2 x data 2 x fsdp 2, accumulation 4, zero 2",
        "pipeline 2 x data 2 x fsdp 2, accumulation 4, zero 1",
        "pipeline 2 x data 2 x fsdp 2, accumulation 4, zero 0",
        "context 8",
        "context 8, gather",
        "context 8, ring",
        "fsdp 2 x context 2 x tensor 2",
        "pipeline 2 x data 2 x context 2",
        "tensor 8, 4 kv heads",
    ]
    own = quickstart(**{"mesh.tensor": 4, "batch.accumulation": 2})
    name, overrides = cases.layouts_for(own, 8).popitem()
    assert name == "the config's own: data 2 x tensor 4, accumulation 2"
    assert overrides["batch.accumulation"] == 2
    assert list(cases.layouts_for(quickstart(), 2))[-1] == ("tensor 2, 4 kv heads")


def test_the_config_s_own_pipeline_is_proved_small():
    own = {"mesh.pipeline": 4, "pipeline.schedule": "interleaved", "pipeline.chunks": 3}
    name, small = cases.layouts_for(
        quickstart(**own, **{"pipeline.microbatches": 64}), 8
    ).popitem()
    assert (
        name == "the config's own: pipeline 4 x data 2, schedule interleaved, chunks 3"
    )
    assert small["model.num_layers"] == 12
    assert small["pipeline.microbatches"] == 4
    # without stages it says nothing
    unused = quickstart(**{"pipeline.microbatches": 64, "mesh.data": 8})
    assert list(cases.layouts_for(unused, 8))[-1] == "tensor 8, 4 kv heads"


def test_layouts_set_no_options_that_a_model_lacks():
    run = run_config.from_config(run_config.default_config(f"{TARGET}Narrow"))
    small, _ = cases.shrink_config(run, 8)
    layouts = cases.layouts_for(small, 8)
    assert list(layouts)[-1] == "tensor 8"
    for overrides in layouts.values():
        layout = compose.with_overrides(small, cases.ONE_DEVICE | overrides)
        assert layout.model == {"target": f"{TARGET}Narrow", "width": 16}


def test_a_model_without_stages_has_no_pipeline_layouts():
    run = run_config.from_config(run_config.default_config(f"{TARGET}Bigram"))
    names = list(cases.layouts_for(run, 8))
    assert names[-1] == "tensor 8"
    assert not any("pipeline" in name for name in names)


def test_the_batch_is_unequal_and_the_same_each_time():
    run, _ = cases.shrink_config(quickstart(**{"data.packing": "documents"}), 8)
    batch, again = cases.synthetic_batch(run), cases.synthetic_batch(run)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)
    per_row = batch["weights"].sum(1)
    assert per_row.min() == 0
    assert len(set(per_row)) > 5
    assert set(np.unique(batch["segment_ids"])) == {0, 1, 2}
    assert not batch["weights"][batch["segment_ids"] == 0].any()
    starts = batch["positions"][np.diff(batch["segment_ids"], axis=1, prepend=0) == 1]
    assert starts.size
    assert not starts.any()


# --- comparing ------------------------------------------------------------------------


def observed(loss=2.0, gradient=1.0, parameter=1.0, initial=0.5) -> Observed:
    def leaf(value):
        return {"w": np.array([value, 1.0]), "idle": np.zeros(2)}

    start = {"w": np.array([0.5, 0.5]), "idle": np.zeros(2)}
    return Observed(
        loss, leaf(gradient), start, leaf(parameter), {"w": np.float32([initial, 1])}
    )


ONE = dict.fromkeys(BANDS, observed())


def test_equal_is_equal():
    result = compare("x", "float32", observed(), ONE, ())
    assert result.passed
    assert result.init_equal
    assert result.grad_error == 0


@pytest.mark.parametrize("precision", BANDS)
def test_the_numbers_of_a_row_stand_under_their_names(precision):
    result = compare("x", precision, observed(), dict.fromkeys(BANDS, observed()), ())
    row = comparison.row(result)
    assert precision in row
    header = comparison.HEADER
    assert row.index("identical") == header.index("init")
    assert row.index("equal") == header.index("verdict")


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": 2.00001},
        {"loss": math.nan},
        {"gradient": 1.0001},
        {"gradient": math.nan},
        {"parameter": 1.00001},
        {"parameter": math.nan},
        {"initial": np.nextafter(np.float32(0.5), np.float32(1))},
    ],
)
def test_every_error_alone_is_a_failure(wrong):
    result = compare("x", "float32", observed(**wrong), ONE, ())
    assert not result.passed
    assert "NOT EQUAL" in comparison.row(result)


def test_a_gradient_where_there_is_none_is_a_failure():
    seen = observed()
    seen.gradients["idle"][0] = 1e-9
    result = compare("x", "bfloat16", seen, ONE, ())
    assert not result.passed
    assert result.worst == "idle"
    assert compare("x", "bfloat16", seen, ONE, {"idle"}).passed


@pytest.mark.parametrize(
    ("gradient", "passes"),
    [(0.88, True), (0.84, False), (1.16, False), (math.nan, False)],
)
def test_a_model_that_answers_to_rounding_is_compared_by_its_distance_from_float32(
    gradient, passes
):
    """One device rounds 1 to 1.1: a layout may be as far from 1, but not much
    farther.
    """
    expected = {"float32": observed(), "bfloat16": observed(gradient=1.1)}
    result = compare("x", "bfloat16", observed(gradient=gradient), expected, ())
    assert result.grad_error > BANDS["bfloat16"].gradient or math.isnan(gradient)
    assert result.passed == result.by_rounding == passes
    assert comparison.row(result).endswith("equal *") == passes
    exact = {"float32": observed(gradient=1.1), "bfloat16": observed(gradient=1.1)}
    assert not compare("x", "bfloat16", observed(gradient=gradient), exact, ()).passed


def noisy_steps(sizes: dict[str, int], noise: dict[str, float], seed: int) -> tuple:
    """Makes gradients of ones, rounded independently by one device and by a layout.

    Args:
      sizes: numbers of each leaf.
      noise: of each leaf, what the layout's rounding errors are relative to one device's.
      seed: of the errors.
    """
    draws = np.random.default_rng(seed)

    def rounded(factors: dict[str, float]) -> dict[str, np.ndarray]:
        return {
            leaf: 1 + 0.02 * factors[leaf] * draws.standard_normal(size)
            for leaf, size in sizes.items()
        }

    exact = {leaf: np.ones(size) for leaf, size in sizes.items()}

    def step(gradients: dict[str, np.ndarray]) -> Observed:
        start = {leaf: np.zeros(size) for leaf, size in sizes.items()}
        return Observed(2.0, gradients, start, exact, np.float32(0.5))

    one_device = rounded(dict.fromkeys(sizes, 1.0))
    expected = {"float32": step(exact), "bfloat16": step(one_device)}
    return step(rounded(noise)), expected


def passes_by_rounding(
    sizes: dict[str, int], noise: dict[str, float], seed: int
) -> bool:
    layout, expected = noisy_steps(sizes, noise, seed)
    result = compare("x", "bfloat16", layout, expected, ())
    assert result.grad_error > BANDS["bfloat16"].gradient, "the band decides nothing"
    assert result.passed == result.by_rounding
    return result.passed


def test_independent_rounding_of_a_small_leaf_is_no_difference():
    """Sixteen numbers are a small sample: 1.25 alone would refuse one seed in six."""
    sizes = {"scale": 16, "kernel": 4096}
    same = dict.fromkeys(sizes, 1.0)
    assert all(passes_by_rounding(sizes, same, seed) for seed in range(100))
    ratios = []
    for seed in range(100):
        layout, expected = noisy_steps(sizes, same, seed)
        far, near = (
            np.linalg.norm(step.gradients["scale"] - 1)
            for step in (layout, expected["bfloat16"])
        )
        ratios.append(far / near)
    assert 5 < sum(ratio > comparison.ROUNDING_FACTOR for ratio in ratios) < 40


@pytest.mark.parametrize("noise", [1.4, 2.0])
def test_a_large_leaf_that_rounds_more_is_a_difference(noise):
    sizes = {"scale": 16, "kernel": 4096}
    worse = {"scale": 1.0, "kernel": noise}
    assert not any(passes_by_rounding(sizes, worse, seed) for seed in range(20))


def test_a_small_leaf_that_rounds_much_more_is_a_difference():
    sizes = {"scale": 16, "kernel": 4096}
    worse = {"scale": 6.0, "kernel": 1.0}
    assert not any(passes_by_rounding(sizes, worse, seed) for seed in range(20))


def test_many_small_leaves_that_round_more_are_a_difference():
    """Each alone could be a bad draw, all together cannot."""
    sizes = {f"scale {number}": 16 for number in range(64)}
    worse = dict.fromkeys(sizes, 1.5)
    assert not any(passes_by_rounding(sizes, worse, seed) for seed in range(20))


def test_leaves_of_rounding_alone_are_found():
    gradients = {
        "a": np.array([1.0]),
        "noise": np.array([1e-7]),
        "zero": np.array([0.0]),
    }
    assert rounding_alone(gradients) == {"noise"}


# --- experts --------------------------------------------------------------------------

EXPERTS = {
    "model.num_experts": 16,
    "model.experts_per_token": 2,
    "model.expert_d_ff": 96,
}


def with_experts(**changes) -> run_config.RunConfig:
    return cases.shrink_config(quickstart(**EXPERTS | changes), 8)[0]


def test_the_experts_of_each_token_are_drawn_or_left_to_the_routers():
    run = with_experts()
    batches = cases.batches(run, num_layers=5)
    chosen, given, skewed = (
        batches[name][experts.GIVEN_IDS] for name in ("chosen", "given", "skewed")
    )
    assert {ids.shape for ids in (chosen, given, skewed)} == {(32, 32, 5, 2)}
    assert (chosen == -1).all()
    assert (given[..., 0] != given[..., 1]).all()
    assert (skewed[..., 0] != skewed[..., 1]).all()
    E = run.model["num_experts"]
    assert np.bincount(given.ravel(), minlength=E).min() > 0.8 * given.size / E
    assert set(np.unique(skewed)) == set(range(E // 4))
    # tokens and layers differ
    assert len(np.unique(given.reshape(-1, 2), axis=0)) == E * (E - 1)
    assert list(cases.batches(quickstart(), num_layers=5)) == [""]
    whole = with_experts(**{"model.experts_per_token": 16})
    # all of them, of eight
    assert cases.batches(whole, 2)["skewed"][experts.GIVEN_IDS].shape[-1] == 8


def test_low_precision_and_uneven_loads_have_their_rows():
    run, layouts = with_experts(), cases.layouts_for(with_experts(), 8)
    rows = {
        (name, precision): cases.routings(run, precision, layout)
        for name, layout in layouts.items()
        for precision in BANDS
    }
    assert rows["fsdp 8", "float32"] == ("chosen",)
    assert rows["fsdp 8", "bfloat16"] == ("given",)
    assert rows["expert 8", "float32"] == ("chosen", "skewed")
    assert rows["pipeline 2 x expert 4", "bfloat16"] == ("given", "skewed")
    assert {name for (name, _), said in rows.items() if "skewed" in said} == {
        n for n in layouts if "expert" in n
    }
    assert cases.routings(quickstart(), "bfloat16", {"mesh.expert": 2}) == ("",)


def test_given_experts_are_taken_with_the_routers_weights():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 8))
    free = route(logits, 2)
    held = jnp.full((2, 3, 2), -1).at[0, 1].set(jnp.array([7, 4]))
    mixed = route(logits, 2, given=held)
    assert mixed.ids[0, 1].tolist() == [7, 4]
    scores = jax.nn.softmax(logits)[0, 1, jnp.array([7, 4])]
    np.testing.assert_allclose(mixed.weights[0, 1], scores / scores.sum(), rtol=1e-6)
    others = np.ones((2, 3), bool)
    others[0, 1] = False
    np.testing.assert_array_equal(mixed.ids[others], free.ids[others])
    np.testing.assert_array_equal(mixed.weights[others], free.weights[others])


@pytest.mark.parametrize(
    "wrong", [{"load": np.ones((2, 3))}, {"state": {"bias": np.array([1e-30])}}]
)
def test_an_expert_s_load_or_bias_that_differs_is_a_failure(wrong):
    right = observed()._replace(state={"bias": np.zeros(1)}, load=np.zeros((2, 3)))
    expected = dict.fromkeys(BANDS, right)
    assert compare("x", "float32", right, expected, (), routing="chosen").passed
    result = compare(
        "x", "float32", right._replace(**wrong), expected, (), routing="chosen"
    )
    assert not result.passed
    assert "loads differ" in comparison.row(result)
    held = dataclasses.replace(result, passed=True, load_equal=True, routing="given")
    assert comparison.row(held).endswith("equal, routing held fixed")


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["bias", "batch"])
def test_layouts_that_share_out_experts_are_equal(balance):
    """Packed documents, and local layers between global ones."""
    changes = {"model.balance": balance, "data.packing": "documents"}
    changes |= {"model.window": 8, "model.layer_pattern": ("local", "global")}
    report = runner.verify_layouts(
        quickstart(**EXPERTS | changes), jax.devices(), only="expert"
    )
    assert report.passed
    assert len(report.layouts) == 4 * 8
    assert not report.skipped
    assert {row.routing for row in report.layouts} == {"chosen", "given", "skewed"}
    assert all(
        row.grad_error < 2e-6 for row in report.layouts if row.precision == "float32"
    )


# --- the proof ------------------------------------------------------------------------


def test_the_command_finds_layouts_equal(capsys):
    assert len(jax.devices()) == 8
    words = ["--config", "quickstart", "--only", "sequence parallel", "--json"]
    code, out, err = command(capsys, *words, "--config.data.packing=documents")
    report = json.loads(out)
    assert code == 0
    assert report["passed"]
    rows = report["layouts"]
    assert [(r["layout"], r["precision"]) for r in rows] == [
        ("tensor 2 x fsdp 4, sequence parallel", precision)
        for precision in runner.PRECISIONS
    ]
    for found in rows:
        bands = BANDS[found["precision"]]
        assert found["passed"]
        assert found["init_equal"]
        assert found["loss_error"] <= bands.loss
        assert found["grad_error"] <= bands.gradient
        assert found["grad_error"] > 0  # two programs, not one compared with itself
        assert found["param_error"] <= bands.parameter
    assert report["reference"]["loss"]["float32"] > 1
    assert "d_model" in report["shrunk"][0]
    assert "tensor 2 x fsdp 4" in err  # progress goes beside the JSON


@pytest.mark.slow
def test_stages_are_compared_layer_by_layer():
    """Staged parameters, moments and gradients come back flat; a stage too many would
    show.
    """
    run = quickstart(**{"optimizer.name": "sgd"})
    report = runner.verify_layouts(
        run,
        jax.devices()[:2],
        precisions=["float32"],
        only="pipeline",
        log=lambda line: None,
    )
    (result,) = report.layouts
    assert result.layout == "pipeline 2 x data 1"
    assert result.passed
    assert result.grad_error > 0


def test_a_loss_that_depends_on_the_layout_is_found_out(capsys):
    target = f"--config.model.target={TARGET}Bigram"
    words = [
        "--config",
        "quickstart",
        target,
        "--precision",
        "float32",
        "--only",
        "fsdp 8",
    ]
    code, out, _ = command(capsys, *words)
    verdicts = {
        line[:40].strip(): line for line in out.splitlines() if " float32 " in line
    }
    assert code == 1
    assert "1 of 5 rows are NOT equal" in out
    assert "NOT EQUAL" in verdicts["fsdp 8, accumulation 4"]  # a mean of means
    assert verdicts["fsdp 8"].endswith("equal")
    assert "NOT" not in verdicts["fsdp 8"]
    right = [*words[:-1], "fsdp 8, accumulation", "--config.model.mean=false"]
    assert command(capsys, *right)[0] == 0


@pytest.mark.slow
def test_a_model_of_ones_own_that_says_that_it_sums_is_equal_where_replicas_add_up_on_their_own(
    capsys,
):
    """Zero 3 sums each part: the table that is looked up by index is split there."""
    target = f"--config.model.target={TARGET}Summed"
    words = [
        "--config",
        "quickstart",
        target,
        "--precision",
        "float32",
        "--only",
        "x fsdp 4, accumulation",
    ]
    code, out, _ = command(capsys, *words)
    assert code == 0
    assert "all 4 rows equal one device" in out


@pytest.mark.slow
def test_programs_are_let_go_after_their_row(monkeypatch):
    """Those of all layouts at once would take more memory maps than a process
    may have.
    """
    alive = weakref.WeakSet()
    held = []

    class Watched(runner.Program):
        def __init__(self, *parts):
            super().__init__(*parts)
            alive.add(self)

    def count(line):
        held.append(len(alive))

    monkeypatch.setattr(runner, "Program", Watched)
    run = dataclasses.replace(
        quickstart(), model={"target": f"{TARGET}Summed", "width": 32}
    )
    report = runner.verify_layouts(
        run, jax.devices(), precisions=["float32"], only="fsdp 8", log=count
    )
    assert len(report.layouts) == 5
    assert held[-1] == 2


@pytest.mark.slow
def test_a_wrong_kernel_of_one_layout_is_found_out(monkeypatch):
    """A sum over tensor shards that is left out, planted in the head's place."""
    original = compose.Composition.build_step

    def planted(composition, devices, **options):
        built = original(composition, devices, **options)
        if built.mesh.size == 1:
            return built

        def inspect(state, batch):
            return built.inspect(
                state, batch | {"weights": batch["weights"].at[1].set(0.0)}
            )

        return dataclasses.replace(built, inspect=jax.jit(inspect))

    monkeypatch.setattr(compose.Composition, "build_step", planted)
    run = quickstart(**{"optimizer.name": "sgd"})
    report = runner.verify_layouts(
        run,
        jax.devices()[:2],
        precisions=["float32"],
        only="data 2",
        log=lambda line: None,
    )
    (result,) = report.layouts
    assert not report.passed
    assert result.init_equal
    assert result.grad_error > 1e-3


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "1"], "--devices 1: must be >= 2"),
        (["--only", "nonsense"], "layouts here: data 8; fsdp 8"),
        (
            ["--devices", "2", "--config.optimizer.learning_rate=-1"],
            "optimizer.learning_rate",
        ),
        (
            [f"--config.model.target={TARGET}Bigram", "--config.model.width=10000"],
            "cannot be shrunk",
        ),
    ],
)
def test_errors_name_the_cure(capsys, words, said):
    code, _, err = command(capsys, "--config", "quickstart", *words)
    assert code == EXIT_CONFIG
    assert said in err


def test_a_layout_is_named_with_its_axes_in_any_order():
    run = quickstart()
    known = runner.cases.layouts_for(run, 8, None)
    given = runner.UserInputs()
    for only in ("tensor 2 x fsdp 4", "fsdp 4 x tensor 2"):
        selected = runner._select_layouts(run, 8, only, given)
        assert "tensor 2 x fsdp 4" in selected
    swapped = "fsdp 4 x tensor 2, sequence parallel"
    (selected,) = runner._select_layouts(run, 8, swapped, given)
    assert selected == "tensor 2 x fsdp 4, sequence parallel"
    assert selected in known
    with pytest.raises(ConfigError, match="there is one device, and layouts need two"):
        runner._select_layouts(run, 1, "", given)


def test_layouts_that_cannot_be_are_named():
    run = quickstart(**{"mesh.tensor": 16, "mesh.data": 1})
    with pytest.raises(ConfigError, match="own: tensor 16 is illegal"):
        runner.verify_layouts(
            run,
            jax.devices(),
            precisions=["float32"],
            only="own",
            log=lambda line: None,
        )


GPT2 = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 6e-4,
    "model.num_kv_heads": 4,
    "model.positions": "learned",
    "model.max_positions": 128,
    "model.norm": "layer",
    "model.activation": "gelu",
    "model.gated": False,
    "model.bias": "all",
    "model.qk_norm": "none",
    "model.tie_embeddings": True,
    "model.dropout": 0.1,
}
QWEN2 = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 6e-4,
    "model.bias": "qkv",
    "model.qk_norm": "none",
    "model.tie_embeddings": True,
    "model.z_loss": 1e-4,
    "data.packing": "documents",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, GPT2, QWEN2], ids=["quickstart", "gpt2", "qwen2"]
)
def test_the_whole_matrix(changes):
    report = runner.verify_layouts(quickstart(**changes), jax.devices())
    assert report.passed
    assert len(report.layouts) == 56
    assert not report.skipped
