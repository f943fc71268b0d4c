"""JSON from elsewhere: every text is read or is Malformed, nothing else."""

import contextlib
import io
import json
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.storage import untrusted
from jaxdist.storage.untrusted import (
    MAX_DEPTH,
    Malformed,
    bounded_lines,
    of_kind,
    parse_json,
    read_json,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
)


@given(VALUES)
def test_reads_what_json_writes(value):
    assert parse_json(json.dumps(value), object) == value


@given(st.text() | st.binary())
def test_any_other_text_is_malformed(text):
    with contextlib.suppress(Malformed):
        parse_json(text, object)


@given(
    st.lists(st.text("ab", max_size=12).map(str.encode)),
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 9),
)
def test_lines_are_those_of_the_file_or_none(lines, ends, block_bytes, max_bytes):
    text = b"\n".join(lines) + b"\n" * ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted, "_BLOCK_BYTES", block_bytes)
        found = list(bounded_lines(io.BytesIO(text), max_bytes))
        wanted = list(
            bounded_lines(io.BytesIO(text), max_bytes, lambda text: b"b" in text)
        )
    expected = [line if len(line) <= max_bytes else None for line in text.split(b"\n")]
    # blank lines are no rows
    assert [line for line in found if line != b""] == [
        line for line in expected if line != b""
    ]
    with_b = [line for line in found if line is not None and b"b" in line]
    assert [line for line in wanted if line is not None and b"b" in line] == with_b


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    file = tmp_path / "long"
    with file.open("wb") as stream:
        stream.write(b"first\n")
        stream.truncate(256 << 20)  # zeros, which take no room on the disk
        stream.seek(0, 2)
        stream.write(b"\nlast\n")
    tracemalloc.start()
    with file.open("rb") as stream:
        found = list(bounded_lines(stream, 1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[:3] == [b"first", None, b"last"]
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "deep"),
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "deep"),
        ("1" + "0" * 400, "401 digits"),
        ("1" + "0" * 10_000, "10001 digits"),
        (b'"\xff"', "JSON"),
        ("", "JSON"),
        ("{} {}", "JSON"),
    ],
)
def test_each_hostile_text_is_malformed(text, reason):
    with pytest.raises(Malformed, match=reason):
        parse_json(text, object)


def test_the_deepest_allowed_text_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert sys.getrecursionlimit() > MAX_DEPTH
    assert json.dumps(parse_json(text, list)) == text


@pytest.mark.parametrize(
    ("value", "kind"), [([], dict), (True, int), ("1", int), (None, str)]
)
def test_another_kind_is_malformed(value, kind):
    with pytest.raises(
        Malformed, match=f"{type(value).__name__}; required: {kind.__name__}"
    ):
        of_kind(value, kind)


def test_a_file_over_the_limit_is_malformed_before_it_is_read_whole(tmp_path):
    file = tmp_path / "large.json"
    file.write_text("[" + "1," * 100 + "1]")
    assert len(read_json(file, list)) == 101
    with pytest.raises(Malformed, match="more than 100 bytes"):
        read_json(file, list, max_bytes=100)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", dict)
