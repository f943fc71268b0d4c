"""Regular expressions of names of parameters, matched in bounded time.

Patterns come from configs and adapters of strangers. Python's `re` backtracks: it may
take centuries for a pattern of ten characters and a name of forty. This matcher follows
all ways through a pattern at once, so each node of the pattern sees a place of the name
once. A pattern means what it means to `re`; it only says whether it is found. What needs
backtracking is refused, and so is what no name of a parameter needs: names of groups,
comments, and escapes of characters by their code.

A set of places in a name is an integer with a bit for each place, 0 to len(name).
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxdist.config import ConfigError

MAX_CHARACTERS = 1000  # of a pattern
# Steps of a match: nodes, again for each repeat {n}, and those in loops _PLACES times. A
# usual pattern has 10 to 300, and a million take a second.
MAX_STEPS = 5000  # of a pattern
MAX_KEY_STEPS = 10_000  # of all patterns of a config key
_PLACES = 30
MAX_NESTING = 30  # groups in groups

Places = int
Test = Callable[[str], bool]  # of a character


class PatternError(ConfigError):
    """Error of a text that is no pattern."""


class _Name:
    """Name that is matched, and what is known of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.characters: dict[str, Places] = {}  # the places of each character
        for place, character in enumerate(text):
            others = self.characters.get(character, 0)
            self.characters[character] = others | 1 << place
        # of each repeat, and each node that is looked at: the ends from a place
        self.repeats: dict[_Node, dict[int, Places]] = {}
        self.looks: dict[_Node, dict[int, Places]] = {}


class _Node:
    """Part of a pattern."""

    def __init__(
        self, *, size: int, steps: int, least: int = 0, most: int | None = 0
    ) -> None:
        """Makes a part.

        Args:
          size: number of nodes, again for each repeat.
          steps: the same, with nodes in loops _PLACES times.
          least: characters that it matches at least.
          most: characters that it matches at most; None = any number.
        """
        self.size = size
        self.steps = steps
        self.least = least
        self.most = most

    def ends(self, name: _Name, starts: Places) -> Places:
        """Finds the places where a match ends that starts at one of `starts`."""
        raise NotImplementedError


# --- Nodes ----------------------------------------------------------------------------


class _Character(_Node):
    """One character of some."""

    def __init__(self, test: Test) -> None:
        super().__init__(size=1, steps=1, least=1, most=1)
        self._test = test

    def places(self, name: _Name) -> Places:
        """Finds the places of the name's characters that match."""
        places = 0
        for character, where in name.characters.items():
            if self._test(character):
                places |= where
        return places

    def ends(self, name: _Name, starts: Places) -> Places:
        return (starts & self.places(name)) << 1


class _Literal(_Character):
    """One character, which is known; with its other cases, if it has any."""

    def __init__(self, variants: Iterable[str]) -> None:
        super().__init__(self._is_variant)
        self._variants = tuple(variants)

    def _is_variant(self, character: str) -> bool:
        return character in self._variants

    def places(self, name: _Name) -> Places:
        """Finds the places of the character."""
        places = 0
        for variant in self._variants:
            places |= name.characters.get(variant, 0)
        return places


class _Sequence(_Node):
    """Parts, one after another."""

    def __init__(self, parts: Sequence[_Node]) -> None:
        super().__init__(
            size=1 + sum(part.size for part in parts),
            steps=1 + sum(part.steps for part in parts),
            least=sum(part.least for part in parts),
            most=_most_of(parts, sum),
        )
        self._parts = parts

    def ends(self, name: _Name, starts: Places) -> Places:
        for part in self._parts:
            if not starts:
                break
            starts = part.ends(name, starts)
        return starts


class _Alternatives(_Node):
    """Parts, one of which matches."""

    def __init__(self, parts: Sequence[_Node]) -> None:
        super().__init__(
            size=1 + sum(part.size for part in parts),
            steps=1 + sum(part.steps for part in parts),
            least=min(part.least for part in parts),
            most=_most_of(parts, max),
        )
        self._parts = parts

    def ends(self, name: _Name, starts: Places) -> Places:
        ends = 0
        for part in self._parts:
            ends |= part.ends(name, starts)
        return ends


def _most_of(parts: Sequence[_Node], join: Callable[[list[int]], int]) -> int | None:
    """Joins the largest numbers of characters of parts; None = any number."""
    lengths = [part.most for part in parts if part.most is not None]
    if len(lengths) < len(parts):
        return None
    return join(lengths)


