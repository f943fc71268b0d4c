"""A profile window traces the wanted steps of a real program and writes its table."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.config.groups.profile import ProfileConfig
from jaxdist.telemetry import profile

# jaxlib 0.12 on Python 3.12: its own type of event, made when first read; an error
# there aborts.
pytestmark = pytest.mark.filterwarnings(
    "ignore:builtin type .* has no __module__ attribute"
)


def scanned(weights_LDD, x_BD):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_BD, weights_LDD)[0]


def run(window, first, last):
    step = jax.jit(scanned)
    weights_LDD, x_BD = jnp.ones((5, 64, 64)) * 0.01, jnp.ones((32, 64))
    tables = {}
    window.step(first, x_BD)
    for finished in range(first + 1, last + 1):
        x_BD = step(weights_LDD, x_BD)
        tables[finished] = window.step(finished, x_BD)
    # as a run does before it ends: a trace holds what ran, not what was called
    x_BD.block_until_ready()
    return {step: table for step, table in tables.items() if table is not None}


def test_the_window_counts_exactly_its_steps(tmp_path):
    tables = run(profile.ProfileWindow(tmp_path, first_step=3, num_steps=2), 0, 6)
    assert list(tables) == [4]
    ops = tables[4]
    products = [
        op
        for op in ops
        if op.kind in ("dot", "ynn_fusion", "fusion") and op.count == 10
    ]
    assert products, f"5 layers x 2 steps must run a product 10 times: {ops}"
    assert all(op.kind != "while" for op in ops), "a loop's time is its body's time"
    assert abs(sum(op.share for op in ops) - 1) < 1e-6
    assert [op.seconds for op in ops] == sorted(
        (op.seconds for op in ops), reverse=True
    )
    saved = json.loads((tmp_path / "profile" / "top_ops.json").read_text())["ops"]
    assert saved[0]["op"] == ops[0].op
    assert saved[0]["count"] == ops[0].count
    assert (
        ops[0].op in (tmp_path / "profile" / "top_ops.txt").read_text().splitlines()[1]
    )


def test_no_profile_where_none_is_wanted(tmp_path):
    assert ProfileConfig().start_step == 0
    assert run(profile.ProfileWindow(tmp_path, 0, 3), 0, 3) == {}
    assert run(profile.ProfileWindow(tmp_path, 2, 2), 10, 13) == {}, (
        "resumed behind the window"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_inside_the_window_still_writes(tmp_path):
    window = profile.ProfileWindow(tmp_path, first_step=2, num_steps=100)
    assert run(window, 0, 3) == {}
    assert window.close()
    assert window.close() is None
    assert (tmp_path / "profile" / "top_ops.txt").exists()
