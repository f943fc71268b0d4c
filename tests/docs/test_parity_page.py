"""The page of parity says how many layouts the command compares, and the limits."""

import re

import pytest

from jaxdist.verification import cases
from jaxdist.verification.comparison import BANDS
from support.paths import ROOT
from support.runs import run_of

PAGE = (ROOT / "docs/explanation/parity.md").read_text()
# a column of the table -> the precisions whose limits it has
COLUMNS = {
    "float32": ["float32"],
    "bfloat16": ["bfloat16"],
    "float16": ["float16"],
    "8-bit floats": [name for name in BANDS if name.startswith("fp8")],
}


def test_the_page_has_as_many_layouts_as_the_command():
    run, _ = cases.shrink_config(run_of("quickstart"), 8)
    (said,) = re.findall(r"the command compares (\d+) layouts", PAGE)
    assert len(cases.layouts_for(run, 8)) == int(said)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("loss", "loss"),
        ("gradients", "gradient"),
        ("parameters", "parameter"),
        ("update", "update"),
    ],
)
def test_the_limits_of_the_page_are_those_of_the_command(row, field):
    (header,) = re.findall(r"^\| error \|(.*)\|$", PAGE, re.MULTILINE)
    assert [cell.strip() for cell in header.split("|")] == list(COLUMNS)
    assert {name for names in COLUMNS.values() for name in names} == BANDS.keys()
    (line,) = re.findall(rf"^\| {row} \|(.*)\|$", PAGE, re.MULTILINE)
    for cell, names in zip(line.split("|"), COLUMNS.values(), strict=True):
        assert {getattr(BANDS[name], field) for name in names} == {float(cell)}
