"""The planner reads what ops declare, and knows no field of a model's config."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from jaxdist.models.transformer_config import TransformerConfig
from jaxdist.models.vision import VisionConfig
from support.paths import ROOT

FILES = sorted((ROOT / "jaxdist" / "planner").glob("*.py"))
FIELDS = {
    field.name
    for config in (TransformerConfig, VisionConfig)
    for field in fields(config)
}
# A word alone may mean something else where it is a variable, but not as a string.
COMPOUND = {name for name in FIELDS if "_" in name}
# what the planner may read of a run's model: who it is, and all options as a key
OPEN = {"run.model['target']", "run.model.items()"}
_KEY = re.compile(r"\bmodel\.(\w+)")


def known_fields(tree: ast.AST) -> set[str]:
    """Returns the fields of a model's config that a module names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found |= {node.id} & COMPOUND
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & COMPOUND
        elif isinstance(node, ast.arg | ast.keyword):
            found |= {node.arg} & COMPOUND
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & FIELDS
            found |= {*_KEY.findall(node.value)} & FIELDS
    return found


def readings(tree: ast.AST) -> set[str]:
    """Returns the places where a module reads a run's model options, but OPEN ones."""
    found = set()
    allowed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Call):
            text = ast.unparse(node)
            if any(text.endswith(end) for end in OPEN):
                inner = node.value if isinstance(node, ast.Subscript) else node.func
                allowed |= {id(part) for part in ast.walk(inner)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in allowed:
            continue
        if node.attr in ("model_config", "model_options"):
            found.add(ast.unparse(node))
        if node.attr == "model" and ast.unparse(node.value).endswith("run"):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_file_knows_a_field_of_a_model_s_config(file: Path):
    tree = ast.parse(file.read_text())
    assert not known_fields(tree)
    assert not readings(tree)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ('run.model.get("window")', "window"),
        ("def share(head_dim: int): ...", "head_dim"),
        ("sizes.num_heads", "num_heads"),
        ('yield "model.loss_chunk=256"', "loss_chunk"),
    ],
)
def test_the_test_finds_them(source, field):
    assert known_fields(ast.parse(source)) == {field}
    assert readings(ast.parse("self.run.model.get(name)")) == {"self.run.model"}
    assert readings(ast.parse("getattr(run.model_config, name)")) == {
        "run.model_config"
    }
    assert not readings(ast.parse("(run.model['target'], sorted(run.model.items()))"))
