"""List of the formats of records: for each value of `data.format`, its row.

text         a text in the field `data.text_field`
chat         messages, or a prompt and its completion
preferences  a prompt with a chosen and a rejected completion
"""

from jaxdist.data.sources import chat_rows, preference_rows, text_rows
from jaxdist.data.sources.record_format import RecordFormat

RECORD_FORMATS: dict[str, RecordFormat] = {
    record_format.name: record_format
    for record_format in (
        text_rows.FORMAT,
        chat_rows.FORMAT,
        preference_rows.FORMAT,
    )
}


def formats_that_read(key: str) -> tuple[str, ...]:
    """Lists the formats with which a key of `data.*` is read."""
    return tuple(
        name
        for name, record_format in RECORD_FORMATS.items()
        if key in record_format.reads
    )
