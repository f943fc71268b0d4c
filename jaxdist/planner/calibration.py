"""Measured times of collectives in the place of datasheet rates: latency and rate of
each kind on each link.

`benchmarks/plan/collectives.py` writes the file, `plan --calibration FILE` reads it. A
collective takes alpha + wire bytes / rate; what was not measured keeps the datasheet's
rate and no latency.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.planner.communication import Collective
from jaxdist.planner.formulas import KINDS
from jaxdist.planner.targets import Link, Target
from jaxdist.storage import untrusted

# of a measured time; a line that misses one by more says nothing of other sizes
MAX_RESIDUAL = 0.2
_CURE = "measure again: python benchmarks/plan/collectives.py --config NAME --out FILE"


@dataclass(frozen=True)
class Fit:
    """Seconds of one kind of collective over one mesh axis: alpha_s + wire bytes /
    bytes_per_s.
    """

    kind: str  # of KINDS
    axis: str  # "fsdp", "data+fsdp"
    axis_size: int
    link: str  # its name in `targets.Link`
    alpha_s: float  # what an empty one takes
    bytes_per_s: float  # that each device sends; inf: times do not grow with sizes
    residual: float  # the largest |line - measured| / measured

    @property
    def usable(self) -> bool:
        """Whether the line describes what was measured."""
        return self.residual <= MAX_RESIDUAL and math.isfinite(self.bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Returns the fit as an entry of the file; JSON has no inf."""
        rate = self.bytes_per_s if math.isfinite(self.bytes_per_s) else None
        return asdict(self) | {"bytes_per_s": rate}


