"""Calibration: measured times of collectives that replace datasheet rates.

`benchmarks/plan/collectives.py` writes the file, and `plan --calibration FILE` reads it. A
measured collective takes alpha + wire bytes / rate. Other collectives keep the
datasheet's rate and no latency.
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

# largest relative error of a fit at a measured size; a worse fit predicts nothing
MAX_RESIDUAL = 0.2
_FIX = "measure again: python benchmarks/plan/collectives.py --config NAME --out FILE"


@dataclass(frozen=True)
class Fit:
    """A line fitted to the times of one kind of collective over one mesh axis.

    A collective takes alpha_s + wire bytes / bytes_per_s.
    """

    kind: str  # one of KINDS
    axis: str  # mesh axes, as "fsdp" or "data+fsdp"
    axis_size: int
    link: str  # name of the `targets.Link`
    alpha_s: float  # time of an empty collective
    # rate at which each device sends; inf: times do not grow with sizes
    bytes_per_s: float
    residual: float  # the largest |line - measured| / measured

    @property
    def usable(self) -> bool:
        """True if the line describes the measurements."""
        return self.residual <= MAX_RESIDUAL and math.isfinite(self.bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Converts the fit to an entry of the file; JSON has no inf."""
        rate = self.bytes_per_s if math.isfinite(self.bytes_per_s) else None
        return asdict(self) | {"bytes_per_s": rate}


def fit_line(
    wire_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """Fits the line t = alpha + wire bytes / rate to measured times.

    The fit minimizes squares of relative errors. With absolute errors the small sizes,
    which alone show alpha, would have no weight. Alpha and rate are at least 0.

    Args:
      wire_bytes: bytes that each device sent.
      seconds: the time of each measurement.

    Returns:
      alpha_s, bytes_per_s and the largest relative residual.
    """
    sizes = np.asarray(wire_bytes, float)
    times = np.asarray(seconds, float)
    rows = np.stack([1 / times, sizes / times], axis=1)
    scale = np.abs(rows).max(axis=0)
    solution = np.linalg.lstsq(rows / scale, np.ones(len(times)))[0]
    alpha, beta = solution / scale
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
    """The usable fits of a file, and the hardware that they were measured on."""

    file: str
    hardware: str  # text of the target
    fits: Sequence[Fit]

    def serves(self, target: Target) -> bool:
        """Checks whether the times hold on a target: chip and network must be equal.

        A network that one of the texts does not name is not compared. Emulated devices
        share the processor, so their number must be equal as well.
        """
        if target.platform == "cpu":
            return self.hardware == target.text
        chips, _, network = self.hardware.partition("@")
        if chips.partition(":")[0] != target.family:
            return False
        target_network = target.text.partition("@")[2]
        if not network or not target_network:
            return True
        return network == target_network

    def fit_for(self, collective: Collective) -> Fit | None:
        """Finds the fit of a collective; None if nothing similar was measured.

        It is the fit of the collective's axis, or else the slowest of similar ones.
        """
        similar = self._similar(
            collective.kind,
            collective.axis,
            size=collective.group_size,
            link=collective.link,
        )
        return max(
            similar,
            key=lambda fit: fit.alpha_s + collective.wire_bytes / fit.bytes_per_s,
            default=None,
        )

    def _similar(self, kind: str, axis: str, size: int, link: Link | None) -> list[Fit]:
        """Lists the fits of a kind of collective on a link, of the axis if measured.

        The size of the axis must be equal, except for permutes: their bytes do not
        depend on it.
        """
        name = link.name if link else ""
        similar = [fit for fit in self.fits if (fit.kind, fit.link) == (kind, name)]
        same_size = [fit for fit in similar if fit.axis_size == size]
        if same_size or kind != "collective-permute":
            similar = same_size
        return [fit for fit in similar if fit.axis == axis] or similar

    def of_axis(self, axis: str, size: int, link: Link) -> dict[str, dict[str, float]]:
        """Finds the slowest fit of each kind of collective over a mesh axis.

        Returns:
          {kind: {"bytes_per_s": ..., "alpha_s": ...}} for the measured kinds.
        """
        slowest: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            fits = self._similar(kind, axis, size, link)
            if fits:
                fit = min(fits, key=lambda fit: fit.bytes_per_s)
                slowest[kind] = {
                    "bytes_per_s": fit.bytes_per_s,
                    "alpha_s": fit.alpha_s,
                }
        return slowest

    def applied(self, collectives: Sequence[Collective]) -> list[Collective]:
        """Replaces the links of measured collectives by measured ones."""
        return [self._measured(collective) for collective in collectives]

    def _measured(self, collective: Collective) -> Collective:
        """Replaces a collective's link by the measured one, if there is one."""
        fit = self.fit_for(collective)
        if fit is None or collective.link is None:
            return collective
        link = replace(
            collective.link,
            bytes_per_s=fit.bytes_per_s,
            alpha_s=fit.alpha_s,
            all_to_all=1.0,
        )
        return replace(collective, link=link)

    def describe(self, collectives: Sequence[Collective]) -> dict[str, Any]:
        """Describes the source of a plan's times, and collectives that lack one."""
        names = {
            f"{collective.kind} over {collective.axis} ({collective.group_size} devices)"
            for collective in collectives
            if self.fit_for(collective) is None
        }
        return {
            "file": self.file,
            "hardware": self.hardware,
            "not_measured": sorted(names),
        }


def load(path: str, target: Target) -> Calibration:
    """Loads the calibration of a file for a target.

    Raises:
      ConfigError: the file cannot be read, was measured on other hardware, or has a fit
        that is not usable.
    """
    calibration = read(path)
    if not calibration.serves(target):
        raise ConfigError(
            f"--calibration {path}: measured on {calibration.hardware}, the plan is for {target.text}; give a file "
            f"of that hardware, or leave it out for datasheet rates"
        )
    return calibration


def read(path: str) -> Calibration:
    """Reads the calibration of a file for any hardware.

    Raises:
      ConfigError: the file cannot be read, or has a fit that is not usable.
    """
    try:
        section = untrusted.read_json(Path(path), dict).get("calibration")
        content = untrusted.of_kind(section, dict, '"calibration"')
        hardware = untrusted.of_kind(content.get("hardware"), str, '"hardware"')
        entries = untrusted.of_kind(content.get("fits"), list, '"fits"')
        fits = [_fit(untrusted.of_kind(entry, dict, "a fit")) for entry in entries]
    except (OSError, untrusted.Malformed) as error:
        raise ConfigError(
            f"--calibration {path}: {untrusted.named(error)}; {_FIX}"
        ) from error
    unusable = [fit for fit in fits if not fit.usable]
    if unusable:
        names = ", ".join(
            f"{fit.kind} over {fit.axis} (off by {fit.residual:.0%})"
            for fit in unusable
        )
        raise ConfigError(
            f"--calibration {path}: the fit is off by more than {MAX_RESIDUAL:.0%}: {names}; {_FIX}, on a "
            f"quiet machine"
        )
    if not fits:
        raise ConfigError(
            f"--calibration {path}: no fit in it is usable; {_FIX}, on a quiet machine"
        )
    return Calibration(path, hardware, fits)


def _fit(entry: Mapping[str, Any]) -> Fit:
    """Reads a fit from an entry of the file; null is infinite.

    Raises:
      Malformed: a value is not legal.
    """
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(Fit).items():
        value = entry.get(name)
        if kind is float:
            if value is None:
                value = math.inf
            elif type(value) is int:
                value = float(value)
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
