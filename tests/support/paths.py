"""Where the tests' files lie, whatever folder a test module is in."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent  # of the repository
CONFIGS = ROOT / "configs"
DOCS = ROOT / "docs"
DATA = TESTS / "data"
GOLDEN = TESTS / "golden"
HLO = TESTS / "hlo"
