"""What a run has cost so far, from its ledger and the price of a chip. No jax."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.operations.ledger import run_lives

PRICE = "telemetry.price_per_chip_hour"
# buckets of which a restart has more
_OF_A_START = ("start", "join", "restore", "compile")


def cost(
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    lives: Sequence[run_lives.Life],
    spent: run_lives.Account,
    tokens_seen: float | None,
) -> dict[str, float] | None:
    """Returns what a run has cost, in the money of its price; None without a price, a
    number of chips or a ledger.

    Counted are the hours in which the run was alive, each life's at its chips (if its
    ledger does not say, at those of the last start): a machine that waits for a restart
    is not in it.

    Args:
      config: flat.
      info: run.json.
      tokens_seen: or samples; None: not known.
    """
    price, chips = config.get(PRICE), info.get("num_chips")
    if (
        isinstance(price, bool)
        or not isinstance(price, int | float)
        or not 0 < price < 1e9
    ):
        return None
    if not isinstance(chips, int) or not 0 < chips < 2**31 or not lives:
        return None
    of_lives = [life.chips or chips for life in lives]
    alive_s, wasted_s = _seconds(lives, spent)
    chip_s, wasted_chip_s = (
        sum(n * s for n, s in zip(of_lives, seconds, strict=True))
        for seconds in (alive_s, wasted_s)
    )
    so_far = price / 3600 * chip_s
    known = {"so_far": so_far, "lost_to_restarts": price / 3600 * wasted_chip_s}
    per_token = (
        {"per_token": so_far / tokens_seen} if tokens_seen and tokens_seen >= 1 else {}
    )
    return {"chips": chips, "price_per_chip_hour": price, **known, **per_token}


def _seconds(
    lives: Sequence[run_lives.Life], spent: run_lives.Account
) -> tuple[list[float], list[float]]:
    """Returns how long each life was alive, and how much of it was lost: steps done
    again, and the start.

    The first start is not lost, nor is one that extends a run which was done.
    """
    alive_s = spent.wall_s - spent.buckets.get(run_lives.DOWN, 0.0)
    *earlier, last = lives
    known = [life.seconds for life in earlier]
    wasted = run_lives.lost_s(lives)
    for index, (before, life) in enumerate(itertools.pairwise(lives), 1):
        if not before.done:
            wasted[index] += sum(life.buckets.get(name, 0.0) for name in _OF_A_START)
    return [*known, max(last.seconds, alive_s - sum(known))], wasted


def as_texts(cost: Mapping[str, float] | None, unit: str) -> dict[str, str]:
    """Returns a cost for people, by name; {} if it is not known.

    Args:
      unit: what the run counts, "tokens" or "samples".
    """
    if cost is None:
        return {}
    texts = {
        "cost so far": f"{cost['so_far']:,.2f}",
        "cost of lost work and restarts": f"{cost['lost_to_restarts']:,.2f}",
    }
    if "per_token" in cost:
        texts[f"cost of a million {unit}"] = f"{1e6 * cost['per_token']:,.4g}"
    return texts
