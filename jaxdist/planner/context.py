"""What attention over a split sequence adds to a plan: bytes, memory, the busiest
device, sizes to try.

Which form a run takes, and what it sends and holds, is said by `ops.context_costs`, as
in the run.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from jaxdist.ops import context_attention, context_costs
from jaxdist.ops.context_attention import Form
from jaxdist.ops.context_costs import Sizes
from jaxdist.parallel.axes import divisors
from jaxdist.parallel.context import AXIS, MOVED, AttentionForm
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.planner.communication import Collective
from jaxdist.planner.exchanges import summed
from jaxdist.planner.targets import Link
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import build, step_lines
from jaxdist.trainer.run_config import RunConfig

# Of what `plan` proposes: devices of a sequence at most, and the least tokens of it on
# a device.
MOST, LEAST_TOKENS = 64, 1024


class Attention:
    """The attention of a run's layers where the rules of a mesh split their sequences;
    none on others.
    """

    def __init__(self, run: RunConfig, rules: Rules, depth: int):
        self.run, self.rules, self.layers = run, rules, list[tuple[Sizes, Form, int]]()
        sizes = step_lines.attention_sizes(run) if rules.shape.sizes[AXIS] > 1 else None
        if sizes is None:
            return
        for window, count in _windows(run, depth).items():
            own = replace(sizes, window=window)
            self.layers.append((own, own.form(rules), count))

    @property
    def busiest(self) -> float:
        """Returns the attention of the device that has most to do, relative to the mean
        of all.
        """
        work = [(count * _span(own), form, own) for own, form, count in self.layers]
        most = math.fsum(
            w * (form.busiest if _all_seen(own) else 1.0) for w, form, own in work
        )
        return most / math.fsum(w for w, _, _ in work) if work else 1.0

    @property
    def by_parts(self) -> bool:
        """Returns whether kernels would have to know of parts of the sequence."""
        return any(form.parts > 1 for _, form, _ in self.layers)

    @property
    def keys(self) -> int:
        """Returns the bytes of keys and values that a layer holds of a sequence besides
        a device's own.
        """
        return int(
            max(
                (context_costs.cost(form, own).keys for own, form, _ in self.layers),
                default=0,
            )
        )

    def sent(self, passes: int) -> list[tuple[str, float]]:
        """Returns (kind of collective, bytes that a device sends) of a sequence in a
        step, all layers.

        Args:
          passes: forward ones, 2 where the backward pass computes them again.
        """
        totals = Counter[str]()
        for own, form, count in self.layers:
            one = context_costs.cost(form, own)
            totals[one.kind] += count * (passes * one.forward + one.backward)  # type: ignore[assignment]
        return list(totals.items())

    def seconds(self, passes: int, link: Link) -> float:
        """Returns the seconds of a sequence on the axis's link, nothing beside it."""
        return math.fsum(link.seconds(kind, sent) for kind, sent in self.sent(passes))

    def describe(self, collectives: Sequence[Collective]) -> dict[str, Any]:
        """Returns, as JSON, what a plan says of it: the form and why, its costs, and
        what moves.
        """
        if not self.layers:
            return {}
        moved = [name.replace("_", " ") for name in MOVED]
        return {
            "parts": self.rules.shape.sizes[AXIS],
            "why": step_lines.context_lines(self.run, self.rules),
            "busiest": self.busiest,
            "layers": [
                {"form": form.name, "count": count, "window": own.window}
                | context_costs.cost(form, own)._asdict()
                for own, form, count in self.layers
            ],
            "exchanged": summed(collectives, moved),
        }


def runs_to_try(run: RunConfig, spec: ModelSpec, shape: MeshShape) -> list[RunConfig]:
    """Returns the run with each form of attention that a search looks at on a mesh: its
    own first.

    Others only where it is left to us, they are legal, and attention is another than
    with those before.
    """
    if (
        run.context.attention != "auto"
        or shape.sizes[AXIS] == 1
        or not (sizes := step_lines.attention_sizes(run))
    ):
        return [run]
    found, seen = list[RunConfig](), list[list[str]]()
    for form in get_args(AttentionForm):
        one = replace(run, context=replace(run.context, attention=form))
        rules = build.rules_for(one, spec, shape)
        if any(context_attention.faults(rules, sizes.length, sizes.heads)):
            continue
        names = [
            replace(sizes, window=window).form(rules).name
            for window in _windows(run, spec.depth)
        ]
        if names not in seen:
            found.append(one)
            seen.append(names)
    return found


def unbeaten(
    runs: Sequence[RunConfig], cost: Callable[[RunConfig], tuple[float, int]]
) -> list[RunConfig]:
    """Returns the runs than which none before is as fast and holds as little; `cost`:
    seconds and bytes.
    """
    found, best = list[RunConfig](), list[tuple[float, int]]()
    for run in runs:
        seconds, held = cost(run)
        if all(seconds < other[0] or held < other[1] for other in best):
            found.append(run)
            best.append((seconds, held))
    return found


def _windows(run: RunConfig, depth: int) -> Counter[int]:
    """Returns how many layers have a window, by its size; 0 is none."""
    window = run.model.get("window") or 0
    pattern = run.model.get("layer_pattern") or ("global",)
    return Counter(
        window if pattern[layer % len(pattern)] == "local" else 0
        for layer in range(max(depth, 1))
    )


def _all_seen(own: Sizes) -> bool:
    return not 0 < own.window < own.length


def _span(own: Sizes) -> float:
    """Returns the keys that a query sees on average."""
    return (
        own.length / 2
        if _all_seen(own)
        else own.window - own.window**2 / (2 * own.length)
    )


def sizes_to_try(run: RunConfig, devices: int) -> list[int]:
    """Returns the sizes of the axis that a search looks at; its present one for what
    has no sequences.
    """
    if not run.data.is_text:
        return [max(run.mesh.context, 1)]
    length, own = run.batch.sequence_length, max(run.mesh.context, 1)
    sizes = divisors(math.gcd(devices, length))
    return [
        n for n in sizes if n in (1, own) or (n <= MOST and length // n >= LEAST_TOKENS)
    ]
