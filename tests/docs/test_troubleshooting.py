"""The page of exit codes and events: none is missing, and what it names exists."""

import re

import pytest

from jaxdist import config
from jaxdist.__main__ import COMMANDS
from jaxdist.planner import document
from jaxdist.trainer import run_config
from support.events import calls, events_in_code, literal
from support.paths import DOCS, ROOT

PAGE = DOCS / "reference/exit-codes-and-events.md"
SYMPTOMS = DOCS / "how-to/troubleshooting.md"
# The lines below the heading of an exit code.
LINES = ("Meaning", "`launch`", "You")
# These hand on an event's name, which is no literal there.
HAND_ON = {
    "telemetry/metrics.py",
    "operations/launch/run_progress.py",
    "trainer/callbacks.py",
}


def exit_codes_in_code() -> set[int]:
    """Returns the exit codes that commands have: named ones, and literals handed to
    what ends a process.
    """
    named = {value for name, value in vars(config).items() if name.startswith("EXIT_")}
    ends = ("exit", "_exit", "SystemExit", "_leave")
    literals = {literal(call) for _, name, call in calls() if name in ends}
    return {
        0,
        1,
        document.FITS,
        document.DOES_NOT_FIT,
        document.CANNOT_TELL,
        *named,
    } | {code for code in literals if type(code) is int}


def section(heading: str) -> str:
    """Returns the text below a heading of the page, with all smaller headings."""
    return PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> dict[str, list[str]]:
    """Returns {name: the other cells} of the tables below a heading of the page."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    table = {}
    for line in lines:
        first, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for name in re.findall(r"`([^`]+)`", first):
            assert name not in table, f"{name} has two rows"
            table[name] = cells
    return table


def codes() -> dict[str, dict[str, str]]:
    """Returns {exit code: {label of a line: its text}}."""
    found = {}
    for part in re.split(r"^### ", section("Exit codes"), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        lines = re.findall(r"^- \*\*(.+?):\*\* (.*?)(?=\n- |\Z)", text, re.M | re.S)
        for code in re.findall(r"`(\d+)`", heading):
            assert code not in found, f"{code} has two headings"
            found[code] = {label: text.strip() for label, text in lines}
    return found


def faults(text: str) -> list[str]:
    """Returns the keys of the config and the commands in a text that do not exist."""
    keys = run_config.full_schema(run_config.registry.DEFAULT_TARGET)
    groups = "|".join({key.partition(".")[0] for key in keys})
    named = re.findall(rf"`((?:{groups})\.\w+)", text)
    commands = re.findall(r"`jaxdist (\w+)", text)
    return [key for key in named if key not in keys] + [
        command for command in commands if command not in COMMANDS
    ]


def test_no_event_is_missing_and_none_is_made_up():
    written = events_in_code()
    assert {
        "start",
        "hang",
        "peer_lost",
        "drift",
        "straggler",
        "logger_failed",
    } <= written
    assert written == set(rows("Events")), (
        "write a row for the event in docs/reference/exit-codes-and-events.md"
    )


def test_events_have_names_that_can_be_read_from_the_source():
    unnamed = {
        file
        for file, name, call in calls()
        if name in ("event", "_event") and literal(call) is None
    }
    assert unnamed == HAND_ON, "give the event's name as a literal where it is written"


def test_no_exit_code_is_missing():
    told, known = {int(code) for code in codes()}, exit_codes_in_code()
    assert {0, 1, 3, 4, 70, 75, 76, 77, 78, 141} <= known <= told
    assert all(code > 128 for code in told - known), (
        "only ends by signals are not our own codes"
    )


def test_each_exit_code_says_all_and_names_what_exists():
    for code, lines in codes().items():
        assert tuple(lines) == LINES, (
            f"{code}: its meaning, what launch does, what to do"
        )
        assert all(lines.values()), f"{code}: each line is required"
        assert not faults(" ".join(lines.values())), code


@pytest.mark.parametrize("heading", ["Why a run stopped", "Events"])
def test_each_row_says_all_and_names_what_exists(heading):
    for name, cells in rows(heading).items():
        assert len(cells) == 2, f"{name}: its meaning, and what to do"
        assert all(cells), f"{name}: each cell is required"
        assert not faults(" ".join(cells)), name


def test_the_page_of_symptoms_names_what_exists():
    text = SYMPTOMS.read_text()
    assert len(re.findall(r"`jaxdist \w+", text)) > 3
    assert not faults(text)


def test_every_reason_of_a_stop_is_told():
    """Those that the code names, and the key of each callback that stops a run.

    A hook's own text is another's.
    """
    told = " ".join(rows("Why a run stopped"))
    files = sorted((ROOT / "jaxdist").rglob("*.py"))
    source = "\n".join(file.read_text() for file in files)
    stops = re.findall(r'event\(\s*"stop"[^)]*', source)
    reasons = set(re.findall(r'"(\w+)"', " ".join(stops))) - {"stop"}
    reasons |= set(re.findall(r'cause = "(\w+)"', source))
    reasons |= set(re.findall(r'event_reason = (?:reason or )?"(\w+)"', source))
    reasons |= set(re.findall(r'"reason", "(\w+)"', source))
    reasons |= set(re.findall(r'raise Diverged\(\s*"(\w+)"', source))
    assert {"finished", "nonfinite", "drift", "data", "save_failed"} <= reasons
    missing = [reason for reason in reasons if reason not in told]
    assert not missing, "why a run stopped: a row for each of these is missing"
    stopping = [
        file
        for file in files
        if re.search(r"\b(view|run)\.stop\(", file.read_text())
        and "(Callback):" in file.read_text()
    ]
    assert [file.stem for file in stopping if file.stem == "best"]
    for file in stopping:
        keys = re.findall(r"\n    keys = \(([^)]*)\)", file.read_text())
        named = re.findall(r'"([\w.]+)"', " ".join(keys))
        assert any(f"`{key}" in section("Why a run stopped") for key in named), (
            f"{file.stem} stops a run: name its key under 'Why a run stopped'"
        )
