"""Rows of chats (`data.format=chat`): the form of a record, in files of any kind."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxdist.data.sources.documents import SourceOptions
from jaxdist.data.sources.record_format import RecordFormat
from jaxdist.storage.untrusted import Malformed, of_kind, parse_json

FIELDS = ("messages", "prompt", "completion", "tools")  # fields that are read
NEEDED = "'messages', or 'prompt' and 'completion'"


def chat_row(record: Mapping[str, Any]) -> str:
    """Formats a record's row as JSON: messages, or prompt and completion, and tools.

    Raises:
      Malformed: the record has neither, or they are not lists of messages. A prompt and
        its completion may also be texts.
    """
    row = values_of(record, FIELDS)
    turns = ["prompt", "completion"]
    if "messages" in row:
        turns = ["messages"]
        row = {name: row[name] for name in ("messages", "tools") if name in row}
    elif not set(turns) <= set(row):
        raise Malformed(f"no {NEEDED}")
    are_texts = all(isinstance(row[name], str) for name in turns)
    if "messages" in row or not are_texts:
        for name in turns:
            row[name] = messages_of(row[name], name)
    return row_json(row)


def values_of(record: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Reads the fields of a record that are not None. Tools may be JSON.

    Raises:
      Malformed: the tools are no JSON of a list.
    """
    row = {name: record[name] for name in fields if record.get(name) is not None}
    if isinstance(row.get("tools"), str):
        row["tools"] = parse_json(row["tools"], list)
    return row


def row_json(row: Mapping[str, Any]) -> str:
    """Formats a row as JSON, the text of a document."""
    # JSON may contain half a surrogate pair, which no tokenizer accepts.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode()


def messages_of(turns: Any, name: str) -> list[dict[str, Any]]:
    """Checks messages, and drops the fields that are None, as tables fill them.

    Raises:
      Malformed: the value is no list of messages.
    """
    messages = []
    for turn in of_kind(turns, list, repr(name)):
        fields = of_kind(turn, dict, f"a message of {name!r}")
        message = {key: value for key, value in fields.items() if value is not None}
        of_kind(message.get("role"), str, "the 'role' of a message")
        content = message.get("content", "")
        if not isinstance(content, str | list):
            raise Malformed(
                f"the 'content' of a message is {type(content).__name__}; required: str"
            )
        messages.append(message)
    if not messages:
        raise Malformed(f"{name!r} is empty; required: at least one message")
    return messages


def _fits(options: SourceOptions, names: Collection[str]) -> bool:
    return "messages" in names or {"prompt", "completion"} <= set(names)


FORMAT = RecordFormat(
    name="chat",
    contents="chats",
    fields=lambda options: FIELDS,
    fits=_fits,
    needed=lambda options: NEEDED,
    texts=lambda options, record: [chat_row(record)],
    fields_fix="Rename the fields, or set data.format=text",
    values_fix="Mend or remove the row",
    reads=("chat_template", "long_documents"),
    has_examples=True,
    uses_template=True,
    truncates=True,
)
