"""The typed configuration: schemas, conversions, overrides, files, help, diff and
fingerprint.
"""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Interval, Len, MultipleOf
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from jaxdist import config
from jaxdist.config import annotations, files, schema
from jaxdist.config.annotations import NamesWeights, Needs, Resume, Searched
from jaxdist.models import registry
from jaxdist.trainer import run_config


@dataclasses.dataclass(frozen=True)
class Batch:
    global_size: int = 8  # sequences per step, >= 1
    sequence_length: int = 16
    """not a comment"""

    def __post_init__(self):
        if self.global_size < 1:
            raise ValueError(f"global_size={self.global_size} must be >= 1. Raise it.")

    def scaled(
        self,
        global_size: int = 0,  # a method's parameter must not become the field's doc
    ) -> int:
        return self.global_size


@dataclasses.dataclass(frozen=True)
class Base:
    seed: int = 0  # for everything random


@dataclasses.dataclass(frozen=True)
class Run(Base):
    # per update, > 0; a meaning so long
    # that it stands above
    rate: float = 1e-3
    dims: tuple[int, ...] = (1, 2)
    pair: tuple[str, float] = ("a", 1.0)
    names: tuple[str, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    policy: Literal["dots", "none", "full"] = "dots"  # what is kept
    limit: float | None = None  # minutes
    resume: bool = True
    name: str = "x"
    batch: Batch = dataclasses.field(default_factory=Batch)
    model: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    rate: annotations.PositiveFloat = 1e-3  # of it
    decay: Annotated[float, Interval(ge=0, lt=1)] | None = None
    steps: annotations.PositiveInt | Literal[-1] = -1
    shape: Annotated[tuple[annotations.NonNegativeInt, ...], Len(1)] = (0,)
    heads: Annotated[int, MultipleOf(8)] = 8
    kind: Literal["adam", "sgd"] = "adam"
    free: float = float("inf")  # a number without a range may be anything

    def faults(self) -> list[str]:
        return ["steps and heads differ"] * (self.steps == 2)


@dataclasses.dataclass(frozen=True)
class Owner:
    optimizer: Optimizer
    on: bool = True
    model: Mapping[str, object] = dataclasses.field(default_factory=dict)


class Net:
    def __init__(self, width: int, depth: int = 2, *, rngs: object = None, **more: int):
        pass


SCHEMA = schema.schema_of(Run)


def faults_of(function, *args, **kwargs) -> tuple[str, ...]:
    with pytest.raises(config.ConfigError) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == "\n".join(caught.value.faults)
    return caught.value.faults


def test_schema_holds_leaves_in_source_order_with_their_comments():
    assert list(SCHEMA)[:3] == ["seed", "rate", "dims"]
    assert SCHEMA["batch.global_size"] == schema.Field(
        "batch.global_size", int, 8, Batch
    )
    assert SCHEMA["batch.global_size"].doc == "sequences per step, >= 1"
    assert SCHEMA["seed"].doc == "for everything random"  # inherited
    assert (
        SCHEMA["rate"].doc == "per update, > 0; a meaning so long that it stands above"
    )
    assert SCHEMA["batch.sequence_length"].doc == ""
    assert "batch" not in SCHEMA
    assert not any(path.startswith("model") for path in SCHEMA)


def test_an_owners_default_beats_the_groups_own():
    @dataclasses.dataclass(frozen=True)
    class Owner:
        batch: Batch = Batch(global_size=64)

    assert schema.schema_of(Owner)["batch.global_size"].default == 64
    assert schema.from_config_dict(Owner, {}) == Owner()


@dataclasses.dataclass(frozen=True)
class Marked:
    free: Annotated[annotations.PositiveInt, Resume("harmless")] = 1
    kind: Annotated[Literal["adam", "sgd"], Searched(), Needs("a.B")] = "adam"
    limit: Annotated[annotations.PositiveInt | None, Resume("refused")] = None


@dataclasses.dataclass(frozen=True)
class MarkedOwner:
    plain: Marked = dataclasses.field(default_factory=Marked)
    group: Annotated[Marked, Resume("harmless"), Needs("c.D")] = Marked(free=2)


def test_marks_are_read_and_a_keys_own_come_before_its_groups():
    fields = schema.schema_of(MarkedOwner)
    free = {path for path, field in fields.items() if field.may_change_on_resume}
    assert free == {"plain.free", "group.free", "group.kind"}
    searched = {path for path, field in fields.items() if field.searched}
    assert searched == {"plain.kind", "group.kind"}
    assert {path: field.callback for path, field in fields.items()} == {
        "plain.free": "",
        "plain.kind": "a.B",
        "plain.limit": "",
        "group.free": "c.D",
        "group.kind": "a.B",
        "group.limit": "c.D",
    }
    assert fields["plain.limit"].mark(NamesWeights) is None


def test_marks_change_neither_types_nor_messages():
    fields = schema.schema_of(MarkedOwner)
    assert fields["plain.kind"].type == Literal["adam", "sgd"]
    assert fields["plain.free"].type == annotations.PositiveInt
    assert fields["group.free"].default == 2
    assert faults_of(schema.parse_value, "adm", fields["group.kind"]) == (
        "group.kind: got 'adm', required one of adam, sgd. Did you mean adam?",
    )
    assert schema.faults(MarkedOwner(Marked(free=0, limit=0))) == [
        "plain.free: got 0, required int >= 1.",
        "plain.limit: got 0, required int >= 1 or none.",
    ]
    assert schema.from_config_dict(MarkedOwner, {}) == MarkedOwner()


def test_parameters_of_a_plain_class_have_marks_too():
    class Plain:
        def __init__(self, width: int, block: Annotated[int, Resume("harmless")] = 1):
            pass

    fields = schema.schema_of(Plain)
    assert fields["block"].type is int
    assert fields["block"].may_change_on_resume
    assert not fields["width"].may_change_on_resume


def test_schema_of_a_plain_class_reads_its_init():
    fields = schema.schema_of(Net, "model.")
    assert {path: field.default for path, field in fields.items()} == {
        "model.width": schema.MISSING,
        "model.depth": 2,
    }
    assert faults_of(schema.resolve, {}, fields) == (
        "model.width: not set, required int.",
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rate": 0.0}, "optimizer.rate: got 0.0, required float > 0. Meaning: of it."),
        (
            {"rate": math.nan},
            "optimizer.rate: got nan, required float > 0, finite. Meaning: of it.",
        ),
        (
            {"rate": math.inf},
            "optimizer.rate: got inf, required float > 0, finite. Meaning: of it.",
        ),
        (
            {"rate": 10**400},
            f"optimizer.rate: got {10**99}... (401 characters), required float > 0. Meaning: of it.",
        ),
        (
            {"rate": True},
            "optimizer.rate: got True, required float > 0. Meaning: of it.",
        ),
        (
            {"decay": 1.0},
            "optimizer.decay: got 1.0, required float >= 0 and < 1 or none.",
        ),
        ({"steps": 0}, "optimizer.steps: got 0, required int >= 1 or -1."),
        ({"steps": 1.0}, "optimizer.steps: got 1.0, required int >= 1 or -1."),
        (
            {"shape": ()},
            "optimizer.shape: got (), required tuple of int >= 0 of length >= 1.",
        ),
        ({"heads": 4}, "optimizer.heads: got 4, required int a multiple of 8."),
        (
            {"kind": "adm"},
            "optimizer.kind: got 'adm', required one of adam, sgd. Did you mean adam?",
        ),
        ({"steps": 2}, "steps and heads differ"),
    ],
)
def test_faults_say_the_value_and_its_range(change, fault):
    legal = Optimizer(rate=1, decay=0.0, steps=10**18, shape=(1, 2), heads=16)
    assert schema.faults(Owner(Optimizer())) == schema.faults(Owner(legal)) == []
    assert schema.faults(Owner(Optimizer(**change))) == [fault]


