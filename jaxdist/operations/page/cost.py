"""Cost of a run, from its ledger and the price of a chip. Needs no jax."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.operations.ledger import run_lives
from jaxdist.storage import untrusted

PRICE = "telemetry.price_per_chip_hour"
# buckets of the work at a start
_RESTART = ("start", "join", "restore", "compile")


def cost(
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    lives: Sequence[run_lives.Life],
    spent: run_lives.Account,
    tokens_seen: float | None,
) -> dict[str, float] | None:
    """Computes the cost of a run in the currency of its price.

    The cost is that of the lives, each with its number of chips. The time between two
    lives costs nothing. If a life has no number of chips, that of the last start
    counts.

    Args:
      config: values by dotted key.
      info: content of run.json.
      lives: lives of the run.
      spent: sum of the lives.
      tokens_seen: number of tokens or samples; None = unknown.

    Returns:
      The document of `jaxdist status --json`. None without a price, a number of chips
      or a ledger.
    """
    price = config.get(PRICE) or 0.0
    chips = info.get("num_chips") or 0
    if not untrusted.is_amount(price, 1e9) or not untrusted.is_count(chips, 2**31):
        return None
    if not price or not chips or not lives:
        return None
    chip_s = 0.0
    wasted_chip_s = 0.0
    alive_s = _alive_s(lives, spent)
    for life, alive, wasted in zip(lives, alive_s, _wasted_s(lives), strict=True):
        life_chips = life.chips or chips
        chip_s += life_chips * alive
        wasted_chip_s += life_chips * wasted
    so_far = price / 3600 * chip_s
    document = {
        "chips": chips,
        "price_per_chip_hour": price,
        "so_far": so_far,
        "lost_to_restarts": price / 3600 * wasted_chip_s,
    }
    if tokens_seen and tokens_seen >= 1:
        document["per_token"] = so_far / tokens_seen
    return document


def _alive_s(lives: Sequence[run_lives.Life], spent: run_lives.Account) -> list[float]:
    """Computes the seconds of each life; the last one may still be alive."""
    seconds = [life.seconds for life in lives]
    total_s = spent.wall_s - spent.buckets.get(run_lives.DOWN, 0.0)
    seconds[-1] = max(seconds[-1], total_s - sum(seconds[:-1]))
    return seconds


def _wasted_s(lives: Sequence[run_lives.Life]) -> list[float]:
    """Computes the seconds that each life wasted: repeated steps, and its start.

    The first start is not wasted, nor is a start that extends a finished run.
    """
    wasted = run_lives.lost_s(lives)
    for index, (previous, life) in enumerate(itertools.pairwise(lives), 1):
        if not previous.done:
            wasted[index] += sum(life.buckets.get(name, 0.0) for name in _RESTART)
    return wasted


def as_texts(cost: Mapping[str, float] | None, unit: str) -> dict[str, str]:
    """Formats the figures of a cost by their names; {} if the cost is unknown.

    Args:
      cost: document of the cost.
      unit: unit of the run, "tokens" or "samples".
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
