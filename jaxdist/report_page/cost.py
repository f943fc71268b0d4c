"""What a run has cost so far, from its ledger and the price of a chip. No jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.telemetry import ledger

PRICE = "telemetry.price_per_chip_hour"
_OF_A_START = ("start", "join", "restore", "compile")  # buckets of which a restart has more


def cost(
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    lives: Sequence[ledger.Life],
    spent: ledger.Account,
    tokens_seen: float | None,
) -> dict[str, float] | None:
    """Returns what a run has cost, in the money of its price; None without a price or number of chips.

    Counted are the hours in which the run was alive, at the chips of its last start: a machine that waits for
    a restart is not in it.

    Args:
      config: flat.
      info: run.json.
      tokens_seen: or samples; None: not known.
    """
    price, chips = config.get(PRICE), info.get("num_chips")
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e9:
        return None
    if not isinstance(chips, int) or not 0 < chips < 2**31:
        return None
    per_s = price * chips / 3600
    again_s = sum(life.buckets.get(name, 0.0) for life in lives[1:] for name in _OF_A_START)
    so_far = per_s * (spent.wall_s - spent.buckets.get(ledger.DOWN, 0.0))
    known = {"so_far": so_far, "lost_to_restarts": per_s * (spent.buckets.get(ledger.LOST, 0.0) + again_s)}
    per_token = {"per_token": so_far / tokens_seen} if tokens_seen and tokens_seen >= 1 else {}
    return {"chips": chips, "price_per_chip_hour": price, **known, **per_token}


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
