"""Mixtures of experts on any mesh: `route` chooses experts, `experts` computes them."""

from jaxdist.ops.experts.costs import ExpertsCost, experts_cost
from jaxdist.ops.experts.mixture import Output, Stats, experts, explain
from jaxdist.ops.experts.routing import Routing, route

__all__ = [
    "ExpertsCost",
    "Output",
    "Routing",
    "Stats",
    "experts",
    "experts_cost",
    "explain",
    "route",
]