def test_all_values_out_of_range_come_at_once_with_the_rules_between_values():
    wrong = Owner(Optimizer(rate=-1.0, steps=2, shape=(1, -1)), on=1)  # type: ignore[arg-type]
    starts = [
        "optimizer.rate: got -1.0",
        "optimizer.shape: got (1, -1)",
        "on: got 1",
        "steps and heads",
    ]
    assert [
        fault[: len(start)]
        for fault, start in zip(schema.faults(wrong), starts, strict=True)
    ] == starts


def test_ranges_are_for_faults_and_types_for_parsing():
    fields = schema.schema_of(Optimizer)
    # reported with all other faults, later
    assert schema.parse_value("-3", fields["rate"]) == -3.0
    assert faults_of(schema.parse_value, "x", fields["rate"]) == (
        "rate: got 'x', required float > 0. Meaning: of it.",
    )
    assert schema.parse_value("1,2", fields["shape"]) == (1, 2)


def test_config_dict_round_trip():
    tree = schema.to_config_dict(
        Run(dims=(3,), model={"d_model": 4, "moe": {"experts": 2}})
    )
    assert tree.is_locked
    assert tree.batch.is_locked
    assert tree.dims == (3,)
    assert tree.model.moe.experts == 2
    tree.limit = 2.5  # None accepts any type
    assert tree.limit == 2.5
    back = schema.from_config_dict(Run, tree)
    assert back == Run(
        dims=(3,), limit=2.5, model={"d_model": 4, "moe": {"experts": 2}}
    )


