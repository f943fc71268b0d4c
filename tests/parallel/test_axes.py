"""The table of mesh axes, and that nobody else lists axes by hand."""

import ast
import dataclasses

import pytest

from jaxdist.parallel import axes
from jaxdist.parallel.mesh import DcnConfig, MeshConfig
from support.paths import ROOT


def hand_written(source: str) -> list[int]:
    """Returns the lines of tuples, lists and sets with two axes or more by name, but of
    PartitionSpecs.
    """
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    specs = {
        id(inner)
        for call in calls
        if getattr(call.func, "id", "") in ("P", "PartitionSpec")
        for inner in ast.walk(call)
    }
    lines = []
    for node in ast.walk(tree):
        entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        named = {
            getattr(entry, "value", entry)
            for entry in entries
            if isinstance(entry, ast.Constant)
        }
        if id(node) not in specs and len(named & set(axes.AXES)) > 1:
            lines.append(node.lineno)
    return lines


def test_no_other_module_lists_axes():
    files = {file: file.read_text() for file in (ROOT / "jaxdist").rglob("*.py")}
    assert len(files) > 100
    faults = {
        str(file.relative_to(ROOT)): hand_written(text) for file, text in files.items()
    }
    faults = {name: lines for name, lines in faults.items() if lines}
    assert not faults, f"derive these from parallel/axes.py: {faults}"


@pytest.mark.parametrize(
    ("source", "is_list"),
    [
        ("x = ('data', 'fsdp')", True),
        ("x = [f(a) for a in ['pipeline', 'tensor']]", True),
        ("x = {'context': 1, 'expert': 2}", True),
        ("x = ('data', 'step')", False),
        ("x = P(('data', 'fsdp'), 'tensor')", False),
        ("x = sizes['data'] * sizes['fsdp']", False),
    ],
)
def test_a_list_of_axes_is_found(source, is_list):
    assert bool(hand_written(source)) == is_list


def test_configs_have_the_axes_of_the_table_in_its_order():
    for config in (MeshConfig, DcnConfig):
        assert (
            tuple(field.name for field in dataclasses.fields(config))[: len(axes.AXES)]
            == axes.AXES
        )


def test_what_the_table_says():
    assert set(axes.CHATTY_AXES) | set(axes.CROSSING_AXES) == set(axes.AXES)
    assert axes.CROSSING_AXES[0] == axes.REST_AXIS == "data", (
        "slices go on data, if nothing else is said"
    )
    assert set(axes.BATCH_AXES) | set(axes.SEQUENCE_AXES) | set(axes.STATE_AXES) == set(
        axes.AXES
    )
    rank = [axis.keeps for axis in axes.TABLE]
    assert sorted(rank) == list(range(len(rank))), "each axis has a rank of its own"


@pytest.mark.parametrize("number", [1, 2, 12, 97])
def test_divisors(number):
    assert [number // n for n in axes.divisors(number)] == axes.divisors(number)[::-1]
