"""The site: its navigation has every page, and its pictures are drawn from their data."""

import re
import runpy

import pytest
import yaml

from support.paths import ROOT

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(entry) -> list[str]:
    """Returns the pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages_of(value)]


def test_the_navigation_has_every_page_once():
    listed = pages_of(SITE["nav"])
    assert len(listed) > 40
    written = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(written)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, and those that it names itself."""
    found = set(re.findall(r'<a (?:name|id)="([\w-]+)"', text))
    body = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", body, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = re.sub(r"[^\w\s-]", "", shown).strip().lower()
        found.add(re.sub(r"[\s]+", "-", kept))
        found.add(re.sub(r"[-\s]+", "-", kept))
    return found


PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_to_headings_lead_to_one(page):
    faults = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        linked = page.parent / target if target else page
        if linked.suffix == ".md" and anchor not in anchors(linked.read_text()):
            faults.append(f"{target}#{anchor}")
    assert not faults


def test_pictures_are_drawn_from_their_data():
    drawn = runpy.run_path(str(DOCS / "images/tutorials.py"))["draw_all"]()
    assert len(drawn) > 5
    drawn["overview"] = runpy.run_path(str(DOCS / "images/overview.py"))["draw"]()
    old = [
        n for n, svg in drawn.items() if (DOCS / f"images/{n}.svg").read_text() != svg
    ]
    assert not old, "run python docs/images/tutorials.py and overview.py"
