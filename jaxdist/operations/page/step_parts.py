"""Parts of a step's time, estimated from a row and from the profile or the plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.operations.page.planned import Planned, read_plan
from jaxdist.operations.page.run_files import RunFiles, fields, finite, number
from jaxdist.telemetry.units import percent_text

AT_PEAK = "model FLOPs at the chip's peak"
COMPUTE = "compute below the peak"
DATA = "waiting for data"
COMMUNICATION = "exposed communication"
BUBBLE = "bubble"
AGAIN = "recomputation"
_WHOLE = "compute"  # stands for AT_PEAK and COMPUTE if the peak is unknown
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
_ADVICE = {
    DATA: "more data.prefetch, or data.cache_dir on a disk of the machine",
    COMMUNICATION: "more sequences a device (batch.global_size), or another mesh: jaxdist plan --search",
    BUBBLE: "more pipeline.microbatches, or another pipeline.schedule",
    AGAIN: "a remat.policy that keeps more, if jaxdist plan finds room for it",
    COMPUTE: "more sequences a device (batch.global_size), precision.compute=bfloat16, or a look at the "
    "longest operations (profile.start_step)",
    _WHOLE: "a look at the longest operations (profile.start_step)",
}
# Devices of one CPU share its cores, which are no faster in bfloat16.
_CPU_ADVICE = {
    COMMUNICATION: "fewer emulated devices: they share the cores of this machine",
    COMPUTE: "a look at the longest operations (profile.start_step)",
}


@dataclass(frozen=True)
class StepParts:
    """Parts of a step's time."""

    shares: Mapping[str, float]  # share of each part; they add up to 1
    mfu: float | None
    has_profile: bool
    is_mixed: bool  # shares of compute contain communication
    planned: Planned | None = None  # the plan, if it is one of this run
    measured_to_planned: float | None = None  # ratio of step times
    on_cpu: bool = False

    def verdict(self, plan_command: str = "") -> str:
        """Describes the largest part and its fix.

        Args:
          plan_command: command that separates communication from compute; "" = none.

        Returns:
          Such as "MFU 22 %; the largest part is bubble, 31 % of a step; try ...".
        """
        share, part = max(
            (share, part) for part, share in self.shares.items() if part != AT_PEAK
        )
        mfu = "unknown (this device's peak is)"
        if self.mfu is not None:
            mfu = percent_text(self.mfu)
        advice = _ADVICE[part]
        if self.on_cpu:
            advice = _CPU_ADVICE.get(part, advice)
        if self.is_mixed and part in (COMPUTE, _WHOLE):
            part += ", with communication"
            if plan_command:
                advice = f"{plan_command}, which separates them, or {advice}"
        text = (
            f"MFU {mfu}; the largest part is {part}, {percent_text(share)} of a step; "
            f"try {advice}"
        )
        if self.measured_to_planned is not None:
            ratio = self.measured_to_planned
            text += f"; the step takes {ratio:.2f} x what plan expects"
        return text

    @property
    def source(self) -> str:
        """A text about the source of the shares."""
        if self.planned and not self.has_profile:
            return (
                f"an estimate from the last row; {COMMUNICATION} and {BUBBLE} "
                f"{self.planned.source}"
            )
        profile = "no profile"
        if self.has_profile:
            profile = "operations of the profiled steps"
        return f"an estimate from the last row, {profile} and the pipeline's schedule"


def of_run(run: RunFiles) -> tuple[StepParts | None, Planned | None]:
    """Estimates the parts of a run's last step, and reads the plan in its folder."""
    plan = read_plan(run)
    return step_parts(run.last_row, run.info, run.operations, plan), plan


def step_parts(
    row: Mapping[str, Any],
    info: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]],
    planned: Planned | None = None,
) -> StepParts | None:
    """Estimates the parts of a step.

    The wait for data is measured. Exposed communication is the share of collectives
    among the device's operations; on GPUs it includes communication that compute hides.
    The bubble is the idle share of the schedule. Without a profile, both come from the
    plan, as shares of the time without the wait for data. Recomputation is the excess
    of the program's FLOPs over the model's, at the speed of all compute.

    Args:
      row: the last row of metrics.jsonl.
      info: content of run.json.
      operations: rows of profile/top_ops.json; [] without a profile.
      planned: content of plan.json; ignored if it has a fault.

    Returns:
      The parts; None if there is no row yet.
    """
    if planned is not None and planned.fault:
        planned = None
    step_s = finite(row.get("step_time_s"))
    if step_s is None or step_s <= 0:
        return None
    remaining = 1.0
    shares: dict[str, float] = {}
    for part, share_of_remaining in _portions(row, info, operations, planned):
        if share_of_remaining and share_of_remaining > 0:
            # sums of rounded shares may exceed 1
            shares[part] = remaining * min(1.0, share_of_remaining)
            remaining -= shares[part]
    mfu = _share(row.get("mfu"))
    if mfu is None:
        shares[_WHOLE] = remaining
    else:
        shares[AT_PEAK] = min(mfu, remaining)
        shares[COMPUTE] = remaining - shares[AT_PEAK]
    ratio = None
    # the first step includes the work of a start
    if planned is not None and row.get("step") != 1:
        ratio = step_s / planned.step_s
    is_separated = bool(operations) or planned is not None
    has_several_devices = (number(info.get("num_devices")) or 1) > 1
    return StepParts(
        shares=shares,
        mfu=mfu,
        has_profile=bool(operations),
        is_mixed=has_several_devices and not is_separated,
        planned=planned,
        measured_to_planned=ratio,
        on_cpu=info.get("device_kind") == "cpu",
    )


def _portions(
    row: Mapping[str, Any],
    info: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]],
    planned: Planned | None,
) -> Iterator[tuple[str, float | None]]:
    """Yields (part, its share of the time that the previous parts leave)."""
    # may exceed 1: the wait includes batches for steps after the row's
    yield DATA, (number(row.get("data_wait_s")) or 0.0) / row["step_time_s"]
    if operations or planned is None:
        yield (
            COMMUNICATION,
            sum(
                number(operation["share"]) or 0.0
                for operation in operations
                if is_collective(str(operation.get("kind")))
            ),
        )
        yield BUBBLE, number(fields(info, "pipeline").get("bubble"))
    else:
        exposed = planned.share(COMMUNICATION)
        yield COMMUNICATION, exposed
        if exposed < 1:
            yield BUBBLE, planned.share(BUBBLE) / (1 - exposed)
    full = _share(row.get("mfu_full"))
    hfu = _share(row.get("hfu"))
    if full and hfu and hfu > full:
        yield AGAIN, 1 - full / hfu


def is_collective(kind: str) -> bool:
    """Checks if operations of this kind move data between devices."""
    return kind.removesuffix("-start").removesuffix("-done") in _COLLECTIVES


def _share(value: object) -> float | None:
    share = number(value)
    if share is None or not 0 < share < 10:
        return None
    return share
