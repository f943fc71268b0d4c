"""Records with a text in the field `data.text_field` (`data.format=text`)."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxdist.data.sources.documents import SourceOptions
from jaxdist.data.sources.record_format import RecordFormat
from jaxdist.storage.untrusted import Malformed


def _fits(options: SourceOptions, names: Collection[str]) -> bool:
    return options.text_field in names


def _texts(options: SourceOptions, record: Mapping[str, Any]) -> list[str]:
    """Reads the text of a record, which is its only document.

    Raises:
      Malformed: the field is no text.
    """
    text = record[options.text_field]
    if not isinstance(text, str):
        raise Malformed(
            f"field {options.text_field!r} is {type(text).__name__}; required: a text"
        )
    # JSON may contain half a surrogate pair, which no tokenizer accepts.
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return [text]


FORMAT = RecordFormat(
    name="text",
    contents="texts",
    fields=lambda options: (options.text_field,),
    fits=_fits,
    needed=lambda options: f"text in field {options.text_field!r}",
    texts=_texts,
    fields_fix="Set data.text_field",
    values_fix="Mend the row, or set data.text_field",
    is_recognized=False,  # any field may be the text
    reads=("text_field", "long_documents"),
)
