"""Settings of data, `data.*`, and the rules between them."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from jaxdist.config import ConfigError
from jaxdist.config.annotations import OutsideStep, ReadWith, Resume
from jaxdist.data.reading import expanded
from jaxdist.data.samples import INDEX
from jaxdist.data.sources.record_formats import RECORD_FORMATS, formats_that_read
from jaxdist.data.sources.source import (
    Mixture,
    SampleShape,
    SampleShapes,
    SampleSource,
)
from jaxdist.data.sources.table import (
    SOURCES,
    guess_source,
    parts_of_mixtures,
    readers_of,
    sources_of_records,
)
from jaxdist.data.tokenizer_config import SpecialTokens

if TYPE_CHECKING:
    SourceName = str
    FormatName = str
else:
    SourceName = Literal[tuple(SOURCES)]
    FormatName = Literal[tuple(RECORD_FORMATS)]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of the corpus, of how it is cut into samples, and of held-out data."""

    # kind of corpus; stdlib = the source files of the running Python
    source: SourceName = "stdlib"
    # files, folders or globs, comma separated; huggingface: NAME[:CONFIG[:SPLIT]]
    path: Annotated[str, OutsideStep()] = ""
    # sources of source=mixture, each as "weight:source:path" with weight > 0
    mixture: tuple[str, ...] = ()
    # name of the text field or column (jsonl, huggingface, parquet)
    text_field: Annotated[
        str,
        ReadWith("data.source", readers_of("text_field")),
        ReadWith("data.format", formats_that_read("text_field")),
    ] = "text"
    # content of a record: text = a text in text_field; chat = messages, or prompt and
    # completion (extra chat); preferences = a prompt, a chosen and a rejected answer
    format: FormatName = "text"
    # file of a jinja template, for format=chat or preferences; "" = the template of the
    # tokenizer
    chat_template: str = ""
    # bytes, bpe:SIZE (trained once and saved), or the path of a tokenizer.json
    tokenizer: str = "bytes"
    # encoding of a text that spells a special token: tokens = the id of the token, text
    # = its characters
    special_tokens: SpecialTokens = "tokens"
    # way to cut rows: window = windows of the token stream; documents = packed
    # documents, whose targets and attention cross no border
    packing: Literal["window", "documents"] = "window"
    # treatment of documents longer than a sequence: split = continue in other rows,
    # truncate = drop the excess, auto = split, but truncate for format=chat
    long_documents: Annotated[
        Literal["auto", "split", "truncate"],
        ReadWith("data.packing", ("documents",)),
        ReadWith("data.format", formats_that_read("long_documents")),
    ] = "auto"
    # kept end of a chosen or rejected example that is longer than half a sequence
    truncation: Annotated[
        Literal["keep_start", "keep_end"],
        ReadWith("data.format", formats_that_read("truncation")),
    ] = "keep_start"
    # assignment of packed rows to the microbatches and devices of a step: none = in
    # order, attention = equal attention work for each
    balance: Annotated[Literal["none", "attention"], Resume("harmless")] = "none"
    # type of the tokens in headerless .bin files (source=bin)
    bin_dtype: Annotated[
        Literal["uint16", "uint32"], ReadWith("data.source", readers_of("bin_dtype"))
    ] = "uint16"
    # number of held-out documents in every 256, chosen by a hash of their ids
    validation_share: Annotated[int, Interval(ge=0, le=255), OutsideStep()] = 13
    # separate held-out corpus of the same source; "" = hold out by validation_share
    validation_path: Annotated[str, OutsideStep()] = ""
    # number of targets to score per evaluation and source; 0 = all
    validation_tokens: Annotated[
        int, Interval(ge=0, le=2**62), Resume("harmless"), OutsideStep()
    ] = 0
    # folder for tokenized corpora, trained BPE tokenizers and packing plans
    cache_dir: Annotated[str, Resume("harmless"), OutsideStep()] = "~/.cache/jaxdist"
    # number of batches that a thread prepares ahead; up to 16 batches of a few KB count
    # as one; 0 = no thread
    prefetch: Annotated[
        int, Interval(ge=0, le=64), Resume("harmless"), OutsideStep()
    ] = 2

    def cache_folder(self) -> Path:
        """Resolves `~` in `cache_dir`."""
        return expanded(self.cache_dir)

    @property
    def name(self) -> str:
        """The source and its path for logs and errors.

        Bytes of the path that are not UTF-8 are escaped.
        """
        text = self.source
        if self.path:
            text = f"{self.source} {self.path}"
        return text.encode("utf-8", "backslashreplace").decode()

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of files that the source reads from a folder; () = all."""
        return SOURCES[self.source].endings

    @property
    def is_text(self) -> bool:
        """Whether samples are sequences of tokens."""
        return not isinstance(SOURCES.get(self.source), SampleSource)

    @property
    def uses_template(self) -> bool:
        """Whether a chat template may render the records."""
        return RECORD_FORMATS[self.format].uses_template

    @property
    def truncates(self) -> bool:
        """Whether the excess of documents longer than a sequence is dropped."""
        if self.long_documents == "auto":
            return RECORD_FORMATS[self.format].truncates
        return self.long_documents == "truncate"

    @property
    def cut(self) -> str:
        """The way documents are cut into rows, for the data's fingerprint."""
        if "truncation" in RECORD_FORMATS[self.format].reads:
            return f"{self.packing} {self.format} {self.truncation}"
        is_usual = self.truncates == RECORD_FORMATS[self.format].truncates
        return self.packing if is_usual else f"{self.packing} {self.long_documents}"

    def faults(self) -> list[str]:
        """Lists the contradictions between the settings, one line each."""
        # The ranges of the keys are checked elsewhere.
        if self.source not in SOURCES or self.format not in RECORD_FORMATS:
            return []
        return [*self._source_faults(), *self._cut_faults(), *self._format_faults()]

    def _source_faults(self) -> Iterator[str]:
        source = SOURCES[self.source]
        if source.takes_path and not self.path:
            yield (
                f"data.source={self.source} needs data.path; it is empty. "
                "Set data.path."
            )
        if self.path and not source.takes_path:
            yield (
                f"data.path={self.path} is not read by data.source={self.source}: "
                f"set data.source={guess_source(self.path)} to read it, "
                "or clear data.path."
            )
        if isinstance(source, Mixture) != bool(self.mixture):
            yield (
                f"data.source={self.source} with {len(self.mixture)} entries in "
                "data.mixture: set data.source=mixture and "
                'data.mixture=("0.7:stdlib:", "0.3:jsonl:FILE") together.'
            )
        if self.validation_path and not source.takes_path:
            yield (
                f"data.validation_path is not used by data.source={self.source}: "
                "clear it."
            )
        if source.from_caller:
            yield (
                f"data.source={self.source} is only for jaxdist.fit, "
                "whose caller passes batches."
            )

    def _cut_faults(self) -> Iterator[str]:
        if self.packing == "documents" and not SOURCES[self.source].has_documents:
            yield (
                "data.packing=documents needs documents, and "
                f"data.source={self.source} has none: "
                "set data.packing=window or use data.source=megatron."
            )
        if self.packing == "window" and self.long_documents == "truncate":
            yield (
                "data.long_documents=truncate: windows cut nothing off; "
                "set data.packing=documents."
            )
        is_read = self.format in formats_that_read("long_documents")
        if self.long_documents != "auto" and not is_read:
            yield (
                f"data.long_documents={self.long_documents} has no effect: "
                f"data.format={self.format} keeps one part of each document. Set "
                "data.truncation, or remove this key."
            )
        if self.packing == "window" and self.balance != "none":
            yield (
                f"data.balance={self.balance}: windows all have the same work; "
                "set data.packing=documents."
            )

    def _format_faults(self) -> Iterator[str]:
        name = self.format
        record_format = RECORD_FORMATS[name]
        if self.chat_template and not record_format.uses_template:
            yield (
                f"data.chat_template={self.chat_template} is only for chats; "
                "set data.format=chat."
            )
        if not record_format.has_examples:
            return
        if not SOURCES[self.source].has_records:
            yield (
                f"data.format={name}: data.source={self.source} has no "
                f"{record_format.contents}; required: {', '.join(sources_of_records())}."
            )
        if self.packing == "window":
            yield (
                f"data.format={name}: windows would mix examples; "
                "set data.packing=documents."
            )
        if self.special_tokens == "text":
            yield (
                f"data.format={name}: {record_format.contents} need their special "
                "tokens; set data.special_tokens=tokens."
            )