def test_json_round_trip_restores_tuples_and_floats():
    run = Run(rate=2.0, limit=3.0)
    text = json.dumps(schema.to_config_dict(run).to_dict())
    assert schema.from_config_dict(Run, json.loads(text)) == run
    assert isinstance(schema.from_config_dict(Run, {"rate": 1}).rate, float)


def test_from_config_dict_reports_all_faults_at_once():
    given_ = {"sed": 1, "rate": "fast", "batch": {"global_sizes": 1}, "dims": (1, "a")}
    assert faults_of(schema.from_config_dict, Run, given_) == (
        "sed: no such field. Did you mean seed?",
        "batch.global_sizes: no such field. Did you mean batch.global_size?",
        "rate: got 'fast', required float.",
        "dims: got (1, 'a'), required tuple of int.",
    )


def test_a_components_own_refusal_is_a_fault_of_its_group():
    assert faults_of(schema.from_config_dict, Run, {"batch": {"global_size": 0}}) == (
        "batch: global_size=0 must be >= 1. Raise it.",
    )


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "7", 7),
        ("seed", "-1", -1),
        ("seed", "1e6", 1_000_000),
        ("rate", "3", 3.0),
        ("rate", "1e-4", 1e-4),
        ("rate", "inf", float("inf")),
        ("dims", "4", (4,)),
        ("dims", "4,5", (4, 5)),
        ("dims", "(4, 5)", (4, 5)),
        ("dims", "()", ()),
        ("dims", "", ()),
        ("dims", "1e3, 2", (1000, 2)),
        ("pair", "b,2", ("b", 2.0)),
        ("names", "query,value", ("query", "value")),
        ("names", "1,none", ("1", "none")),
        ("names", "mlp/.*", ("mlp/.*",)),
        ("names", r"x{1,2}/(a|b,c)[,(]\,,y", (r"x{1,2}/(a|b,c)[,(]\,", "y")),
        ("names", '"(a|b){1,2}"', ("(a|b){1,2}",)),
        ("names", "('a,b', 'c')", ("a,b", "c")),
        ("names", '["a"]', ("a",)),
        ("rules", "(('a', 'b'),)", (("a", "b"),)),
        ("rules", "('a', 'b')", (("a", "b"),)),
        ("policy", "none", "none"),
        ("limit", "none", None),
        ("limit", "5", 5.0),
        ("resume", "false", False),
        ("resume", "1", True),
        ("resume", "No", False),
        ("name", "none", "none"),
        ("name", "1", "1"),
        ("name", "runs/a,b", "runs/a,b"),
    ],
)
def test_parse_value(path, text, value):
    parsed = schema.parse_value(text, SCHEMA[path])
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("seed", "1.5", "seed: got '1.5', required int."),
        ("seed", "true", "seed: got 'true', required int."),
        ("rate", "abc", "rate: got 'abc', required float."),
        (
            "dims",
            '(4,"a")',
            'dims: got \'(4,"a")\', required tuple of int, such as 1,2 or "(1, 2)".',
        ),
        (
            "pair",
            "b",
            "pair: got 'b', required tuple (str, float), such as a,1.5 or "
            "\"('a', 1.5)\".",
        ),
        (
            "rules",
            "((",
            "rules: got '((', required tuple of tuple (str, str), such as "
            "\"(('a', 'b'),)\".",
        ),
        ("resume", "2", "resume: got '2', required true or false."),
        ("limit", "x", "limit: got 'x', required float or none. Meaning: minutes."),
        (
            "policy",
            "dot",
            "policy: got 'dot', required one of dots, none, full. Did you mean dots?",
        ),
    ],
)
def test_parse_value_says_what_is_required(path, text, fault):
    assert faults_of(schema.parse_value, text, SCHEMA[path]) == (fault,)