class _Repeat(_Node):
    """A part several times."""

    def __init__(self, body: _Node, fewest: int, limit: int | None) -> None:
        """Makes a repeat.

        Args:
          body: what is repeated.
          fewest: smallest number of times.
          limit: largest number of times; None = any number.
        """
        times = fewest + 1 if limit is None else max(limit, 1)
        most = None
        if 0 in (body.most, limit):
            most = 0
        elif body.most is not None and limit is not None:
            most = body.most * limit
        size = 1 + body.size * times
        steps = 1 + body.steps * times
        if limit is None and not isinstance(body, _Character):
            steps = size * _PLACES
        super().__init__(size=size, steps=steps, least=body.least * fewest, most=most)
        self._body = body
        self._fewest = fewest
        self._limit = limit

    def ends(self, name: _Name, starts: Places) -> Places:
        for _ in range(self._fewest):
            if not starts:
                return 0
            starts = self._body.ends(name, starts)
        if self._limit is None:
            return self._any_number(name, starts)
        for _ in range(self._limit - self._fewest):
            longer = starts | self._body.ends(name, starts)
            if longer == starts:
                break
            starts = longer
        return starts

    def _any_number(self, name: _Name, starts: Places) -> Places:
        """Finds the ends of any number of repeats."""
        if isinstance(self._body, _Character):
            return _flooded(starts, self._body.places(name))
        if not starts:
            return 0
        # From right to left: what comes of a place follows from the places behind it.
        known = name.repeats.setdefault(self, {})
        leftmost = min(known, default=len(name.text) + 1)
        for place in range(leftmost - 1, _first(starts) - 1, -1):
            known[place] = 0  # a repeat of nothing leads nowhere
            known[place] = 1 << place | _joined(
                known, self._body.ends(name, 1 << place)
            )
        return _joined(known, starts)


def _first(places: Places) -> int:
    return (places & -places).bit_length() - 1


def _flooded(starts: Places, allowed: Places) -> Places:
    """Finds the places that steps over allowed characters lead to."""
    ends = starts
    runs = allowed  # where a run of `step` allowed characters begins
    step = 1
    while runs:
        ends |= (ends & runs) << step
        runs &= runs >> step
        step *= 2
    return ends


def _joined(known: dict[int, Places], starts: Places) -> Places:
    """Joins the places that repeats lead to from each of `starts`."""
    ends = 0
    while starts:
        place = _first(starts)
        ends |= 1 << place | known[place]
        # What a place leads to includes all that those places lead to.
        starts &= ~ends
    return ends


class _Where(_Node):
    """Condition on a place, without characters."""

    def __init__(self, places: Callable[[str], Places]) -> None:
        super().__init__(size=1, steps=1)
        self._places = places

    def ends(self, name: _Name, starts: Places) -> Places:
        return starts & self._places(name.text)


class _Look(_Node):
    """Condition that a part matches ahead of a place or behind it, or does not."""

    def __init__(self, body: _Node, *, is_ahead: bool, is_wanted: bool) -> None:
        super().__init__(size=1 + body.size, steps=1 + body.size * _PLACES)
        self._body = body
        self._distance = 0 if is_ahead else body.least
        self._is_wanted = is_wanted

    def ends(self, name: _Name, starts: Places) -> Places:
        known = name.looks.setdefault(self, {})
        ends = 0
        while starts:
            place = _first(starts)
            starts &= starts - 1
            if place not in known:
                known[place] = 0
                if place >= self._distance:
                    start = 1 << place - self._distance
                    known[place] = self._body.ends(name, start)
            if bool(known[place]) == self._is_wanted:
                ends |= 1 << place
        return ends


# --- Parsing --------------------------------------------------------------------------


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CLASSES: dict[str, Test] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": _is_word,
    "D": lambda character: not character.isdecimal(),
    "S": lambda character: not character.isspace(),
    "W": lambda character: not _is_word(character),
}


def _borders(text: str) -> Places:
    places = 0
    was_word = False
    for place, character in enumerate(text):
        is_word = _is_word(character)
        places |= (is_word != was_word) << place
        was_word = is_word
    return places | was_word << len(text)


def _last_line(text: str) -> Places:
    """Finds the end of a text, and the place before a line feed there."""
    return 1 << len(text) | text.endswith("\n") << max(len(text) - 1, 0)


_UNSUPPORTED = {
    "(?>": "an atomic group",
    "(?P<": "a name of a group",
    "(?P=": "a reference to a group",
    "(?(": "a choice by a group",
    "(?#": "a comment",
}
# letters behind a backslash that `re` knows, and this matcher does not
_UNSUPPORTED_ESCAPES = "ABZNUafnrtuvx"


