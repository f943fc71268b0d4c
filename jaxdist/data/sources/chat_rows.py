"""Rows of chats: what a record of the data must be, whatever file it comes from."""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.storage.untrusted import Malformed, of_kind, parse_json

FIELDS = ("messages", "prompt", "completion", "tools")  # of a record, that are read
NEEDED = "'messages', or 'prompt' and 'completion'"


def chat_row(record: Mapping[str, Any]) -> str:
    """Returns a record's row as JSON: messages, or prompt and completion, and perhaps
    tools.

    Raises:
      Malformed: it has neither, or they are not lists of messages (prompt and
        completion: or texts).
    """
    row = {name: record[name] for name in FIELDS if record.get(name) is not None}
    if isinstance(row.get("tools"), str):
        row["tools"] = parse_json(row["tools"], list)
    if "messages" in row:
        row = {name: row[name] for name in ("messages", "tools") if name in row}
    elif not {"prompt", "completion"} <= set(row):
        raise Malformed(f"no {NEEDED}")
    both_texts = isinstance(row.get("prompt"), str) and isinstance(
        row.get("completion"), str
    )
    for name in () if both_texts else ("messages", "prompt", "completion"):
        if name in row:
            row[name] = [
                _message(message, name)
                for message in of_kind(row[name], list, repr(name))
            ]
            if not row[name]:
                raise Malformed(f"{name!r} is empty; required: at least one message")
    # JSON may spell half a surrogate pair, which no tokenizer takes.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode()


def _message(message: Any, name: str) -> dict[str, Any]:
    """Returns one message without the fields that tables fill with nothing; raises
    Malformed.
    """
    kept = {
        key: x
        for key, x in of_kind(message, dict, f"a message of {name!r}").items()
        if x is not None
    }
    of_kind(kept.get("role"), str, "the 'role' of a message")
    if not isinstance(kept.get("content", ""), str | list):
        raise Malformed(
            f"the 'content' of a message is {type(kept['content']).__name__}; required: str"
        )
    return kept