def fit_line(
    wire_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """Returns (alpha_s, bytes_per_s, largest relative residual) of t = alpha + wire
    bytes / rate.

    Least squares of relative errors: of absolute ones the small sizes, which alone show
    alpha, count nothing. Neither part is below 0.
    """
    sizes = np.asarray(wire_bytes, float)
    times = np.asarray(seconds, float)
    rows = np.stack([1 / times, sizes / times], axis=1)
    alpha, beta = (
        np.linalg.lstsq(
            rows / (scale := np.abs(rows).max(axis=0)), np.ones(len(times))
        )[0]
        / scale
    )
    if alpha < 0:
        alpha = 0.0
        beta = rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    elif beta <= 0:
        alpha = rows[:, 0].sum() / (rows[:, 0] ** 2).sum()
        beta = 0.0
    residual = np.abs(rows @ (alpha, beta) - 1).max()
    return float(alpha), float(1 / beta) if beta else math.inf, float(residual)


@dataclass(frozen=True)
class Calibration:
    """The usable fits of a file, for the hardware that they were measured on."""

    file: str
    hardware: str  # text of the target
    fits: Sequence[Fit]

    def serves(self, target: Target) -> bool:
        """Returns whether its times hold on a target: of its chip, and of its network
        if any.

        Emulated devices share the processor, so their number must be the same, too.
        """
        if target.platform == "cpu":
            return self.hardware == target.text
        chips, _, network = self.hardware.partition("@")
        own = target.text.partition("@")[2]
        return chips.partition(":")[0] == target.family and (
            not (network and own) or network == own
        )

    def fit_for(self, one: Collective) -> Fit | None:
        """Returns the fit of a collective: of its axis if measured, else the slowest
        alike; None without.
        """
        alike = self._alike(one.kind, one.axis, one.group_size, one.link)
        return max(
            alike,
            key=lambda fit: fit.alpha_s + one.wire_bytes / fit.bytes_per_s,
            default=None,
        )

    def _alike(self, kind: str, axis: str, size: int, link: Link | None) -> list[Fit]:
        """Returns the fits for a kind of collective over an axis: of that axis, if
        there is one.

        A permute's bytes do not depend on how many devices the axis has, so any size
        will do.
        """
        name = link.name if link else ""
        alike = [fit for fit in self.fits if (fit.kind, fit.link) == (kind, name)]
        sized = [fit for fit in alike if fit.axis_size == size]
        alike = sized or (alike if kind == "collective-permute" else [])
        return [fit for fit in alike if fit.axis == axis] or alike

    def of_axis(self, axis: str, size: int, link: Link) -> dict[str, dict[str, float]]:
        """Returns {kind: {bytes_per_s, alpha_s}} of a mesh axis on its link: the
        slowest.
        """
        alike = {kind: self._alike(kind, axis, size, link) for kind in KINDS}
        slowest = {
            kind: min(fits, key=lambda fit: fit.bytes_per_s)
            for kind, fits in alike.items()
            if fits
        }
        names = ("bytes_per_s", "alpha_s")
        return {
            kind: {name: getattr(fit, name) for name in names}
            for kind, fit in slowest.items()
        }

    def applied(self, collectives: Sequence[Collective]) -> list[Collective]:
        """Returns the collectives with measured links, where there is a measurement."""
        return [self._measured(one) for one in collectives]

    def _measured(self, one: Collective) -> Collective:
        fit = self.fit_for(one)
        if fit is None or one.link is None:
            return one
        link = replace(
            one.link, bytes_per_s=fit.bytes_per_s, alpha_s=fit.alpha_s, all_to_all=1.0
        )
        return replace(one, link=link)

    def describe(self, collectives: Sequence[Collective]) -> dict[str, Any]:
        """Returns, as JSON, whose times a plan has, and which collectives of it were
        not measured.
        """
        missing = [one for one in collectives if self.fit_for(one) is None]
        names = {
            f"{one.kind} over {one.axis} ({one.group_size} devices)" for one in missing
        }
        return {
            "file": self.file,
            "hardware": self.hardware,
            "not_measured": sorted(names),
        }


def load(path: str, target: Target) -> Calibration:
    """Returns the calibration of a file.

    Raises:
      ConfigError: it cannot be read, was measured on other hardware, or has a fit that
        is not usable.
    """
    found = read(path)
    if not found.serves(target):
        raise ConfigError(
            f"--calibration {path}: measured on {found.hardware}, the plan is for {target.text}; give a file "
            f"of that hardware, or leave it out for datasheet rates"
        )
    return found


def read(path: str) -> Calibration:
    """Returns the calibration of a file, whatever hardware it is of.

    Raises:
      ConfigError: it cannot be read, or has a fit that is not usable.
    """
    try:
        held = untrusted.read_json(Path(path), dict).get("calibration")
        content = untrusted.of_kind(held, dict, '"calibration"')
        hardware = untrusted.of_kind(content.get("hardware"), str, '"hardware"')
        entries = untrusted.of_kind(content.get("fits"), list, '"fits"')
        fits = [_fit(untrusted.of_kind(entry, dict, "a fit")) for entry in entries]
    except (OSError, untrusted.Malformed) as error:
        raise ConfigError(
            f"--calibration {path}: {untrusted.named(error)}; {_CURE}"
        ) from error
    if bad := [fit for fit in fits if not fit.usable]:
        names = ", ".join(
            f"{fit.kind} over {fit.axis} (off by {fit.residual:.0%})" for fit in bad
        )
        raise ConfigError(
            f"--calibration {path}: the fit is off by more than {MAX_RESIDUAL:.0%}: {names}; {_CURE}, on a "
            f"quiet machine"
        )
    if not fits:
        raise ConfigError(
            f"--calibration {path}: no fit in it is usable; {_CURE}, on a quiet machine"
        )
    return Calibration(path, hardware, fits)


def _fit(entry: Mapping[str, Any]) -> Fit:
    """Returns the fit of an entry; `Malformed` where one of its values cannot be."""
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(Fit).items():
        value = entry.get(name)
        if kind is float:
            value = (
                math.inf
                if value is None
                else float(value)
                if type(value) is int
                else value
            )
            if not isinstance(value, float) or not value >= 0:
                raise untrusted.Malformed(
                    f"{name} of a fit is {value!r:.40}; required: a number from 0"
                )
        values[name] = untrusted.of_kind(value, kind, f"{name} of a fit")
    fit = Fit(**values)
    if fit.kind not in KINDS or fit.bytes_per_s == 0 or not math.isfinite(fit.alpha_s):
        raise untrusted.Malformed(
            f"a fit of {fit.kind!r:.40} has no time; kinds are {', '.join(KINDS)}"
        )
    return fit
