"""The recipes of docs/how-to, run as they stand on the pages."""

import re

import jax
import pytest

from support.paths import ROOT

PAGE = (ROOT / "docs/how-to/recipes.md").read_text()
SECTIONS = PAGE.split("\n## ")
TITLES = [section.partition("\n")[0] for section in SECTIONS[1:]]
GAN = (ROOT / "docs/how-to/gan.md").read_text()


def blocks(section: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Returns a function that runs a recipe, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(title: str) -> str:
        if title == "A GAN":
            code = blocks(GAN)
        else:
            (section,) = [text for text in SECTIONS if text.startswith(f"{title}\n")]
            code = blocks(SECTIONS[0]) + blocks(section)
        names = {"__name__": "recipe"}
        with jax.numpy_rank_promotion("allow"):  # as outside of the tests
            exec(code, names)
        return capsys.readouterr().out

    return run


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d*", text)]


def line_of(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


@pytest.mark.slow
def test_preference_optimisation(said):
    first, last = numbers(
        line_of(said("Preference optimization by hand"), "preference")
    )
    assert first == 0.693
    assert last < 0.5 * first


@pytest.mark.slow
def test_distillation(said):
    first, last = numbers(line_of(said("Distillation"), "divergence"))
    assert last < 0.3 * first


def test_a_gan(said):
    x, y, *_ = numbers(line_of(said("A GAN"), "mean of samples"))
    assert abs(x - 2) < 1
    assert abs(y - 2) < 1


@pytest.mark.slow
def test_logits_of_a_trained_run(said):
    text = said("Logits of a trained run")
    assert "next [ 6 14]" in text
    assert numbers(line_of(text, "of 4 after 3:"))[0] > -0.5
    assert "Transformer" in text.splitlines()


def test_every_recipe_is_run():
    tested = [
        "Preference optimization by hand",
        "Distillation",
        "Logits of a trained run",
    ]
    assert tested == TITLES
