"""The dry run: what it says of memory, and when."""

import jax
import pytest

from jaxdist.hardware import host
from jaxdist.planner import dry_run
from jaxdist.trainer.run_config import RunConfig
from support.runs import TINY, run_of


@pytest.fixture(name="said")
def said_fixture(monkeypatch):
    """Returns a function that makes a dry run without its compilation."""
    monkeypatch.setattr(dry_run, "compile_step", lambda *_: None)
    monkeypatch.setattr(dry_run, "_compiler_lines", lambda *_: [])

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
    only(lines, "% of what there is: each of 8 devices has 128.00 GiB of this machine's")
    together = lines[only(lines, "together")].split()
    assert together[-1] in ("KiB", "MiB")
