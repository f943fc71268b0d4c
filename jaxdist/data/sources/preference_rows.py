"""Rows of preferences (`data.format=preferences`): a prompt, and two completions.

A row gives two documents, the chosen half and the rejected half. Each has the form of a
chat with `prompt` and `completion`. Without a `prompt`, the common beginning of both
completions is the prompt, as in TRL's `extract_prompt`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxdist.data.sources import chat_rows
from jaxdist.data.sources.documents import SourceOptions
from jaxdist.data.sources.record_format import RecordFormat
from jaxdist.storage.untrusted import Malformed, of_kind

FIELDS = ("prompt", "chosen", "rejected", "tools")  # fields that are read
NEEDED = "'chosen' and 'rejected'"


def halves(record: Mapping[str, Any]) -> list[str]:
    """Formats the two halves of a record as JSON: prompt, completion, and tools.

    Returns:
      The chosen half and the rejected half.

    Raises:
      Malformed: a completion is missing, both are equal, the prompt is empty, or the
        values are neither texts nor lists of messages.
    """
    row = chat_rows.values_of(record, FIELDS)
    for name in ("chosen", "rejected"):
        if name not in row:
            raise Malformed(f"{name!r} has no value; required: {NEEDED}")
    chosen: Any = row["chosen"]
    rejected: Any = row["rejected"]
    prompt: Any = row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            prompt = of_kind(prompt, str, "'prompt'")
    else:
        chosen = chat_rows.messages_of(chosen, "chosen")
        rejected = chat_rows.messages_of(rejected, "rejected")
        if isinstance(prompt, str):
            # Some data sets repeat the first turn of both lists as a text. TRL ignores
            # it, too.
            prompt = None
        if prompt is not None:
            prompt = chat_rows.messages_of(prompt, "prompt")
    if chosen == rejected:
        raise Malformed("'chosen' equals 'rejected'; required: two completions")
    if prompt is None:
        count = _length_of_prompt(chosen, rejected)
        if not count:
            raise Malformed(
                "'chosen' and 'rejected' have no common beginning, and there is no "
                "'prompt' of their kind"
            )
        prompt = chosen[:count]
        chosen = chosen[count:]
        rejected = rejected[count:]
    if not prompt:
        raise Malformed("'prompt' is empty; required: a text")
    tools = {"tools": row["tools"]} if "tools" in row else {}
    return [
        chat_rows.row_json({"prompt": prompt, "completion": completion} | tools)
        for completion in (chosen, rejected)
    ]


def _length_of_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Counts the characters or messages of the common beginning.

    A space before the first difference belongs to the completions. If one is the
    beginning of the other, its last character or message belongs to the completions.
    """
    shortest = min(len(chosen), len(rejected))
    for count in range(shortest):
        if chosen[count] != rejected[count]:
            if count and chosen[count - 1] == " ":
                return count - 1
            return count
    return max(shortest - 1, 0)


def _fits(options: SourceOptions, names: Collection[str]) -> bool:
    return {"chosen", "rejected"} <= set(names)


FORMAT = RecordFormat(
    name="preferences",
    contents="preferences",
    fields=lambda options: FIELDS,
    fits=_fits,
    needed=lambda options: NEEDED,
    texts=lambda options, record: halves(record),
    fields_fix="Rename the fields, or set data.format to text or chat",
    values_fix="Mend or remove the row",
    reads=("chat_template", "truncation"),
    has_examples=True,
    uses_template=True,
    truncates=True,
)
