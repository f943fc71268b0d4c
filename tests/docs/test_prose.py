"""How the pages, the help and the meanings of keys read, as far as it can be counted."""

import ast
import runpy

import pytest

from jaxdist.models import registry
from jaxdist.trainer.run_config import full_schema
from support.paths import ROOT

PROSE = runpy.run_path(str(ROOT / "docs/prose.py"))
PAGES = [path.relative_to(ROOT).as_posix() for path in PROSE["pages"]()]


def faults(name: str, page: str) -> list[str]:
    return [
        f"{name}:{fault.line}: {fault.rule}: {fault.text}"
        for fault in PROSE["faults_of_page"](name, page)
    ]


BAD = {
    "26 words in a sentence": "word " * 25 + "ends.",
    "begins with What": "What is lost is lost.",
    'says "cure"': "There is a cure for it.",
    "13 words in a cell": "| a |\n|---|\n| " + "word " * 13 + "|",
    "6 columns": "| a | b | c | d | e | f |\n|---|---|---|---|---|---|",
    "a date outside": "It ran on 20 November 2026.",
    "a path or name of a test": "See `tests/docs/test_prose.py`.",
    "columns wide": "a" * 101,
    "heading begins so": "## What it does",
}


@pytest.mark.parametrize("rule", BAD)
def test_each_rule_finds_its_fault(rule):
    page = f"# Title\n\nStatus: tested on emulated CPU devices\n\n{BAD[rule]}\n"
    found = faults("docs/how-to/page.md", page)
    assert any(rule in fault for fault in found), found
    assert not faults("docs/how-to/page.md", "# T\n\nStatus: tested\n\nIt is short.\n")


def test_a_page_of_one_job_opens_with_its_status():
    (found,) = faults("docs/how-to/page.md", "# Title\n\nText.\n")
    assert "no line `Status: ...`" in found


def test_code_and_comments_are_not_prose():
    page = f"# T\n\nStatus: x\n\n```text\n{'word ' * 15}\nWhat\n```\n\n<!-- cure -->\n"
    assert not faults("docs/how-to/page.md", page)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_plainly(name):
    found = faults(name, (ROOT / name).read_text())
    assert not found, "\n".join(found)


def test_the_meaning_of_each_key_reads_plainly():
    schema = full_schema(registry.DEFAULT_TARGET)
    assert len(schema) > 150
    found = [
        f"{path}: {fault.rule}: {fault.text}"
        for path, field in schema.items()
        for fault in PROSE["faults_of_meaning"](field.doc)
    ]
    assert not found, "\n".join(found)


def texts_in(file) -> list[tuple[int, str]]:
    """Returns the texts of a module that are no docstrings, with their lines."""
    tree = ast.parse(file.read_text())
    passed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed.update(id(value) for value in node.values)
        elif isinstance(node, ast.Expr):
            passed.add(id(node.value))
    found = []
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [
                v.value if isinstance(v, ast.Constant) else "X" for v in node.values
            ]
            found.append((node.lineno, "".join(parts)))
    return found


def test_messages_have_the_words_of_the_field():
    texts = [
        (f"{file.relative_to(ROOT)}:{line}", text)
        for file in (ROOT / "jaxdist").rglob("*.py")
        for line, text in texts_in(file)
        if " " in text
    ]
    assert len(texts) > 2000
    found = [
        f"{where}: {word[0]!r}: {text}"
        for where, text in texts
        for word in PROSE["BANNED_WORDS"].finditer(text)
    ]
    assert not found, "\n".join(found)
