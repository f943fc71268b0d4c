"""What ops declare, beside what a traced block keeps and what MFU counts."""

from dataclasses import dataclass

import jax
import pytest
from flax import nnx

from jaxdist.ops.costs import Cost, Product
from jaxdist.ops.experts import experts_cost
from jaxdist.parallel import remat
from jaxdist.planner import compiled_step, memory, on_target, plan, targets
from jaxdist.planner.compiler import Compiled
from jaxdist.trainer import costs, model_flops, run_config, step_lines
from support.runs import run_of

KEPT = ("query", "key", "value", remat.PROJECTED, "mlp_gate", "mlp_up")


@pytest.mark.parametrize("name", ["llama3_8b:tiny", "gpt2_124m:tiny"])
def test_a_block_keeps_what_its_ops_declare(name):
    changes = {"mesh.data": 1, "remat.policy": f"save:{','.join(KEPT)}"}
    run, target = run_of(name, **changes), targets.parse("cpu:1")
    composed = on_target.validate_for(run, target)
    found = memory.components(composed, target)
    tokens = run.batch.global_size * run.batch.sequence_length
    tokens //= run.batch.accumulation
    declared = {}
    for cost in costs.costs_of(run):
        for product in cost.products:
            size = cost.layers * product.size * tokens * costs.itemsize_of(run)
            declared[product.makes] = declared.get(product.makes, 0) + size
    kept = [made for made in KEPT if made in declared]
    assert len(kept) >= 5
    for made in kept:
        assert found[f"saved: {made}"] == declared[made], made


def test_experts_declare_what_one_token_uses():
    run = run_of("mixtral_8x7b:tiny")
    (experts,) = (one for one in costs.costs_of(run) if one.active_share < 1)
    config = run.model_config
    assert experts.active_share == config.experts_per_token / config.num_experts
    again = [product for product in experts.products if product.always_again]
    assert {product.makes for product in again} == {remat.EXPERT_PRODUCTS}
    assert experts.spare_rows("gpu") > 0 == experts.spare_rows("tpu")


def test_a_model_that_declares_nothing_is_listed_and_counted():
    assert not costs.undeclared_lines(run_of("quickstart"))
    run = run_of("vit_digits")
    (line,) = costs.undeclared_lines(run)
    assert "VisionTransformer declares none" in line
    assert costs.costs_of(run) == []
    spec = on_target.validate_for(run, targets.parse("cpu:1")).spec
    found = model_flops.model_flops(run, spec)
    assert found["causal"] == found["full"] > 0


class Mixture(nnx.Module):
    """A model of a user's, with experts and without costs."""

    def __init__(self, num_experts: int = 8, experts_per_token: int = 2, *, rngs):
        values = jax.random.normal(rngs.params(), (num_experts, 16, 16))
        self.up = nnx.Param(values, logical=("experts", "d_model", "d_ff"))

    def loss(self, batch, key):
        return self.up[...].sum(), batch["weights"].sum()


class DeclaredMixture(Mixture):
    """The same, whose Config declares what a token uses."""

    @dataclass(frozen=True)
    class Config:
        def costs(self, sequence_length: int) -> list[Cost]:
            return [
                experts_cost(
                    layers=1,
                    experts=8,
                    chosen=2,
                    width=16,
                    hidden=16,
                    gated=False,
                )
            ]

    def __init__(self, config, *, rngs):
        super().__init__(rngs=rngs)


def test_experts_of_which_no_cost_declares_a_share_are_all_counted_and_a_line_says_so():
    def counts(model: type) -> str:
        config = run_config.default_config(f"{__name__}:{model.__name__}")
        run = run_config.from_config(config)
        composition = on_target.validate_for(run, targets.parse("cpu:1"))
        return step_lines.counts(composition)

    assert "; all experts are counted as active for a token" in counts(Mixture)
    declared = counts(DeclaredMixture)
    assert declared.endswith(f", {2 * 16 * 16} active for a token")
    dense = on_target.validate_for(run_of("quickstart"), targets.parse("cpu:1"))
    assert "active" not in step_lines.counts(dense)


def test_a_plan_says_that_all_experts_are_counted():
    compiled = Compiled(
        argument_bytes=1,
        output_bytes=1,
        alias_bytes=1,
        temp_bytes=1,
        peak_bytes=1,
        host_argument_bytes=0,
        host_temp_bytes=0,
        hlo="",
        mesh_ids=(0,),
    )

    def notes(model: type) -> str:
        config = run_config.default_config(f"{__name__}:{model.__name__}")
        run = run_config.from_config(config)
        made = plan.plan_by_arithmetic(run, targets.parse("cpu:1"))
        return "\n".join(compiled_step.with_compiled(made, compiled).warnings)

    assert "all experts are counted as active" in notes(Mixture)
    assert "experts" not in notes(DeclaredMixture)


def test_mfu_sums_what_a_config_declares(monkeypatch):
    @dataclass(frozen=True)
    class Fused(Cost):
        def fused_flops(self, convention):
            return {"causal": 1.0, "full": 2.0}[convention]

    declared = [
        Cost(name="a", layers=2, products=(Product(3, 5), Product(5, 7))),
        Fused(name="b"),
    ]
    run = run_of("quickstart")
    spec = on_target.validate_for(run, targets.parse("cpu:1")).spec
    monkeypatch.setattr(model_flops, "costs_of", lambda run: declared)
    found = model_flops.model_flops(run, spec)
    assert found == {"causal": 6 * 2 * 50 + 1, "full": 6 * 2 * 50 + 2}
