"""Reads the file of an offline run of W&B: a log of records in blocks, each a protocol
buffer.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# bytes; a record's header: checksum 4, length 2, kind 1
_BLOCK, _FILE_HEADER, _HEADER = 32_768, 7, 7
_FULL, _LAST = 1, 4  # kinds of parts


def _records(file: Path) -> Iterator[Any]:
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, begun = file.read_bytes(), _FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # too little room is left in a block: zeros
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (_FULL, _LAST):
            yield record.FromString(begun)
            begun = b""


def _values(items: Any) -> dict[str, Any]:
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for item in items
    }


def history(file: Path) -> list[dict[str, Any]]:
    """Returns the rows that were logged."""
    return [
        _values(r.history.item)
        for r in _records(file)
        if r.WhichOneof("record_type") == "history"
    ]


def config(file: Path) -> dict[str, Any]:
    """Returns the config that the run began with."""
    found: dict[str, Any] = {}
    for record in _records(file):
        if record.WhichOneof("record_type") == "run":
            found |= _values(record.run.config.update)
    return found