TUPLES = {
    path: field
    for path, field in run_config.full_schema(registry.DEFAULT_TARGET).items()
    if "tuple" in annotations.describe(field.type)
}


@pytest.mark.parametrize(
    "text", ["((", "(", "(1", "[1", ",", "a,,b", ",a", '"a', "a,'b", "a(,b", "a),b"]
)
@pytest.mark.parametrize("path", TUPLES)
def test_a_text_that_is_no_tuple_is_refused_for_every_key_with_tuples(path, text):
    (fault,) = faults_of(schema.parse_value, text, TUPLES[path])
    assert fault.startswith(f"{path}: got {text!r}, required tuple ")
    form = fault.partition(", such as ")[2]
    assert form
    # the form that the error shows is one that parses
    shown = form[form.index('"') + 1 :].partition('"')[0]
    assert schema.parse_value(shown, TUPLES[path])


def test_there_are_keys_with_tuples():
    assert {"sharding.rules", "lora.targets", "train.loggers"} <= TUPLES.keys()


@given(
    st.lists(st.text())
    | st.text()
    | st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.none()
)
def test_what_a_flag_is_written_as_is_read_back(value):
    kinds = {list: tuple[str, ...], type(None): float | None}
    kind = kinds.get(type(value), type(value))
    expected = tuple(value) if isinstance(value, list) else value
    assert annotations.parse(annotations.flag_text(expected), kind) == expected


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1)), st.floats(allow_nan=False), st.text()
)
def test_what_python_prints_is_read_back(dims, rate, name):
    assert schema.parse_value(repr(tuple(dims)), SCHEMA["dims"]) == tuple(dims)
    assert schema.parse_value(repr(rate), SCHEMA["rate"]) == rate
    assert schema.parse_value(repr(name), SCHEMA["name"]) == name


@pytest.mark.parametrize(
    ("path", "hint"),
    {
        "optimizer.lr": " Did you mean optimizer.learning_rate?",
        "optim.wd": " Did you mean optimizer.weight_decay?",
        "optimizer.beta2": " Did you mean optimizer.b2?",
        "precision.dtype": " There are precision.params, precision.compute.",
        "optimizer.xyz": " There are optimizer.learning_rate, optimizer.weight_decay, optimizer.b2.",
    }.items(),
)
def test_an_unknown_key_gets_a_field_like_it_or_those_beside_it(path, hint):
    known = ["optimizer.learning_rate", "optimizer.weight_decay", "optimizer.b2"]
    known += ["precision.params", "precision.compute"]
    assert schema.unknown_field(path, known) == f"{path}: no such field.{hint}"


def test_overrides_apply_together_or_not_at_all():
    tree = schema.to_config_dict(Run())
    bad = {"seed": "5", "stps": "1", "batch": "4", "rate": "x", "global_size": "1"}
    assert faults_of(files.apply_overrides, tree, bad, SCHEMA) == (
        "stps: no such field. --help with this --config lists all fields.",
        "batch: is a group. Set one of its fields: batch.global_size, batch.sequence_length.",
        "rate: got 'x', required float.",
        "global_size: no such field. Did you mean batch.global_size?",
    )
    assert tree == schema.to_config_dict(Run())
    files.apply_overrides(tree, {"limit": "3", "batch.global_size": "4"}, SCHEMA)
    files.apply_overrides(tree, {"limit": "none"}, SCHEMA)
    assert tree.limit is None
    assert tree.batch.global_size == 4
    assert tree.is_locked


