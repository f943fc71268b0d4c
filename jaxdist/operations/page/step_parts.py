"""What the time of a step goes to, as an estimate: from a row, and the profile's
operations or the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.operations.page.planned import Planned
from jaxdist.operations.page.summary import number
from jaxdist.telemetry.units import percent_text

AT_PEAK, COMPUTE = "model FLOPs at the chip's peak", "compute below the peak"
DATA, COMMUNICATION, BUBBLE, AGAIN = (
    "waiting for data",
    "exposed communication",
    "bubble",
    "recomputation",
)
_WHOLE = "compute"  # where the peak is not known
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
_CURES = {
    DATA: "more data.prefetch, or data.cache_dir on a disk of the machine",
    COMMUNICATION: "more sequences a device (batch.global_size), or another mesh: jaxdist plan --search",
    BUBBLE: "more pipeline.microbatches, or another pipeline.schedule",
    AGAIN: "a remat.policy that keeps more, if jaxdist plan finds room for it",
    COMPUTE: "more sequences a device (batch.global_size), precision.compute=bfloat16, or a look at the "
    "longest operations (profile.start_step)",
    _WHOLE: "a look at the longest operations (profile.start_step)",
}


@dataclass(frozen=True)
class StepParts:
    """Shares of a step's time, which add up to 1."""

    shares: Mapping[str, float]
    mfu: float | None
    has_profile: bool
    is_mixed: bool  # communication is not told from compute
    planned: Planned | None = None  # of the run as it is
    measured_to_planned: float | None = None  # step times

    def verdict(self, plan_command: str = "") -> str:
        """Returns what to look at first: "MFU 22 %; the largest part is bubble, 31 % of
        a step; try ...".

        Args:
          plan_command: that would tell communication from compute, where nothing does;
            "": none would.
        """
        share, name = max(
            (share, name) for name, share in self.shares.items() if name != AT_PEAK
        )
        mfu = (
            "unknown (this device's peak is)"
            if self.mfu is None
            else percent_text(self.mfu)
        )
        said = (
            f"{name}, with communication"
            if name in (COMPUTE, _WHOLE) and self.is_mixed
            else name
        )
        plan_first = (
            f"{plan_command}, which tells them apart, or "
            if said != name and plan_command
            else ""
        )
        line = (
            f"MFU {mfu}; the largest part is {said}, {percent_text(share)} of a step; "
        )
        line += f"try {plan_first}{_CURES[name]}"
        ratio = self.measured_to_planned
        return (
            line
            if ratio is None
            else f"{line}; the step takes {ratio:.2f} x what plan expects"
        )

    @property
    def source(self) -> str:
        """Says where the shares come from."""
        if self.planned and not self.has_profile:
            return f"an estimate from the last row; {COMMUNICATION} and {BUBBLE} {self.planned.source}"
        profile = (
            "operations of the profiled steps" if self.has_profile else "no profile"
        )
        return f"an estimate from the last row, {profile} and the pipeline's schedule"


def step_parts(
    row: Mapping[str, Any],
    info: Mapping[str, Any],
    ops: Sequence[Mapping[str, Any]],
    planned: Planned | None = None,
) -> StepParts | None:
    """Returns the parts of a step; None before the first row.

    Waiting for data is measured. Exposed communication is the share of collectives
    among the device's operations (on GPUs also where compute hides it); bubble the idle
    share of the schedule; without a profile both are the shares of the planned step, if
    there is a plan, in what is not waiting for data. Recomputation is what the program
    computes beyond the model's FLOPs, at the speed of the rest.

    Args:
      row: the last of metrics.jsonl.
      info: run.json.
      ops: of profile/top_ops.json; [] without a profile.
      planned: plan.json; it counts only if it has no fault.
    """
    planned = None if planned is None or planned.fault else planned
    step_s = number(row.get("step_time_s"))
    if not step_s or not 0 < step_s < float("inf"):
        return None
    left, shares = 1.0, {}

    def take(name: str, share_of_rest: float | None) -> None:
        nonlocal left
        if share_of_rest and share_of_rest > 0:
            # sums of rounded shares may exceed 1
            shares[name] = left * min(1.0, share_of_rest)
            left -= shares[name]

    # Batches that lead the row's steps are waited for, too.
    take(DATA, min(1.0, (number(row.get("data_wait_s")) or 0.0) / step_s))
    communication, bubble = (
        _of_profile(info, ops) if ops or planned is None else _of_plan(planned)
    )
    take(COMMUNICATION, communication)
    take(BUBBLE, bubble)
    mfu, full, hfu = (_share(row.get(name)) for name in ("mfu", "mfu_full", "hfu"))
    if full and hfu and hfu > full:
        take(AGAIN, 1 - full / hfu)
    if mfu is None:
        shares[_WHOLE] = left
    else:
        shares[AT_PEAK] = min(mfu, left)
        shares[COMPUTE] = left - shares[AT_PEAK]
    is_mixed = (
        not ops and planned is None and (number(info.get("num_devices")) or 1) > 1
    )
    # The first row has what a start does once.
    ratio = None if planned is None or row.get("step") == 1 else step_s / planned.step_s
    return StepParts(shares, mfu, bool(ops), is_mixed, planned, ratio)


def _of_profile(
    info: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]
) -> tuple[float | None, float | None]:
    """Returns the share of exposed communication, and of the bubble in what is left."""
    moved = sum(
        number(op["share"]) or 0.0 for op in ops if is_collective(str(op.get("kind")))
    )
    pipeline = info.get("pipeline")
    return moved, number(pipeline.get("bubble")) if isinstance(
        pipeline, Mapping
    ) else None


def _of_plan(planned: Planned) -> tuple[float, float]:
    """Returns as `_of_profile` does what of a planned step is in the open, and idle."""
    exposed = planned.share(COMMUNICATION)
    return exposed, planned.share(BUBBLE) / (1 - exposed) if exposed < 1 else 0.0


def is_collective(kind: str) -> bool:
    """Returns whether operations of this kind move data between devices."""
    return kind.removesuffix("-start").removesuffix("-done") in _COLLECTIVES


def _share(value: object) -> float | None:
    found = number(value)
    return found if found is not None and 0 < found < 10 else None
