"""What a kind of collective moves in a step, summed: for the parts of a plan that are
about one mesh axis.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from jaxdist.planner.communication import Collective


def summed(
    collectives: Sequence[Collective], of: Collection[str]
) -> list[dict[str, Any]]:
    """Returns, as JSON, the bytes and seconds of a step's collectives that move
    something of these names.
    """
    alike: defaultdict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for one in collectives:
        if one.what in of:
            alike[one.kind, one.axis, one.what].append(one)
    return [
        {
            "kind": kind,
            "axis": axis,
            "what": what,
            "bytes": sum(one.count * one.bytes for one in ones),
            "wire_bytes": math.fsum(one.count * one.wire_bytes for one in ones),
            "seconds": math.fsum(one.step_s for one in ones) or None,
        }
        for (kind, axis, what), ones in alike.items()
    ]
