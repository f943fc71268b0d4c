"""Which products of a run are in 8-bit floats, on which chips, and what is
said of it.
"""

from functools import partial
from types import SimpleNamespace

import jax
import pytest

from jaxdist.config import ConfigError, schema
from jaxdist.hardware.chips import CHIPS
from jaxdist.parallel.formats.fp8 import FP8
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.step.step_config import StepConfig
from jaxdist.trainer import compose, product_formats, run_config
from support.models import TINY, batch_of, step_of

LARGE = {
    "model.num_layers": 2,
    "model.d_model": 4096,
    "model.d_ff": 14336,
    "model.num_heads": 32,
    "model.num_kv_heads": 8,
    "model.head_dim": 128,
    "precision.compute": "bfloat16",
}


def run_of(matmul: str = "fp8_rowwise", **changes) -> run_config.RunConfig:
    config = run_config.default_config()
    config.update_from_flattened_dict(LARGE | {"precision.matmul": matmul} | changes)
    return run_config.from_config(config)


def device(kind: str, platform: str) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform=platform)


H100 = device("NVIDIA H100 80GB HBM3", "gpu")


def faults(run: run_config.RunConfig, on: SimpleNamespace) -> list[str]:
    sample = partial(compose.batch_shapes, run, 1)
    return list(product_formats.faults(run, compose.model_spec(run), on, sample))


def test_a_table_says_which_kernels_and_why_not_the_others():
    run = run_of()
    spec = compose.model_spec(run)
    table = product_formats.table(run.precision.recipe, spec)
    parts = {path.removeprefix("blocks/"): why for path, why in table.items()}
    taken = {"attention/query", "attention/out", "mlp/gate", "mlp/up", "mlp/down"}
    assert {path for path, why in parts.items() if not why} == taken
    assert (
        parts["attention/key"]
        == parts["attention/value"]
        == "4096 x 1024: too small to gain"
    )
    assert parts["embedding"] == "rows of a table are looked up"
    assert parts["output"] == "scores of the vocabulary"
    first, speed = product_formats.lines(
        run, spec, H100, partial(compose.batch_shapes, run, 1)
    )
    assert "% of the forward matmuls' FLOPs" in first
    assert "attention/key, blocks/attention/value" in first
    assert "1978.9 TFLOP/s" in speed
    assert "989.4" in speed
    # 2 of the 4096 x 1024 kernels, the output layer of 256 and the attention itself are
    # all that is left.
    share = product_formats.share(run, spec, partial(compose.batch_shapes, run, 1))
    kernels = 2 * 4096 * 4096 + 3 * 4096 * 14336
    rest = 2 * 4096 * 1024 + 4096 * 256 / 2 + 2 * 4096 * run.batch.sequence_length
    assert share == pytest.approx(kernels / (kernels + rest), rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("TPU v5 lite", "1.58 times"),
        ("TPU v5", "1.14 times"),
        ("TPU v6 lite", "1.77 times"),
        ("TPU7x", "nobody has measured"),
        ("NVIDIA A100-SXM4-80GB", "no units for 8-bit floats"),
        ("Tesla T4", "65 TFLOP/s"),
    ],
)
def test_chips_that_gain_nothing_are_refused_with_the_number(kind, said):
    (fault,) = faults(
        run_of(), device(kind, "tpu" if kind.startswith("TPU") else "gpu")
    )
    assert said in fault
    assert "precision.matmul=fp8_rowwise" in fault
    assert "set precision.matmul=compute" in fault
    assert not faults(run_of("compute"), device(kind, "tpu"))


def test_chips_that_gain():
    assert {chip.name for chip in CHIPS if FP8.gain(chip)} == {
        "H100 SXM",
        "H100 PCIe",
        "H100 NVL",
        "H200",
        "H200 NVL",
        "B200",
        "GB200",
        "RTX 4090",
        "L4",
    }
    assert not faults(run_of(), H100)


def test_models_without_such_products_are_refused():
    (fault,) = faults(run_of(**{"model.d_model": 256, "model.d_ff": 512}), H100)
    assert "too small to gain" in fault
    assert "jaxdist.ops.matmul.project" in fault
    assert "or precision.fp8_small_kernels=true" in fault
    odd = {"model.d_model": 24, "model.d_ff": 40, "model.head_dim": 6}
    (fault,) = faults(run_of(**odd), H100)
    assert "not multiples of 16" in fault
    assert "fp8_small_kernels" not in fault
    small = run_of(
        **{"model.d_model": 256, "model.d_ff": 512, "precision.fp8_small_kernels": True}
    )
    assert not faults(small, H100)


def test_activations_between_them_are_bfloat16():
    with pytest.raises(ConfigError, match=r"set precision\.compute=bfloat16"):
        if found := schema.faults(run_of(**{"precision.compute": "float32"})):
            raise ConfigError(found)
    with pytest.raises(ConfigError, match=r"set precision\.matmul"):
        if found := schema.faults(
            run_of("compute", **{"precision.fp8_small_kernels": True})
        ):
            raise ConfigError(found)


def test_off_or_for_small_kernels_the_program_is_what_it_was():
    def lowered(**changes) -> str:
        step = StepConfig(compute="bfloat16", recipe=PrecisionConfig(**changes).recipe)
        built = step_of(model=TINY, step=step)
        return built.step.lower(
            built.abstract_state, built.abstract_batch(batch_of())
        ).as_text()

    default = lowered()
    assert "f8E4M3" not in default
    assert default == lowered(matmul="fp8_rowwise")  # none is large enough
    eight = lowered(matmul="fp8_rowwise", fp8_small_kernels=True)
    assert "f8E4M3" in eight


def test_remat_keeps_products_with_their_scales():
    def products(**changes) -> int:
        step = StepConfig(compute="bfloat16", recipe=PrecisionConfig(**changes).recipe)
        built = step_of(model=TINY, step=step)
        arguments = built.abstract_state, built.abstract_batch(batch_of())
        return str(jax.make_jaxpr(built.inspect)(*arguments)).count("dot_general[")

    # Forward, and two a kernel backward: nothing is multiplied twice. Gradients of
    # inputs are one product.
    assert products(matmul="fp8_rowwise", fp8_small_kernels=True) == products() - 3
