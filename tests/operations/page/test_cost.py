"""What a run has cost: hours alive, steps done again, starts; and what is no price."""

import json

import pytest

from jaxdist.operations.ledger import run_lives
from jaxdist.operations.ledger.run_lives import Life
from jaxdist.operations.page import cost, summary
from jaxdist.operations.page.status import as_text, read_status
from jaxdist.storage import run_format

PRICED = {cost.PRICE: 3.0}
EIGHT = {"num_chips": 8}


def lives_of() -> list[Life]:
    """Returns two lives: steps 1 to 100, killed; an hour down; steps 51 to 200."""
    first = Life(
        0.0,
        4000.0,
        first=0,
        step=100,
        buckets={"start": 300.0, "compile": 100.0, "step": 3600.0},
    )
    again = {
        "start": 200.0,
        "restore": 50.0,
        "compile": 50.0,
        "step": 5400.0,
        "save": 60.0,
    }
    return [
        first,
        Life(7600.0, 13_360.0, ended=True, first=50, step=200, buckets=again),
    ]


def test_a_cost_is_the_hours_alive_times_chips_times_the_price():
    lives = lives_of()
    spent = run_lives.account(lives)
    known = cost.cost(PRICED, EIGHT, lives, spent, 1e6)
    alive_s = 4000 + 5760
    assert spent.buckets["down"] == 3600
    assert spent.buckets["lost"] == 1800
    assert known["so_far"] == pytest.approx(alive_s / 3600 * 8 * 3)
    # Half of the first life's steps, and what the second start took before it trained.
    assert known["lost_to_restarts"] == pytest.approx((1800 + 300) / 3600 * 24)
    assert known["per_token"] == pytest.approx(known["so_far"] / 1e6)
    assert cost.as_texts(known, "tokens") == {
        "cost so far": "65.07",
        "cost of lost work and restarts": "14.00",
        "cost of a million tokens": "65.07",
    }


def test_each_life_costs_its_own_chips():
    """A run that an elastic restart put on half of its chips, whose last life
    goes on.
    """
    first, again = lives_of()
    first.chips, again.chips, again.ended = 16, 8, False
    now = again.written + 60
    spent = run_lives.account([first, again], now)
    known = cost.cost(PRICED, EIGHT, [first, again], spent, None)
    assert spent.wall_s == pytest.approx(4000 + 3600 + 5760 + 60)
    assert known["so_far"] == pytest.approx(3 / 3600 * (16 * 4000 + 8 * (5760 + 60)))
    assert known["lost_to_restarts"] == pytest.approx(3 / 3600 * (16 * 1800 + 8 * 300))


def test_an_extension_is_no_restart():
    first, again = lives_of()
    first.ended, again.first = True, 100
    assert first.done
    spent = run_lives.account([first, again])
    known = cost.cost(PRICED, EIGHT, [first, again], spent, None)
    assert spent.wall_s == 4000 + 5760
    assert known["lost_to_restarts"] == 0
    assert known["so_far"] == pytest.approx(3 / 3600 * 8 * (4000 + 5760))


@pytest.mark.parametrize(
    ("config", "info"),
    [
        ({}, EIGHT),
        ({cost.PRICE: 0.0}, EIGHT),
        ({cost.PRICE: "3"}, EIGHT),
        ({cost.PRICE: float("nan")}, EIGHT),
        ({cost.PRICE: float("inf")}, EIGHT),
        ({cost.PRICE: True}, EIGHT),
        (PRICED, {}),
        (PRICED, {"num_chips": 0}),
        (PRICED, {"num_chips": "8"}),
    ],
)
def test_without_a_price_or_chips_nothing_is_said(config, info):
    lives = lives_of()
    assert cost.cost(config, info, lives, run_lives.account(lives), 1e6) is None
    assert cost.as_texts(None, "tokens") == {}


def test_status_and_report_say_it(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(run_format.marked({"telemetry": {"price_per_chip_hour": 3.0}}))
    )
    (tmp_path / "run.json").write_text(json.dumps(run_format.marked(EIGHT)))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 200, "time": 13360.0, "tokens_seen": 1000000}\n'
    )
    lives = [vars(life) for life in lives_of()]
    (tmp_path / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": lives}))
    )
    document = read_status(tmp_path, now=20_000.0).document()
    assert document["cost"]["so_far"] == pytest.approx(65.0667, rel=1e-4)
    line = "cost      cost so far 65.07, cost of lost work and restarts 14.00, cost of a million tokens 65.07"
    assert line in as_text(document)
    figures = summary.figures(summary.read_run(tmp_path))
    assert figures["cost so far"] == "65.07"
    assert figures["cost of lost work and restarts"] == "14.00"
