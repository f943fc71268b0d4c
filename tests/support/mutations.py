"""Malformed files made from sound ones: known tricks of a format, and edits by chance
from a seed.
"""

import copy
import functools
import gzip
import io
import json
import math
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

_DEEP, _HUGE = "@deep@", "@huge@"  # stand for texts that `json.dumps` cannot write
_LEVELS = 100_000
_RAW = {f'"{_DEEP}"': "[" * _LEVELS + "]" * _LEVELS, f'"{_HUGE}"': "1" + "0" * 5000}

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    255,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64,
    -(2**63) - 1,
    10**39,
    0.5,
    -0.0,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "x",
    "0",
    "-1",
    "1e999",
    "NaN",
    "\ud800",
    "\0",
    "..",
    "../x",
    "/dev/zero",
    "x" * 10_000,
    "a.b",
    "(((((a*)*)*)*)*)*b",
    "{}",
    [],
    [[]],
    [1, 2],
    ["x"],
    {},
    {"": {}},
    {"a": 1},
    {"a.b": 1},
    [None] * 1000,
    [0, [1, {"a": []}]],
    _DEEP,
    _HUGE,
)


class Format(NamedTuple):
    """How files of a kind are made wrong."""

    tricks: Callable[[bytes], list[bytes]]  # the same for each sound file
    edit: Callable[[bytes, Random], bytes]


@functools.lru_cache(1)
def tricks_of(format_: Format, sound: bytes) -> list[bytes]:
    """Returns all tricks of the format; those of the last file asked for are kept."""
    return format_.tricks(sound)


def malformed(format_: Format, sound: bytes, number: int, seed: str) -> bytes:
    """Returns the file of a number: a trick of the format while there are any, then a
    random edit.
    """
    tricks = tricks_of(format_, sound)
    return tricks[number] if number < len(tricks) else format_.edit(sound, Random(seed))


# --- flags ----------------------------------------------------------------------------

_SIGNS = "()[]{}\"',,\\ |.*1aé\n"


def _flag_tricks(sound: bytes) -> list[bytes]:
    texts = ["", "((", "(1", "[", ",", "a,", '"a', "a,'b", "()", "(),()", "\\", "a,\\"]
    texts += ["(" * 10_000, "a" * 10_000, "a," * 1_000, "9" * 10_000, "\0", "nan"]
    return [text.encode() for text in texts]


def _edit_flags(sound: bytes, random: Random) -> bytes:
    text = list(sound.decode())
    for _ in range(random.choice((1, 2, 8))):
        at = random.randrange(len(text) + 1)
        text[at : at + random.randrange(3)] = random.choice(_SIGNS)
    return "".join(text).encode()


FLAGS = Format(_flag_tricks, _edit_flags)


# --- bytes ----------------------------------------------------------------------------


def _byte_tricks(sound: bytes) -> list[bytes]:
    half = len(sound) // 2
    return [
        b"",
        b"\0",
        b"\n",
        b"\xff" * 64,
        sound[:half],
        sound[half:],
        sound * 2,
        sound[:-1],
        b"\0" * len(sound),
    ]


def _edit_bytes(sound: bytes, random: Random) -> bytes:
    data = bytearray(sound or b"\0")
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        at = random.randrange(max(len(data), 1))
        # headers come first
        at = min(at, int(random.expovariate(0.01))) if random.random() < 0.5 else at
        size = min(random.choice((1, 1, 2, 4, 8, 64)), max(len(data) - at, 1))
        kind = random.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at : at + size] = random.choice((b"\0", b"\xff", b"\x7f")) * size
        elif kind == 2:
            data[at : at + size] = random.randbytes(size)
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = (
                data[at : at + size]
                if random.random() < 0.5
                else random.randbytes(size)
            )
        else:
            del data[at:]
        data = data or bytearray(b"\0")
    return bytes(data)


BYTES = Format(_byte_tricks, _edit_bytes)


# --- JSON -----------------------------------------------------------------------------


def dumped(value: Any) -> bytes:
    """Returns JSON, in which the words for them have become what is deep or huge."""
    text = json.dumps(value)
    for word, raw in _RAW.items():
        text = text.replace(word, raw)
    return text.encode()