def parts_of(config: DataConfig) -> tuple[list[float], list[DataConfig]]:
    """Splits a config into the configs of its sources, and their weights.

    A config that is no mixture is its only part.

    Returns:
      weights and configs, one for each source.

    Raises:
      ConfigError: all faults of all entries.
    """
    if not isinstance(SOURCES[config.source], Mixture):
        return [1.0], [config]
    weights = []
    parts = []
    faults = []
    kinds = parts_of_mixtures()
    # The command line may pass several entries as one text. A path may hold commas,
    # too.
    for entry in re.split(r",\s*(?=[\d.]+:)", ",".join(config.mixture)):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+):(\w+):?(.*)", entry)
        if not match or float(match[1]) == 0 or match[2] not in kinds:
            faults.append(
                f"data.mixture entry {entry!r}: required weight:source:path with a "
                f"weight > 0 and a source of {', '.join(kinds)}."
            )
            continue
        part = dataclasses.replace(config, source=match[2], path=match[3], mixture=())
        weights.append(float(match[1]))
        parts.append(part)
        faults += part.faults()
    if faults:
        raise ConfigError(faults)
    return weights, parts


def sample_shapes(config: DataConfig, sequence_length: int) -> SampleShapes:
    """Derives dims and dtype of each entry of one sample of a config's dataset.

    Raises:
      ConfigError: the file of samples is invalid.
    """
    index = {INDEX: SampleShape((), "int32")}
    source = SOURCES[config.source]
    if isinstance(source, SampleSource):
        return source.shapes(config.path) | index
    dtypes = {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "positions": "int32",
    }
    if config.packing == "documents":
        dtypes["segment_ids"] = "int32"
    shapes = {
        name: SampleShape((sequence_length,), dtype) for name, dtype in dtypes.items()
    }
    return shapes | index