def test_overrides_of_fields_the_file_left_at_their_defaults():
    tree = ConfigDict({"model": {"target": "Net"}}).lock()
    fields = schema.schema_of(Net, "model.") | schema.schema_of(Batch, "batch.")
    files.apply_overrides(tree, {"model.depth": "9", "batch.global_size": "2"}, fields)
    assert tree.model.depth == 9
    assert tree.batch.global_size == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "quick_start.py").write_text(
        "import dataclasses\nfrom ml_collections import ConfigDict\n"
        "def get_config(arg=None):\n    return ConfigDict({'arg': arg, 'steps': 1})\n"
    )
    (tmp_path / "plain.py").write_text("def get_config():\n    return 3\n")
    (tmp_path / "broken.py").write_text(
        "from jaxdist import config\nfrom ml_collections import ConfigDict\n"
        "def get_config():\n    c = ConfigDict({'train': {'steps': 1, 'x': 'y' * 999}}).lock()\n"
        "    c.train.stepz = 2\n"
    )
    (tmp_path / "unset.py").write_text(
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict().lock().trian\n"
    )
    (tmp_path / "syntax.py").write_text("def get_config(:\n")
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def test_load_by_name_and_by_path(folder, monkeypatch):
    loaded = files.load("quick-start", folders=[folder])
    assert loaded.is_locked
    assert loaded.arg is None
    assert files.load("quick_start:a=1,b:c", folders=[folder]).arg == "a=1,b:c"
    path = str(folder / "quick_start.py")
    assert files.load(f"{path}:tiny", folders=[]).arg == "tiny"
    monkeypatch.chdir(folder)
    assert files.load("quick_start.py", folders=[]).steps == 1


def test_load_accepts_a_dataclass(tmp_path):
    (tmp_path / "typed.py").write_text(
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass C:\n    steps: int = 3\n"
        "def get_config():\n    return C()\n"
    )
    assert files.load("typed", folders=[tmp_path]).steps == 3


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (
            "quickstart",
            "no packaged config 'quickstart'. Did you mean quick_start? There are: ",
        ),
        ("a/nope.py", "no such file: "),
        ("plain:x", "plain.py takes no argument. Remove ':x'."),
        ("plain", "get_config returned int, not a ConfigDict."),
        ("empty", "no get_config. Define get_config(argument=None) -> ConfigDict."),
        (
            "broken",
            "broken.py:5: c.train.stepz = 2: no such field 'stepz'. Did you mean steps?",
        ),
        (
            "unset",
            "unset.py:3: return ConfigDict().lock().trian: no such field 'trian'. --config NAME --help",
        ),
        ("syntax", "syntax.py:1: SyntaxError: "),
    ],
)
def test_load_says_what_is_wrong(folder, spec, fault):
    (found,) = faults_of(files.load, spec, folders=[folder])
    assert fault in found
    assert len(found) < 250 + len(str(folder))


def test_packaged_folders_exist_in_a_checkout():
    (folder,) = files.packaged_folders()
    assert folder.name in ("configs", "_configs")


def test_help_lists_every_field_with_type_value_and_meaning():
    text = files.help_text(schema.to_config_dict(Run(seed=4)), SCHEMA, width=1000)
    lines = text.splitlines()
    assert len(lines) == len(SCHEMA)
    assert lines[0].split() == [
        "--config.seed",
        "int",
        "=",
        "4",
        "for",
        "everything",
        "random",
    ]
    assert any("one of dots, none, full  = 'dots'" in line for line in lines)


def test_help_says_what_may_change_on_resume():
    text = files.help_text({}, schema.schema_of(MarkedOwner), width=1000)
    ends = {line.split()[0]: line.endswith(" resume)") for line in text.splitlines()}
    assert ends["--config.group.free"]
    assert not ends["--config.group.limit"]