class _Parser:
    """Parser of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._ignores_case = False

    def parse(self) -> _Node:
        """Parses the pattern.

        Raises:
          PatternError: it is invalid, not supported, or too large.
        """
        if len(self._pattern) > MAX_CHARACTERS:
            raise self._error(f"has more than {MAX_CHARACTERS} characters; shorten it")
        self._ignores_case = self._takes("(?i)")
        node = self._alternatives(0)
        if self._place < len(self._pattern):
            raise self._invalid("unbalanced parenthesis")
        self._check_steps(node)
        return node

    def _alternatives(self, nesting: int) -> _Node:
        if nesting > MAX_NESTING:
            raise self._error(f"nests more than {MAX_NESTING} groups; simplify it")
        parts = [self._sequence(nesting)]
        while self._takes("|"):
            parts.append(self._sequence(nesting))
        if len(parts) == 1:
            return parts[0]
        return _Alternatives(parts)

    def _sequence(self, nesting: int) -> _Node:
        parts: list[_Node] = []
        while self._place < len(self._pattern) and self._next() not in "|)":
            parts.append(self._repeated(self._atom(nesting)))
        return _Sequence(parts)

    def _atom(self, nesting: int) -> _Node:
        """Parses a part that may be repeated."""
        character = self._next()
        if character == "(":
            return self._group(nesting)
        if character == "[":
            return self._set()
        if character in "*+?" or self._bounds(take=False):
            raise self._invalid("nothing to repeat")
        self._place += 1
        if character == "\\":
            return self._escape()
        if character == "^":
            return _Where(lambda text: 1)
        if character == "$":
            return _Where(_last_line)
        if character == ".":
            return _Character(lambda other: other != "\n")
        return self._literal(character)

    def _literal(self, character: str) -> _Node:
        return _Literal(self._cases(character))

    def _cases(self, character: str) -> set[str]:
        """Lists the cases of a character that the pattern takes for equal."""
        if self._ignores_case:
            return {character, character.lower(), character.upper()}
        return {character}

    def _group(self, nesting: int) -> _Node:
        for beginning, what in _UNSUPPORTED.items():
            if self._pattern.startswith(beginning, self._place):
                raise self._unsupported(what)
        looks = {"(?=": (True, True), "(?!": (True, False)}
        looks |= {"(?<=": (False, True), "(?<!": (False, False)}
        look = next((value for key, value in looks.items() if self._takes(key)), None)
        if look is None and not self._takes("(?:"):
            self._takes("(")
            if self._peek() == "?":
                raise self._unsupported(
                    "a flag or extension other than (?i) at its start"
                )
        body = self._alternatives(nesting + 1)
        if not self._takes(")"):
            raise self._invalid("missing ), unterminated subpattern")
        if look is None:
            return body
        is_ahead, is_wanted = look
        if not is_ahead and body.least != body.most:
            raise self._invalid("look-behind requires fixed-width pattern")
        return _Look(body, is_ahead=is_ahead, is_wanted=is_wanted)

    def _set(self) -> _Node:
        """Parses a set of characters, [...]."""
        self._takes("[")
        is_negated = self._takes("^")
        tests: list[Test] = []
        first = self._place
        while not (self._place > first and self._takes("]")):
            low = self._member()
            is_range = self._takes("-")
            if is_range and self._peek() != "]":
                high = self._member()
                if not (isinstance(low, str) and isinstance(high, str) and low <= high):
                    raise self._invalid("bad character range")
                tests.append(_between(low, high))
                continue
            tests.append(_test_of(low))
            if is_range:
                tests.append(_test_of("-"))

        def test(character: str) -> bool:
            cases = self._cases(character)
            is_in = any(one(case) for one in tests for case in cases)
            return is_in != is_negated

        return _Character(test)

    def _member(self) -> str | Test:
        """Parses a character of a set, or a class such as `w`."""
        character = self._peek()
        if not character:
            raise self._invalid("unterminated character set")
        self._place += 1
        if character != "\\":
            return character
        letter = self._peek()
        if letter in _CLASSES:
            self._place += 1
            return _CLASSES[letter]
        return self._escaped()

    def _escape(self) -> _Node:
        """Parses what follows a backslash outside of a set."""
        letter = self._peek()
        if letter in _CLASSES:
            self._place += 1
            return _Character(_CLASSES[letter])
        if letter == "b":
            self._place += 1
            return _Where(_borders)
        return self._literal(self._escaped())

    def _escaped(self) -> str:
        """Parses a character that a backslash makes plain, such as `.`."""
        letter = self._peek()
        if not letter:
            raise self._invalid("bad escape (end of pattern)")
        if letter in "0123456789":
            raise self._unsupported("a reference to a group, or a character's code")
        if letter in _UNSUPPORTED_ESCAPES or letter == "b":
            raise self._unsupported(f"the escape \\{letter}")
        if letter.isascii() and letter.isalpha():
            raise self._invalid(f"bad escape \\{letter}")
        self._place += 1
        return letter

    def _repeated(self, part: _Node) -> _Node:
        """Parses the repeat behind a part, if there is one."""
        bounds = self._bounds()
        if bounds is None:
            return part
        fewest, limit = bounds
        if limit is not None and limit < fewest:
            raise self._invalid("min repeat greater than max repeat")
        if isinstance(part, _Where):
            raise self._invalid("nothing to repeat")
        if self._takes("+"):
            raise self._unsupported("a possessive repeat")
        self._takes("?")  # a lazy repeat is found in the same names
        if self._bounds(take=False):
            raise self._invalid("multiple repeat")
        repeat = _Repeat(part, fewest, limit)
        self._check_steps(repeat)
        return repeat

    def _check_steps(self, node: _Node) -> None:
        if node.steps > MAX_STEPS:
            raise self._error(f"takes more than {MAX_STEPS} steps; simplify it")

    def _bounds(self, *, take: bool = True) -> tuple[int, int | None] | None:
        """Parses how often a part is repeated; None if there is no repeat."""
        rest = self._pattern[self._place :]
        signs: dict[str, tuple[int, int | None]]
        signs = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        bounds = signs.get(rest[:1])
        length = 1
        match = re.match(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}", rest)
        if match:
            length = match.end()
            fewest = int(match[1] or 0)
            bounds = (fewest, fewest)
            if match[2]:
                bounds = (fewest, int(match[3]) if match[3] else None)
        if bounds and take:
            self._place += length
        return bounds

    def _next(self) -> str:
        return self._pattern[self._place]

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _takes(self, text: str) -> bool:
        """Skips a text if it comes next; tells whether it does."""
        is_next = self._pattern.startswith(text, self._place)
        if is_next:
            self._place += len(text)
        return is_next

    def _error(self, problem: str) -> PatternError:
        return PatternError(f"{self._pattern!r:.200} {problem}")

    def _invalid(self, reason: str) -> PatternError:
        return self._error(
            f"is no regular expression ({reason} at position {self._place})"
        )

    def _unsupported(self, what: str) -> PatternError:
        return self._error(
            f"has {what} at position {self._place}, which is not supported; "
            "write it without"
        )


def _test_of(member: str | Test) -> Test:
    if isinstance(member, str):
        return lambda character: character == member
    return member


def _between(low: str, high: str) -> Test:
    return lambda character: low <= character <= high


# --- Patterns -------------------------------------------------------------------------


class Pattern:
    """Pattern that can be looked for."""

    def __init__(self, text: str) -> None:
        """Parses a pattern.

        Raises:
          PatternError: it is invalid, not supported, or takes too many steps.
        """
        self._node = _Parser(text).parse()
        self.steps = self._node.steps

    def is_in(self, name: str) -> bool:
        """Tests whether the pattern is found anywhere in a name, as by `re.search`."""
        places = (1 << len(name) + 1) - 1
        return self._node.ends(_Name(name), places) != 0

    def is_whole(self, name: str) -> bool:
        """Tests whether the pattern matches a whole name, as by `re.fullmatch`."""
        return bool(self._node.ends(_Name(name), 1) >> len(name) & 1)


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> Pattern:
    return Pattern(text)


@functools.lru_cache(maxsize=1 << 16)
def is_found(text: str, name: str) -> bool:
    """Tests whether a pattern is found anywhere in a name.

    Raises:
      PatternError: it is no pattern; `pattern_faults` has checked those of a config.
    """
    return _compiled(text).is_in(name)


def is_whole(text: str, name: str) -> bool:
    """Tests whether a pattern matches a whole name.

    Raises:
      PatternError: as for `is_found`.
    """
    return _compiled(text).is_whole(name)


def pattern_faults(
    key: str, patterns: Iterable[str], form: str = "{}"
) -> Iterator[str]:
    """Yields a message for each text that is no pattern, and if all are too large.

    Args:
      key: config key that has the patterns, for messages.
      patterns: texts of the patterns.
      form: pattern into which each of them is put before it is used.
    """
    steps = 0
    for text in patterns:
        steps += len(text)  # so that the time is bounded for invalid ones, too
        if steps > MAX_KEY_STEPS:
            yield f"{key}: its patterns take more than {MAX_KEY_STEPS} steps; simplify them"
            return
        try:
            # alone first: one with unequal parentheses could be valid in the form
            _compiled(text)
            steps += _compiled(form.format(text)).steps
        except PatternError as error:
            yield f"{key}: {error}"
