"""What the time of a step goes to, as an estimate: from a row, the profile's operations and the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.report_page.summary import number
from jaxdist.telemetry.units import percent_text

AT_PEAK, COMPUTE = "model FLOPs at the chip's peak", "compute below the peak"
DATA, COMMUNICATION, BUBBLE, AGAIN = "waiting for data", "exposed communication", "bubble", "recomputation"
_WHOLE = "compute"  # where the peak is not known
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast", "send", "recv",
)  # fmt: skip
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

    def verdict(self) -> str:
        """Returns what to look at first: "MFU 22 %; the largest part is bubble, 31 % of a step; try ..."."""
        share, name = max((share, name) for name, share in self.shares.items() if name != AT_PEAK)
        mfu = "unknown (this device's peak is)" if self.mfu is None else percent_text(self.mfu)
        said = f"{name}, with communication" if name in (COMPUTE, _WHOLE) and self.is_mixed else name
        return f"MFU {mfu}; the largest part is {said}, {percent_text(share)} of a step; try {_CURES[name]}"

    @property
    def source(self) -> str:
        """Says where the shares come from."""
        profile = "operations of the profiled steps" if self.has_profile else "no profile"
        return f"an estimate from the last row, {profile} and the pipeline's schedule"


def step_parts(
    row: Mapping[str, Any], info: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]
) -> StepParts | None:
    """Returns the parts of a step; None before the first row.

    Waiting for data is measured. Exposed communication is the share of collectives among the device's
    operations (on GPUs also where compute hides it); bubble the idle share of the schedule; recomputation
    what the program computes beyond the model's FLOPs, at the speed of the rest.

    Args:
      row: the last of metrics.jsonl.
      info: run.json.
      ops: of profile/top_ops.json; [] without a profile.
    """
    step_s = number(row.get("step_time_s"))
    if not step_s or not 0 < step_s < float("inf"):
        return None
    left, shares = 1.0, {}

    def take(name: str, share_of_rest: float | None) -> None:
        nonlocal left
        if share_of_rest and 0 < share_of_rest <= 1:
            shares[name] = left * share_of_rest
            left -= shares[name]

    take(
        DATA, min(1.0, (number(row.get("data_wait_s")) or 0.0) / step_s)
    )  # of batches that lead the row's steps
    take(COMMUNICATION, sum(number(op["share"]) or 0.0 for op in ops if is_collective(str(op.get("kind")))))
    pipeline = info.get("pipeline")
    take(BUBBLE, number(pipeline.get("bubble")) if isinstance(pipeline, Mapping) else None)
    mfu, full, hfu = (_share(row.get(name)) for name in ("mfu", "mfu_full", "hfu"))
    if full and hfu and hfu > full:
        take(AGAIN, 1 - full / hfu)
    if mfu is None:
        shares[_WHOLE] = left
    else:
        shares[AT_PEAK] = min(mfu, left)
        shares[COMPUTE] = left - shares[AT_PEAK]
    return StepParts(shares, mfu, bool(ops), not ops and (number(info.get("num_devices")) or 1) > 1)


def is_collective(kind: str) -> bool:
    """Returns whether operations of this kind move data between devices."""
    return kind.removesuffix("-start").removesuffix("-done") in _COLLECTIVES


def _share(value: object) -> float | None:
    found = number(value)
    return found if found is not None and 0 < found < 10 else None
