"""Counts what a machine can count of how the pages read.

`python docs/prose.py PAGE...` prints each fault with its line; without a page, those of
all pages. CONTRIBUTING.md has the rules. A test asserts that none is left.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS_OF_SENTENCE = 25
WORDS_OF_CELL = 12
COLUMNS = 5
WIDTH = 100

# The lab notebook, and pages that are dated because what they say ages.
NOTEBOOK = ("docs/evidence/", "benchmarks/")
DATED = (
    *NOTEBOOK,
    "docs/project/",
    "docs/coming-from/",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
WIDE_TABLES = (*NOTEBOOK, "docs/coming-from/", "docs/project/comparison.md")
GENERATED = "<!-- Written by"
TABLES_BEGIN = "<!-- chips -->"  # behind it stand rows of data
# Pages of one job that open with a status line.
WITH_STATUS = (
    "docs/get-started/",
    "docs/tutorials/",
    "docs/how-to/",
    "docs/explanation/",
)

FIRST_WORDS = re.compile(r"(Of|What|Where|Whose|Whether)\b")
BANNED = {
    "goes on": "resumes, continues",
    "go on": "resume, continue",
    "is refused": "fails, jaxdist rejects it",
    "are refused": "fail, jaxdist rejects them",
    "refuses": "rejects, fails",
    "cure": "fix",
    "lies": "is, is stored",
    "tells": "prints, reports",
    "shares out": "splits",
    "left out": "skipped, omitted",
    "leaves out": "skips, omits",
    "else": "otherwise",
    "anew": "again",
    "at hand": "available",
    "products": "matmuls",
    "so many": "say which",
    "as ever": "nothing: history is for the changelog",
    "no longer": "nothing: history is for the changelog",
    "ours": "jaxdist's",
    "a sign of life": "progress",
}
BANNED_WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = re.compile(
    rf"\b\d{{1,2}} ({_MONTH})\b|\b({_MONTH}) 20\d\d\b|\b20\d\d-\d\d-\d\d\b"
)
_TEST = re.compile(r"\btests/\w|\btest_\w+")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])[)\"”]?\s+(?=[A-Z0-9`(\"“\[*])")
# Full stops that end no sentence.
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|Dr|al|approx|Fig)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A place that breaks a rule."""

    line: int  # of the page, from 1
    rule: str
    text: str


@dataclass(frozen=True)
class Block:
    """A paragraph, an item of a list, a heading or a row of a table."""

    line: int
    kind: str  # "text", "heading" or "row"
    text: str


def plain(text: str) -> str:
    """Makes the words that a reader sees of Markdown: code is one word, a link its text."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`+[^`]*`+", "`code`", text)
    text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<[^>]+>|https?://\S+", "", text)
    text = _ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    return re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)


def words(text: str) -> int:
    """Counts the words of plain text: what holds a letter or a digit."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def sentences(text: str) -> list[str]:
    """Splits plain text where a sentence ends."""
    return [sentence for sentence in _SENTENCE_ENDS.split(text.strip()) if sentence]


def blocks_of(page: str) -> Iterator[Block]:
    """Yields a page's blocks, without code, comments and front matter."""
    page = re.sub(
        r"<!--.*?-->|\A---\n.*?\n---\n",
        lambda found: "\n" * found[0].count("\n"),
        page,
        flags=re.DOTALL,
    )
    fence = ""
    held: list[str] = []
    start = 0
    for number, line in enumerate([*page.splitlines(), ""], 1):
        bare = line.strip()
        mark = re.match(r"(```+|~~~+)", bare)
        inside = bool(fence)
        if mark and not fence:
            fence = mark[1]
        elif mark and bare == mark[1] and len(bare) >= len(fence):
            fence = ""
        is_item = re.match(r"([-*+]|\d+\.)\s+|>|!!!|===|\?\?\?", bare)
        alone = not bare or bool(mark) or inside or bare.startswith(("#", "|"))
        if (alone or is_item) and held:
            yield Block(start, "text", " ".join(held))
            held = []
        if inside or mark or not bare:
            continue
        if bare.startswith("#"):
            yield Block(number, "heading", bare.lstrip("# "))
        elif bare.startswith("|"):
            yield Block(number, "row", bare)
        else:
            if not held:
                start = number
            held.append(
                re.sub(r"^([-*+]|\d+\.)\s+|^>\s*|^(!!!|===|\?\?\?\+?)\s*", "", bare)
            )


