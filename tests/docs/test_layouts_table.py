"""The table of docs/reference/mesh-axes.md is what its command prints."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

ROWS = 12
CHECKED = 6  # fsdp 8 at ZeRO 3, the default of large runs: a few seconds


def rows_of_page() -> list[str]:
    page = (ROOT / "docs/reference/mesh-axes.md").read_text()
    table = page.partition("## Memory of layouts")[2]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return lines[2:]


def printed(row: int) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    child = subprocess.run(
        [sys.executable, "benchmarks/plan/layouts.py", "--row", str(row)],
        cwd=ROOT,
        env=environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.splitlines()[-1]


def split(row: str) -> tuple[list[str], list[float]]:
    """Splits a row into layout, stage and policy, and its sizes in MB."""
    cells = [cell.strip() for cell in row.strip("| ").split("|")]
    return cells[:3], [float(cell) for cell in cells[3:]]


def assert_row(row: int) -> None:
    """Checks the names of a row, and its sizes within 2 %.

    The page has one column for arguments and donated bytes, because both are the state.
    """
    names, (state, temporary) = split(rows_of_page()[row])
    found_names, found = split(printed(row))
    assert found_names == names
    sizes = [state, state, temporary]
    assert found == pytest.approx(sizes, rel=0.02, abs=0.1)


def test_the_page_has_all_rows():
    assert len(rows_of_page()) == ROWS


@pytest.mark.slow
def test_a_row_of_the_page_is_what_its_command_prints():
    assert_row(CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted({*range(ROWS)} - {CHECKED}))
def test_every_row_of_the_page_is_what_its_command_prints(row):
    assert_row(row)
