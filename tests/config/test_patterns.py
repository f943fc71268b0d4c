"""Patterns of names: they mean what they mean to `re`, end in time, and what is not
supported is refused by name.
"""

import re
import signal
import warnings
from contextlib import contextmanager
from random import Random

import pytest

from jaxdist.config import ConfigError, patterns
from jaxdist.interop.families import FAMILIES
from support.paths import GOLDEN

LIMIT_S = 30  # of processor time; each of these takes `re` years


@contextmanager
def limited():
    """Ends the process of the tests if the block takes too long."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def parameter_names() -> set[str]:
    """Returns the names of all parameters of the shipped configs and families."""
    names = set()
    for file in (GOLDEN / "sharding").glob("*.txt"):
        words = (line.split() for line in file.read_text().splitlines())
        names |= {word[0] for word in words if len(word) > 3 and "x" in word[1]}
    for family in FAMILIES.values():
        names |= {part.path for stored in family.tensors for part in stored.parts}
    return names


def module_names() -> set[str]:
    """Returns what PEFT calls the linear layers of all families, in three layers."""
    return {
        stored.name.format(layer).removesuffix(".weight")
        for family in FAMILIES.values()
        for stored in family.tensors
        for layer in (0, 1, 11)
        if stored.parts[0].stacked <= 1
    }


PATHS = [  # of docs, tests and the shipped configs
    "^embedding",
    "",
    ".*",
    "^blocks",
    "kernel$",
    "blocks/(attention|mlp)/.*",
    r"^(blocks|first_blocks)/attention/(query|key|value)(_bias)?$",
    "(?!.*(norm|scale))",
    r"^(?!blocks/).*",
    r"mlp/(up|down|gate)\b",
    r"blocks/\w+/[^/]+$",
    "norm|bias",
    "(?i)ATTENTION/Q",
    r"(\w+/)*(query|key)$",
    "(?<!key_)bias",
    "(?<=attention/)(query|out)",
    "x{0,2}s{2}",
    r"[a-m_]+/\S*?[^a-z]$",
]
MODULES = [
    "q_proj",
    "self_attn.q_proj",
    r"model\.layers\.(?!0\b)\d+\.self_attn\.(q|v)_proj",
    r".*\.(?:[1-9]|1[0-9])\..*proj",
    r"^(?!.*(lm_head|embed)).*",
    "(?<!mlp.)down_proj|up_proj",
    "c_attn|c_fc",
    r"layers\.\d{2}\..*",
]


def test_patterns_mean_what_they_mean_to_re_on_all_shipped_names():
    paths = parameter_names()
    modules = module_names()
    assert len(paths) > 30
    assert len(modules) > 50
    matches = 0
    for text in PATHS:
        for form in ("{}", "(^|/)({})$"):
            if "(?i)" in text and form != "{}":
                continue
            pattern = form.format(text)
            for name in paths:
                theirs = re.search(pattern, name) is not None
                assert patterns.is_found(pattern, name) == theirs, (pattern, name)
                matches += theirs
    for text in MODULES:
        pattern = rf"(.*\.)?({text})"
        for name in modules:
            theirs = re.fullmatch(pattern, name) is not None
            assert patterns.is_whole(pattern, name) == theirs, (pattern, name)
            matches += theirs
    assert matches > 500


# --- Against `re`, by chance ----------------------------------------------------------

ATOMS = r"a b A _ / . \. \w \d \W \s [ab] [^a] [a-c_/] []a] [a-] [\w.] [A-Z] \b ^ $"
ATOMS += r" 0 é \/ [\]\-a] { } ] -"
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{0}", "{1,}"]
GROUPS = ["(", "(?:", "(?=", "(?!", "(?<=", "(?<!"]


def drawn(random: Random, depth: int) -> str:
    """Draws a pattern."""
    text = ""
    for _ in range(random.randrange(4)):
        part = random.choice(ATOMS.split(" "))
        if depth and random.random() < 0.3:
            part = f"{random.choice(GROUPS)}{drawn(random, depth - 1)})"
        text += part
        if random.random() < 0.35:
            text += random.choice(REPEATS)
    if random.random() < 0.25:
        text += f"|{drawn(random, 0)}"
    return text


def drawn_pattern(random: Random) -> str:
    """Draws a pattern that may ignore case, and may be cut off."""
    text = drawn(random, 3)
    if random.random() < 0.1:
        text = f"(?i){text}"
    if random.random() < 0.1:
        text = text[: random.randrange(len(text) + 1)]
    return text


def of_re(text: str) -> re.Pattern[str] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return re.compile(text)
        except re.error:
            return None


@pytest.mark.parametrize("seed", range(3))
def test_random_patterns_mean_what_they_mean_to_re(seed):
    random = Random(seed)
    counts = dict.fromkeys(("found", "not", "invalid"), 0)
    for _ in range(1000):
        text = drawn_pattern(random)
        theirs = of_re(text)
        try:
            ours = patterns.Pattern(text)
        except patterns.PatternError:
            assert theirs is None, text
            counts["invalid"] += 1
            continue
        assert theirs is not None, text
        for _ in range(4):
            name = "".join(random.choices("abA_/.0é\nc", k=random.randrange(1, 7)))
            is_found = theirs.search(name) is not None
            assert ours.is_in(name) == is_found, (text, name)
            assert ours.is_whole(name) == bool(theirs.fullmatch(name)), (text, name)
            counts["found" if is_found else "not"] += 1
    assert min(counts.values()) > 50, counts


# --- Time -----------------------------------------------------------------------------

SLOW_FOR_RE = [
    "(([a-z/_]+)+)+!",
    r"(\w*)*!",
    "(a|a|b|[a-z/_0-9])*!",
    "((.*)*)*!",
    "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)!",
    "(?=(.*.*)*!)",
    "(.{1,9}){1,9}!",
    "(?i)(([a-z/_]+)+)+!",
    ".*" * 400 + "!",
    "(|a|(|b)*)*!",
]


@pytest.mark.parametrize("text", SLOW_FOR_RE)
def test_no_pattern_takes_long(text):
    name = "blocks/layer_17/attention/query_norm/scale" * 3
    with limited():
        assert not patterns.is_found(text, name)
        assert not patterns.is_whole(text, name)
        assert patterns.is_found(text, f"{name}!")


def test_the_largest_patterns_that_are_accepted_end():
    """Their steps are bounded, so the time for all names is."""
    text = "((.*a)*)*" * 17
    assert patterns.Pattern(text).steps > patterns.MAX_STEPS / 2
    assert not list(patterns.pattern_faults("key", [text]))
    with limited():
        for number in range(30):
            assert patterns.is_found(text, f"blocks/layer_{number}/attention/query")


# --- What is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(", "'(' is no regular expression (missing ), unterminated subpattern"),
        (")", "is no regular expression (unbalanced parenthesis"),
        ("[a", "is no regular expression (unterminated character set"),
        ("a**", "is no regular expression (multiple repeat"),
        ("*a", "is no regular expression (nothing to repeat"),
        ("a{2,1}", "is no regular expression (min repeat greater than max"),
        (r"\q", r"is no regular expression (bad escape \q"),
        ("(?<=a*)b", "is no regular expression (look-behind requires fixed-width"),
        (
            r"(a)\1",
            "has a reference to a group, or a character's code at position 4, which is not supported",
        ),
        (r"[\0]", "has a reference to a group, or a character's code at position 2"),
        ("a(?P=x)", "has a reference to a group at position"),
        ("(?P<x>a)", "has a name of a group at position 0, which is not supported"),
        ("a(?#b)", "has a comment at position 1, which is not supported"),
        (r"a\Z", r"has the escape \Z at position 2, which is not supported"),
        (r"[\x61]", r"has the escape \x at position 2, which is not supported"),
        ("(a)?(?(1)b|c)", "has a choice by a group at position"),
        ("(?>a)", "has an atomic group at position"),
        ("a*+", "has a possessive repeat at position"),
        ("a(?i:b)", "has a flag or extension other than (?i) at its start"),
        ("a" * 1001, "has more than 1000 characters; shorten it"),
        ("(" * 40 + ")" * 40, "nests more than 30 groups; simplify it"),
        ("(" * 499 + ")" * 499, "nests more than 30 groups; simplify it"),
        ("a{99999999999999999999}", "takes more than 5000 steps; simplify it"),
        ("((a{30}){30}){30}", "takes more than 5000 steps; simplify it"),
        ("((((((((((((((a+)+)+)+)+)+)+)+)+)+)+)+)+)+)+", "takes more than 5000 steps"),
    ],
)
def test_what_cannot_be_used_is_named(text, problem):
    (fault,) = patterns.pattern_faults("optimizer.frozen", [text])
    assert fault.startswith("optimizer.frozen: ")
    assert problem in fault
    with pytest.raises(ConfigError) as raised:
        patterns.is_found(text, "name")
    assert problem in str(raised.value)


def test_very_many_patterns_are_refused_at_once():
    many = [f"blocks/layer_{number}" for number in range(1_000_000)]
    with limited():
        (fault,) = patterns.pattern_faults("key", many)
        faults = list(patterns.pattern_faults("key", ["("] * 1_000_000))
    assert fault.startswith("key: its patterns take more than 10000 steps")
    assert faults[-1] == fault
    assert len(faults) < 20_000