def faults_of_text(text: str, line: int = 0) -> Iterator[Fault]:
    """Yields the faults of a paragraph: long sentences, first words, banned words."""
    shown = plain(text)
    for sentence in sentences(shown):
        count = words(sentence)
        if count > WORDS_OF_SENTENCE:
            yield Fault(line, f"{count} words in a sentence", sentence)
        if FIRST_WORDS.match(sentence):
            yield Fault(line, f"begins with {sentence.split()[0]}", sentence)
    for found in BANNED_WORDS.finditer(shown):
        word = found[1].lower()
        yield Fault(line, f'says "{word}" (say: {BANNED[word]})', shown)


def faults_of_meaning(text: str) -> Iterator[Fault]:
    """Yields the faults of a config key's meaning; its legal values stand between `;`."""
    for phrase in re.split(r"[.;:] ", text):
        yield from faults_of_text(phrase)


def faults_of_row(row: Block, allow_wide: bool) -> Iterator[Fault]:
    """Yields the faults of a row of a table: its cells and their number."""
    cells = re.split(r"(?<!\\)\|", row.text.strip("|"))
    if all(re.fullmatch(r"\s*:?-*:?\s*", cell) for cell in cells):
        return
    if len(cells) > COLUMNS and not allow_wide:
        yield Fault(row.line, f"{len(cells)} columns", row.text)
    for cell in cells:
        shown = plain(cell.strip())
        if words(shown) > WORDS_OF_CELL:
            yield Fault(row.line, f"{words(shown)} words in a cell", shown)
        for found in BANNED_WORDS.finditer(shown):
            word = found[1].lower()
            yield Fault(row.line, f'says "{word}" (say: {BANNED[word]})', shown)


def faults_of_page(path: str, page: str) -> Iterator[Fault]:
    """Yields the faults of a page.

    Args:
        path: Its path from the project's root, which says what kind of page it is.
        page: Its text.
    """
    generated = GENERATED in page
    if generated and not path.endswith("python-api.md"):
        return  # what it was made from is checked
    if path.startswith(WITH_STATUS) and not re.search(r"\A# [^\n]+\n\nStatus: ", page):
        yield Fault(1, "no line `Status: ...` below its title", "")
    for block in blocks_of(page.partition(TABLES_BEGIN)[0]):
        if block.kind == "row":
            yield from faults_of_row(block, generated or path.startswith(WIDE_TABLES))
        elif block.kind == "heading":
            if FIRST_WORDS.match(plain(block.text)):
                yield Fault(block.line, "heading begins so", block.text)
        else:
            yield from faults_of_text(block.text, block.line)
        if not path.startswith(DATED):
            for pattern, rule in (
                (_DATE, "a date"),
                (_TEST, "a path or name of a test"),
            ):
                found = pattern.search(block.text)
                if found:
                    yield Fault(
                        block.line, f"{rule} outside of docs/evidence", found[0]
                    )
    fenced = False
    for number, line in enumerate(page.partition(TABLES_BEGIN)[0].splitlines(), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
        may_be_long = fenced or generated or line.lstrip().startswith("|")
        shown = re.sub(r"\]\([^)]*\)", "]", line)  # an address cannot be broken
        if len(shown) > WIDTH and not may_be_long:
            yield Fault(number, f"{len(line)} columns wide, more than {WIDTH}", line)
        if "fmt: skip" in line:
            yield Fault(number, "a mark for the formatter", line)


def pages() -> list[Path]:
    """Lists the pages that the rules hold for: all but the lab notebook."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    relative = [path.relative_to(ROOT).as_posix() for path in found]
    return [ROOT / path for path in sorted(relative) if not path.startswith(NOTEBOOK)]


def main(arguments: list[str]) -> int:
    """Prints the faults of pages; the exit code is 1 if there are any."""
    count = 0
    for path in [Path(a).resolve() for a in arguments] or pages():
        name = path.relative_to(ROOT).as_posix()
        for fault in faults_of_page(name, path.read_text()):
            count += 1
            print(f"{name}:{fault.line}: {fault.rule}: {fault.text[:160]}")
    print(f"{count} faults")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