_JSON_TEXTS = [
    b"null",
    b"true",
    b"0",
    b"-1",
    b'""',
    b'"x"',
    b"[]",
    b"{}",
    b"[[]]",
    b"[{}]",
    b"[null]",
    b"[1, 2]",
    b"NaN",
    b"1e400",
    b"{",
    b"[",
    b'{"a": }',
    b"{} {}",
    b"{'a': 1}",
    b"\xef\xbb\xbf{}",
    b'"\xff"',
    b"-" * 9999,
    b"\xff\xfe{\0}\0",
    b'{"a": "\\ud800"}',
    b"[" * _LEVELS,
    b"[" * _LEVELS + b"]" * _LEVELS,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b'{"a":' * _LEVELS + b"1" + b"}" * _LEVELS,
    b"1" + b"0" * 5000,
    b'{"a": 1' + b"0" * 400 + b"}",
]


def _json_tricks(sound: bytes) -> list[bytes]:
    """Returns texts of any shape, and the sound one with each of its fields of
    another.
    """
    value = json.loads(sound)
    fields = value if isinstance(value, dict) else {}
    swaps = [
        {**fields, key: other}
        for key in fields
        for other in (None, "x", -1, [], {}, _DEEP, _HUGE)
    ]
    lacks = [{k: v for k, v in fields.items() if k != key} for key in fields]
    return [*_byte_tricks(sound), *_JSON_TEXTS, *map(dumped, swaps + lacks)]


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Returns every place of a value: its container and the key there."""
    slots, rest = [], [value]
    while rest:
        container = rest.pop()
        if isinstance(container, dict | list):
            keys = (
                list(container)
                if isinstance(container, dict)
                else range(len(container))
            )
            slots += [(container, key) for key in keys]
            rest += [container[key] for key in keys]
    return slots


def _any_value(random: Random) -> Any:
    """Returns one of VALUES, which edits of it leave as they are: none comes to hold
    itself.
    """
    return copy.deepcopy(random.choice(VALUES))


def edited(value: Any, random: Random) -> Any:
    """Returns JSON with one place changed; it may share parts with what it was."""
    slots = _slots(value)
    if not slots or random.random() < 0.01:
        return _any_value(random)
    shallow = [slot for slot in slots if slot[0] is value]
    container, key = random.choice(shallow if random.random() < 0.4 else slots)
    kind = random.randrange(10)
    if kind < 5:
        container[key] = _any_value(random)
    elif kind == 5:
        other, there = random.choice(slots)
        # a copy: no value may hold itself
        container[key] = json.loads(json.dumps(other[there]))
    elif kind == 6:
        del container[key]
    elif kind == 7 and isinstance(container, dict):
        container[random.choice(("", "x", "\ud800", key + "x", key[:-1], "../x"))] = (
            container.pop(key)
        )
    elif kind == 8 and isinstance(container[key], int | float):
        container[key] = random.choice(
            (
                -container[key],
                container[key] + 1,
                container[key] * 2**40,
                str(container[key]),
            )
        )
    elif isinstance(container, list):
        container.insert(key, _any_value(random))
    else:
        container[key] = (
            [container[key]] if random.random() < 0.5 else {"x": container[key]}
        )
    return value


def _edit_json(sound: bytes, random: Random) -> bytes:
    if random.random() < 0.2:
        return _edit_bytes(sound, random)
    value = json.loads(sound)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = edited(value, random)
    return dumped(value)


JSON = Format(_json_tricks, _edit_json)


def _line_tricks(sound: bytes) -> list[bytes]:
    first, _, rest = sound.partition(b"\n")
    return _byte_tricks(sound) + [line + b"\n" + rest for line in _json_tricks(first)]


def _edit_lines(sound: bytes, random: Random) -> bytes:
    lines = sound.splitlines()
    for _ in range(random.choice((1, 1, 3))):
        number = random.randrange(len(lines))
        try:
            lines[number] = _edit_json(lines[number], random)
        except (ValueError, RecursionError):  # it has been edited before
            lines[number] = _edit_bytes(lines[number], random)
    return b"\n".join(lines) + b"\n"


LINES = Format(_line_tricks, _edit_lines)


# --- files with a header --------------------------------------------------------------


def _with_header(header: bytes, data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + data


def _parted(sound: bytes) -> tuple[bytes, bytes]:
    size = struct.unpack_from("<Q", sound)[0]
    return sound[8 : 8 + size], sound[8 + size :]


def _tensor_tricks(sound: bytes) -> list[bytes]:
    header, data = _parted(sound)
    sizes = (0, 1, 7, len(header) - 1, len(header) + 1, 10**8, 2**31, 2**63, 2**64 - 1)
    name, value = next(
        (n, v) for n, v in json.loads(header).items() if n != "__metadata__"
    )
    tensors = [
        value | change
        for change in (
            {"dtype": "F64"},
            {"dtype": "I8"},
            {"dtype": "X"},
            {"dtype": 1},
            {"shape": []},
            {"shape": [0]},
            {"shape": [2**63, 2]},
            {"shape": [-1, -1]},
            {"shape": [2**32, 2**32]},
            {"shape": "x"},
            {"data_offsets": [0, 0]},
            {"data_offsets": [0, 2**64 - 1]},
            {"data_offsets": [-1, 4]},
            {"data_offsets": [4, 0]},
            {"data_offsets": 1},
        )
    ]
    headers = [dumped(json.loads(header) | {name: tensor}) for tensor in tensors]
    headers += [*_json_tricks(b'{"__metadata__": 1}'), b'{"a":' * _LEVELS]
    lying = [_with_header(header, data, size) for size in sizes]
    return (
        _byte_tricks(sound) + lying + [_with_header(header, data) for header in headers]
    )


def _edit_tensors(sound: bytes, random: Random) -> bytes:
    header, data = _parted(sound)
    kind = random.randrange(4)
    if kind == 0:
        return _edit_bytes(sound, random)
    if kind == 1:
        return _with_header(header, _edit_bytes(data, random))
    size = len(header) + random.choice((-8, -1, 1, 8)) if kind == 2 else None
    return _with_header(_edit_json(header, random), data, size)


TENSORS = Format(_tensor_tricks, _edit_tensors)
_SHAPES = (
    "()",
    "(0,)",
    "(3)",
    "(-1, 3)",
    "(True,)",
    "(1000000000000,)",
    "(1000000000000, 3)",
    "(9223372036854775807,) * 2",
    "(9223372036854775807, 9223372036854775807)",
    "(99999999999999999999999,)",
    "'x'",
    "(1.5,)",
)
_DTYPES = (
    "'|O'",
    "[('a', '<f4')]",
    "'<U9'",
    "'<M8[s]'",
    "'|V4'",
    "'|S0'",
    "'<f16'",
    "'x'",
    "3",
    "None",
    "'<f4,' * 9",
)
_HEADERS = (
    "",
    "[]",
    "{}",
    "(" * 5000,
    "1" * 9000,
    "__import__('os')",
    "{'descr': '<f4'}",
    *(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        for shape in _SHAPES
    ),
    *(
        f"{{'descr': {dtype}, 'fortran_order': False, 'shape': (3,), }}"
        for dtype in _DTYPES
    ),
    "{'descr': '<f4', 'fortran_order': 3, 'shape': (3,), }",
)


def _npy(header: str, data: bytes, version: int = 1) -> bytes:
    text = header.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def _npy_tricks(sound: bytes) -> list[bytes]:
    made = [
        _npy(header, sound[-64:], version)
        for header in _HEADERS
        for version in (1, 2, 3, 9)
    ]
    return _byte_tricks(sound) + made


ARRAY = Format(_npy_tricks, _edit_bytes)


def _zipped(entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def _entries(sound: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archive_tricks(sound: bytes) -> list[bytes]:
    entries = _entries(sound)
    name = next(iter(entries))
    arrays = [_zipped(entries | {name: array}) for array in _npy_tricks(entries[name])]
    names = (
        "x",
        "x/",
        "../x.npy",
        "/x.npy",
        "sample.npy",
        "\ud7ff.npy",
        "x" * 5000 + ".npy",
    )
    return (
        _byte_tricks(sound)
        + arrays
        + [_zipped(entries | {other: entries[name]}) for other in names]
        + [_zipped({})]
    )


def _edit_archive(sound: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return _edit_bytes(sound, random)
    entries = _entries(sound)
    name = random.choice(sorted(entries))
    return _zipped(entries | {name: _edit_bytes(entries[name], random)})


ARCHIVE = Format(_archive_tricks, _edit_archive)


def _packed_tricks(sound: bytes) -> list[bytes]:
    lines = gzip.decompress(sound)
    bomb = gzip.compress(b"\0" * (64 << 20), 1)
    packed = [
        gzip.compress(text)
        for text in (lines + b"\xff", lines[:-3], b"", b"\0" * 1000, b"x" * 10**6)
    ]
    return [*_byte_tricks(sound), lines, bomb, sound[:-4] + b"\0" * 4, *packed]


def _edit_packed(sound: bytes, random: Random) -> bytes:
    if random.random() < 0.5:
        return _edit_bytes(sound, random)
    return gzip.compress(_edit_lines(gzip.decompress(sound), random))


PACKED = Format(_packed_tricks, _edit_packed)


def numbers(layout: str) -> Format:
    """Returns the format of a file that begins with numbers of this struct layout."""
    extremes = (
        0,
        1,
        -1,
        2,
        2**8,
        2**16,
        2**31 - 1,
        -(2**31),
        2**32 - 1,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
    )

    def tricks(sound: bytes) -> list[bytes]:
        fields, size, made = (
            struct.unpack_from(layout, sound),
            struct.calcsize(layout),
            [],
        )
        for at, field in enumerate(fields):
            for value in extremes if isinstance(field, int) else (b"", b"x"):
                try:
                    made.append(
                        struct.pack(layout, *fields[:at], value, *fields[at + 1 :])
                        + sound[size:]
                    )
                except struct.error:  # too large for the field
                    continue
        return _byte_tricks(sound) + made

    return Format(tricks, _edit_bytes)


# --- programs: chat templates and patterns --------------------------------------------

_HARMFUL_TEMPLATES = (
    "{{ 'x' * 1500000000 }}",
    "{% for a in range(99999) %}{{ 'x' * 50000 }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% for a in b %}" * 40 + "{% endfor %}" * 40,
    "{{ raise_exception('\n' * 9999) }}",
    "{% set x = namespace(a=['y']) %}{% for i in range(40) %}{% set x.a = x.a + x.a %}"
    "{% endfor %}{{ x.a }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ '%9999999999s' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ lipsum(n=10000) }}",
    "{{ 'x' | center(2000000000) }}",
    "{% generation %}" * 60 + "{% endgeneration %}" * 60,
    "{{ strftime_now('%Y' * 100000) }}",
)
_TEMPLATE_PARTS = (
    "{% for a in messages %}",
    "{% endfor %}",
    "{% if messages %}",
    "{% endif %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ messages | tojson }}",
    "{{ messages * 1000 }}",
    "{{ messages[0].content * 100000 }}",
    "{% set m = messages %}",
    "{{ m.content | replace('e', 'ee' * 1000) }}",
    "{% for a in range(1000) %}",
    "{{ loop.index ** loop.length }}",
    "{{ raise_exception('no') }}",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "\ud7ff\0",
)
_HARMFUL_PATTERNS = (
    "(([a-z/_]+)+)+!",
    "(.*)*" * 30 + "!",
    "(a|a|a)*" * 50 + "!",
    "(?=(.*)*!)" * 40,
    ".*" * 490 + "!",
    "((.{1,99}){1,99}){1,99}!",
    "a{999999999999999999999999}",
    "(" * 499 + ")" * 499,
    r"(\w+)\1+!",
    "(?i)" + r"[\0-\U0010ffff]" * 60,
    "[",
    "(?",
    "\\",
    "*",
)
_PATTERN_PARTS = (
    *"()*+|[]^$.?!{}\\-\0é\n",
    r"\w",
    r"\1",
    r"\b",
    "{3}",
    "{1,9}",
    "{99999}",
    "(?=",
    "(?!",
    "(?<=",
    "(?i)",
    "(.*)*",
    "([a-z/_]+)+",
    "blocks",
)


def _text_edit(parts: tuple[str, ...]) -> Callable[[bytes, Random], bytes]:
    """Returns edits of a text: parts added, cut out, and repeated."""

    def edit(sound: bytes, random: Random) -> bytes:
        if random.random() < 0.1:
            return _edit_bytes(sound, random)
        text = sound.decode()
        for _ in range(random.choice((1, 2, 4, 8))):
            begin = random.randrange(len(text) + 1)
            end = min(len(text), begin + random.randrange(30))
            kind = random.randrange(4)
            if kind == 0:
                text = text[:begin] + text[end:]
            elif kind == 1:
                text = text[:begin] + text[begin:end] * random.randrange(9) + text[end:]
            else:
                text = text[:begin] + random.choice(parts) + text[begin:]
        return text.encode("utf-8", "surrogatepass")

    return edit


def _text_tricks(harmful: tuple[str, ...]) -> Callable[[bytes], list[bytes]]:
    return lambda sound: [*_byte_tricks(sound), *(text.encode() for text in harmful)]


TEMPLATE = Format(_text_tricks(_HARMFUL_TEMPLATES), _text_edit(_TEMPLATE_PARTS))
PATTERN = Format(_text_tricks(_HARMFUL_PATTERNS), _text_edit(_PATTERN_PARTS))
