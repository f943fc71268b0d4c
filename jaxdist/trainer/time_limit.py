"""The limit `train.max_minutes`, and the time that a run has used of it."""

import time

# seconds between two looks at the clock, at most; a look waits for the step
_LOOK_EVERY_S = 10.0


class TimeLimit:
    """The time limit of a run.

    The time counts from the moment at which the first batch can be read: the data is
    open then. It includes restores, compilation, evaluations, saves and callbacks. A run
    that resumes adds the time of its checkpoint.
    """

    def __init__(self, minutes: float) -> None:
        """Sets the limit; 0 = there is none. The time begins with `start`."""
        self.minutes = minutes
        self.earlier_s = 0.0  # seconds of earlier starts
        self._began: float | None = None
        self._first: tuple[int, float] | None = None  # step and time of the first look

    def start(self) -> None:
        """Starts the time of this start."""
        self._began = time.monotonic()

    def resume(self, earlier_s: float) -> None:
        """Adds the seconds that a checkpoint has."""
        self.earlier_s = earlier_s

    def used_s(self) -> float:
        """Computes the seconds that the run has used, over all starts."""
        if self._began is None:
            return self.earlier_s
        return self.earlier_s + time.monotonic() - self._began

    def left_s(self) -> float | None:
        """Computes the seconds that are left, which may be negative; None = no limit."""
        if not self.minutes:
            return None
        return 60 * self.minutes - self.used_s()

    @property
    def was_reached_before(self) -> bool:
        """Tests whether earlier starts have used all the time."""
        return 0 < 60 * self.minutes <= self.earlier_s

    def reason(self) -> str:
        """Gives the reason to stop if the time is over, else ""."""
        left_s = self.left_s()
        if left_s is None or left_s > 0:
            return ""
        return f"the time limit is reached (train.max_minutes={self.minutes:g})"

    def steps_to_next_look(self, step: int) -> int:
        """Chooses the number of steps after which to look at the clock again.

        They take half of the time that is left, or ten seconds if that is less, by the
        mean time of a step since the first look. So the last looks follow each step.

        Args:
          step: a step that is done now.
        """
        now = self.used_s()
        left_s = self.left_s()
        if self._first is None or left_s is None or step <= self._first[0]:
            self._first = (step, now)
            return 1
        first_step, first_s = self._first
        step_s = max((now - first_s) / (step - first_step), 1e-6)
        return max(1, int(min(left_s / 2, _LOOK_EVERY_S) / step_s))
