"""The page of parity says how many layouts its command compares."""

import re

from jaxdist.verification import cases
from support.paths import ROOT
from support.runs import run_of


def test_the_page_has_as_many_layouts_as_the_command():
    run, _ = cases.shrink_config(run_of("quickstart"), 8)
    page = (ROOT / "docs/explanation/parity.md").read_text()
    (said,) = re.findall(r"The command now compares (\d+) layouts", page)
    assert len(cases.layouts_for(run, 8)) == int(said)
