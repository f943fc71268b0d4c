"""The hardware that the head of each shipped config names: the config fits there.

A head has commands such as `python -m jaxdist.plan --config NAME --on TARGET    # 15.6
GiB, MFU 43 %`. By default arithmetic checks them; slow tests compile them.
"""

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest

from jaxdist.planner import memory, targets
from jaxdist.planner.plan import plan_by_arithmetic
from jaxdist.trainer import cli
from support.compilers import ENVIRONMENT
from support.goldens import BASED, CONFIGS
from support.paths import ROOT

GIB = 2**30
COMPILER = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


class Claim(NamedTuple):
    """A command of a head, and what its comment says."""

    command: str
    gib: float
    mfu: float | None  # as a share; None on CPUs

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)[3:]

    @property
    def target(self) -> targets.Target:
        return targets.parse(self.words[self.words.index("--on") + 1])

    @property
    def run_words(self) -> list[str]:
        at = self.words.index("--on")
        return self.words[:at] + self.words[at + 2 :]


@functools.cache
def claims_of(name: str) -> list[Claim]:
    head = ast.get_docstring(ast.parse((ROOT / f"configs/{name}.py").read_text()))
    claims = []
    for line in map(str.strip, head.splitlines()):
        if line.startswith("python -m jaxdist.plan"):
            said = re.fullmatch(r"(.*\S) +# ([\d.]+) GiB(?:, MFU (\d+) %)?", line)
            assert said, f"configs/{name}.py: say GiB and MFU behind: {line}"
            mfu = said[3] and int(said[3]) / 100
            claims.append(Claim(said[1], float(said[2]), mfu))
    return claims


CLAIMS = [claim for name in CONFIGS for claim in claims_of(name)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_names_the_hardware_of_its_config(name):
    assert claims_of(name), f"configs/{name}.py: name its hardware by a plan command"
    for claim in claims_of(name):
        is_named = re.fullmatch(rf"{name}(:\w+)?", claim.words[1])
        assert claim.words[0] == "--config"
        assert is_named, claim.command
        assert (claim.mfu is None) == (claim.target.platform == "cpu")


def test_configs_without_a_size_of_their_own_are_the_ones_that_begin_with_weights():
    assert {"finetune"} <= BASED


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.command[23:])
def test_by_arithmetic_a_config_needs_what_its_head_says(claim):
    run = cli.parse(cli.ConfigParser("test", None), claim.run_words)[1]
    plan = plan_by_arithmetic(run, claim.target)
    assert claim.gib * GIB < plan.capacity_bytes
    accounted = memory.accounted_peak(plan.components) / GIB
    assert accounted == pytest.approx(claim.gib, rel=0.1, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.command[23:])
def test_by_the_compiler_a_config_needs_and_reaches_what_its_head_says(claim):
    compilers = COMPILER.get(claim.target.platform, ())
    if compilers and not any(map(importlib.util.find_spec, compilers)):
        pytest.skip(f"needs {' or '.join(compilers)}")
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    child = subprocess.run(
        [sys.executable, "-m", "jaxdist.plan", "--json", *claim.words],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    plan = json.loads(child.stdout)
    assert plan["fits"]
    peak = plan["memory"]["peak_bytes"] / GIB
    assert peak == pytest.approx(claim.gib, rel=0.05, abs=0.06)
    mfu = plan["time"]["mfu_causal"]
    if claim.mfu is not None:
        assert mfu == pytest.approx(claim.mfu, abs=0.03)