def test_help_is_wrapped_at_the_width_and_loses_nothing():
    run = schema.to_config_dict(Run())
    whole, narrow = (files.help_text(run, SCHEMA, width=width) for width in (1000, 48))
    assert max(map(len, whole.splitlines())) > 48
    assert max(map(len, narrow.splitlines())) <= 48
    assert narrow.split() == whole.split()


def test_help_lists_the_fields_with_a_text():
    def paths(words):
        text = files.help_text(
            schema.to_config_dict(Run()), SCHEMA, words=words, width=1000
        )
        return [line.split()[0].removeprefix("--config.") for line in text.splitlines()]

    by_path = [path for path in SCHEMA if "batch" in path]
    assert paths("batch") == paths("--config.BATCH") == by_path
    assert 0 < len(by_path) < len(SCHEMA)
    assert paths("everything random") == ["seed"]
    (fault,) = faults_of(files.help_text, {}, SCHEMA, words="bathc")
    assert fault.startswith("--help bathc: no field has this")
    assert "Did you mean" in fault


def test_diff_names_changed_added_and_removed_paths():
    old, new = {"a": {"b": (1, 2)}, "c": 1}, {"a": {"b": [1, 2]}, "c": 2, "d": None}
    changes = schema.diff(old, new)
    assert changes == [
        schema.Change("c", 1, 2),
        schema.Change("d", schema.MISSING, None),
    ]
    assert [str(change) for change in changes] == ["c: 1 -> 2", "d: (absent) -> None"]


def test_flatten_and_unflatten_are_inverse():
    nested = {"a": {"b": 1, "c": {"d": (2,)}}, "e": None}
    assert schema.flatten(nested) == {"a.b": 1, "a.c.d": (2,), "e": None}
    assert schema.unflatten(schema.flatten(nested)) == nested
    assert schema.flatten(schema.flatten(nested)) == schema.flatten(nested)


def test_fingerprint_sees_values_and_not_order_or_nesting():
    one = {"mesh.data": 1, "seed": 0, "dims": (1, 2)}
    print_of = schema.fingerprint
    assert print_of(one) == print_of(dict(reversed(one.items())))
    assert len(print_of(one)) == 64
    assert print_of(one) == print_of({**one, "dims": [1, 2]})  # as read back from JSON
    assert print_of(one) != print_of({**one, "seed": 1})
    assert print_of(one) != print_of({**one, "mesh.data": 2})
    nested = {"mesh": {"data": 1}, "seed": 0, "dims": (1, 2)}
    assert print_of(one) == print_of(nested)


def test_config_needs_no_jax():
    code = "import sys; from jaxdist.config import files, schema; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("value", "more"),
    [
        pytest.param(2**63, " of 64 bits", id="2**63"),
        pytest.param(-(2**63) - 1, " of 64 bits", id="-2**63-1"),
        pytest.param(10**5000, " of 64 bits", id="more digits than Python writes"),
        pytest.param(str(2**63), " of 64 bits", id="text"),
        pytest.param("1" * 5000, "", id="text of more digits than Python reads"),
    ],
)
def test_integers_have_64_bits(value, more):
    with pytest.raises(
        config.ConfigError, match=f"seed: got .*, required int{more}"
    ) as caught:
        schema.parse_value(value, SCHEMA["seed"]) if isinstance(value, str) else None
        schema.resolve({"seed": value}, SCHEMA)
    assert len(str(caught.value)) < 300
    assert schema.resolve({"seed": 2**63 - 1, "rate": 10**30}, SCHEMA)["rate"] == 1e30


@pytest.mark.parametrize(("name", "key"), config._ELSEWHERE.items())
def test_names_of_other_trainers_are_known(name, key):
    keys = run_config.full_schema(run_config.default_config().model.target)
    assert key in keys
    assert name not in {known.rpartition(".")[2] for known in keys}
    assert config.suggest(f"train.{name}", keys) == f" Did you mean {key}?"
    assert config.suggest(name, ["seed"]) == ""
