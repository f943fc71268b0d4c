"""Events of a run: what they tell in sum, and as many as a page can show."""

from collections import Counter
from collections.abc import Iterable

from jaxdist.telemetry.metrics import Line, Row

_MAX_COST = 1 << 22  # bytes of the shown events: some 5,000
_OVERHEAD = 500  # bytes of an event beside those of its line
_MAX_NAMES = 100  # names that are told apart; a run has some twenty
OTHER = "(other)"  # stands for further names
_MAX_TEXT = 1000  # characters of a text that is kept for each name


class EventLog:
    """Events of a run.

    Numbers, first and last events are those of all events. `shown` has all events of a
    usual run. Of a run with too many, it has each second, fourth ... event of the names
    that have most.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        """Adds the events of a file's lines."""
        self.numbers: Counter[str] = Counter()  # events by name
        self.unreadable = 0  # lines that are no event
        self._num_events = 0
        # Of these, long texts are cut.
        self.first: Row | None = None
        self.last: Row | None = None
        self._first_of: dict[str, Row] = {}
        # name -> (number in the file, event)
        self._last_of: dict[str, tuple[int, Row]] = {}
        # name -> (number in the file, event, its cost) of the shown events
        self._shown: dict[str, list[tuple[int, Row, int]]] = {}
        self._costs: Counter[str] = Counter()  # bytes of the shown events by name
        self._stride: dict[str, int] = {}
        for line in lines:
            if line.row is None:
                self.unreadable += 1
            else:
                self.add(line.row, line.num_bytes)

    def add(self, event: Row, num_bytes: int) -> None:
        """Adds the next event.

        Args:
          event: the event.
          num_bytes: bytes of its line.
        """
        name = event["event"]
        if name not in self.numbers and len(self.numbers) >= _MAX_NAMES:
            name = OTHER
        brief = event if num_bytes <= _MAX_TEXT else _brief(event)
        index = self._num_events
        self._num_events += 1
        if self.first is None:
            self.first = brief
        self.last = brief
        self._first_of.setdefault(name, brief)
        self._last_of[name] = (index, brief)
        number = self.numbers[name]
        self.numbers[name] += 1
        if number % self._stride.setdefault(name, 1) == 0:
            cost = num_bytes + _OVERHEAD
            self._shown.setdefault(name, []).append((index, event, cost))
            self._costs[name] += cost
            if sum(self._costs.values()) > _MAX_COST:
                self._thin()

    def _thin(self) -> None:
        """Halves the shown events of the name whose events take most."""
        ((name, _),) = self._costs.most_common(1)
        if len(self._shown[name]) > 1:
            self._stride[name] *= 2
            self._shown[name] = self._shown[name][::2]
            self._costs[name] = sum(cost for _, _, cost in self._shown[name])

    def first_of(self, name: str) -> Row | None:
        """Finds the first event of a name; None if there is none."""
        return self._first_of.get(name)

    def last_of(self, *names: str) -> Row | None:
        """Finds the last event that has one of the names; None if there is none."""
        found = [self._last_of[name] for name in names if name in self._last_of]
        if not found:
            return None
        return max(found, key=lambda item: item[0])[1]

    @property
    def shown(self) -> list[Row]:
        """Lists the events to show, in the order of the file."""
        events = [item for items in self._shown.values() for item in items]
        events.sort(key=lambda item: item[0])
        return [event for _, event, _ in events]

    def __len__(self) -> int:
        """Counts all events, also those that are not shown."""
        return self._num_events


def _brief(event: Row) -> Row:
    """Copies an event without lists and objects, with long texts cut."""
    brief: Row = {}
    for name, value in event.items():
        if isinstance(value, str):
            brief[name] = value[:_MAX_TEXT]
        elif value is None or isinstance(value, int | float):
            brief[name] = value
    return brief
