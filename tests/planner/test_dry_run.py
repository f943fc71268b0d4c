"""The dry run: what it says of memory, and when."""

import jax
import pytest

from jaxdist.hardware import host
from jaxdist.planner import dry_run, show, targets
from jaxdist.planner.plan import plan_by_arithmetic
from jaxdist.trainer.run_config import RunConfig, default_config, from_config
from support.runs import TINY, run_of


@pytest.fixture(name="said")
def said_fixture(monkeypatch):
    """Returns a function that makes a dry run without its compilation."""
    monkeypatch.setattr(dry_run, "compile_step", lambda *_: None)
    monkeypatch.setattr(dry_run, "_compiled_sizes", lambda _: None)
    monkeypatch.setattr(dry_run, "_step_flops", lambda *_: None)

    def said(run: RunConfig, memory_bytes: int) -> list[str]:
        monkeypatch.setattr(host, "memory_bytes", lambda: memory_bytes)
        lines: list[str] = []
        dry_run.dry_run(run, jax.devices(), lines.append)
        return lines

    return said


def only(lines: list[str], text: str) -> int:
    """Returns the position of the only line with a text."""
    (position,) = [i for i, line in enumerate(lines) if text in line]
    return position


def test_a_run_that_cannot_fit_is_told_before_it_is_compiled(said):
    lines = said(run_of("quickstart", **TINY), 8 * 2**16)  # 64 KiB a device
    verdict = only(lines, "DOES NOT FIT: a device needs ")
    assert verdict < only(lines, "compiling the step for cpu")
    assert "each of 8 devices has 64.00 KiB of this machine's memory" in lines[verdict]
    assert "raise mesh.fsdp or batch.accumulation" in lines[verdict]
    assert not any("unknown" in line for line in lines)


def test_a_run_that_fits_is_told_how_much_it_takes_in_units(said):
    lines = said(run_of("quickstart", **TINY), 2**40)
    only(
        lines, "% of what there is: each of 8 devices has 128.00 GiB of this machine's"
    )
    together = lines[only(lines, "together")].split()
    assert together[-1] in ("KiB", "MiB")


def test_an_axis_that_splits_nothing_is_told_by_the_dry_run_and_by_plan(said):
    config = default_config("support.plain_flax_models:Plain")
    config.mesh.tensor = 2
    run = from_config(config)
    target = targets.parse(f"cpu:{len(jax.devices())}")
    with jax.numpy_rank_promotion("allow"):
        lines = said(run, 2**40)
        plan = plan_by_arithmetic(run, target)
    (warning,) = plan.warnings
    assert warning.startswith("mesh.tensor=2 splits no parameter")
    assert lines[only(lines, "warning:")] == f"warning: {warning}"
    text = show.as_text(plan.to_json())
    assert "warnings\n  - mesh.tensor=2 splits no parameter" in text


def test_a_high_rate_for_adapters_is_told(said):
    rate = {"lora.rank": 2, "optimizer.learning_rate": 0.01}
    lines = said(run_of("quickstart", **TINY, **rate), 2**40)
    only(lines, "warning: optimizer.learning_rate=0.01 is high for adapters")
