"""What to read: the options of the package, and corpora, the documents (id, text) of
one source.

What `data.path` means, per source:

  stdlib       unused. The sources of the running Python, without tests and bundled
  packages; where
               they are not installed as .py files, the topics of its reference
               (pydoc_data).
  text         files, globs (`docs/**/*.md`) or folders (all text files below), comma
  separated jsonl        the same, `.jsonl`, `.json` or `.jsonl.gz`: one object per
  line, text in text_field parquet      the same, `.parquet`, text in column text_field
  (extra hf) huggingface  NAME[:CONFIG[:SPLIT]] of a dataset, or a folder of one
  (extra hf) bin          token files: nanoGPT's raw uint16/uint32 (data.bin_dtype), or
  with Karpathy's header megatron     pairs PREFIX.bin + PREFIX.idx
  digits       unused. No text: scikit-learn's scans of handwritten digits     (extra
  vision) arrays       no text: a file of named arrays (`numpy.savez`), see
  `jaxdist.data.arrays` given        what a sample of the batches given to `jaxdist.fit`
  holds, which writes it

A document's id is its path below the folder or glob that found it, with `#line` or
`#row` where a file holds many (or the record's own `id`), so a corpus can be moved
without changing its split.
"""

import contextlib
import dataclasses
import gzip
import importlib
import os
import re
import struct
import sysconfig
import tokenize
import typing
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Interval

from jaxdist.config import ConfigError, extras
from jaxdist.data import chat_rows
from jaxdist.storage.digest import digest, digest_bytes
from jaxdist.storage.untrusted import Malformed, parse_json

TextSource = Literal[
    "stdlib", "text", "jsonl", "bin", "megatron", "huggingface", "parquet"
]
Source = Literal[TextSource, "mixture", "digits", "arrays", "given"]
SpecialTokens = Literal["tokens", "text"]
NOT_TEXT = ("digits", "arrays", "given")
WITHOUT_PATH = ("stdlib", "mixture", "digits")
CHATS = ("jsonl", "parquet", "huggingface")  # sources whose records may be chats
MADE_ELSEWHERE = ("bin", "megatron")  # tokens that nobody here has made
# What a file is by its ending, where a source has to be guessed; all else may be text.
_SOURCES = dict.fromkeys((".jsonl", ".jsonl.gz", ".json"), "jsonl")
_SOURCES |= {".parquet": "parquet", ".bin": "bin", ".idx": "megatron", ".npz": "arrays"}
# bytes of a jsonl record: a file without line ends must not fill the memory
_MAX_LINE = 64 << 20
# What Python's readers raise of files that are cut off, damaged, something else, or
# made to harm.
READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_STDLIB_SKIPPED = set(
    "test tests idlelib lib2to3 ensurepip encodings site-packages dist-packages".split()
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from, how they are cut into samples, and what is
    held out.
    """

    # kind of corpus; stdlib = the sources of the running Python
    source: Source = "stdlib"
    # files, folders or globs, comma separated; huggingface: NAME[:CONFIG[:SPLIT]]
    path: str = ""
    # for source=mixture: "weight:source:path", weight > 0
    mixture: tuple[str, ...] = ()
    # name of the text field or column (jsonl, huggingface, parquet)
    text_field: str = "text"
    # what a record is: a text in text_field, or messages, or prompt and completion
    # (extra chat)
    format: Literal["text", "chat"] = "text"
    # file of a jinja template, for format=chat; "" = the tokenizer's own
    chat_template: str = ""
    # bytes | bpe:SIZE (trained once, saved) | path of a tokenizer.json
    tokenizer: str = "bytes"
    # what a text encodes to that spells a special token: tokens = its id, text = its
    # characters
    special_tokens: SpecialTokens = "tokens"
    # documents: the loss crosses no border
    packing: Literal["window", "documents"] = "window"
    # documents longer than a sequence: split = the rest goes on in other rows, truncate
    # = it is left out, auto = split, but truncate for format=chat
    long_documents: Literal["auto", "split", "truncate"] = "auto"
    # of packed rows to the microbatches and devices of a step; attention = so that
    # these have equal work
    balance: Literal["none", "attention"] = "none"
    # of headerless .bin files (source=bin)
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    # documents held out of every 256, chosen by hash of id
    validation_share: Annotated[int, Interval(ge=0, le=255)] = 13
    # separate held-out corpus of the same source; then no hash split
    validation_path: str = ""
    # targets scored per evaluation and source; 0 = all
    validation_tokens: Annotated[int, Interval(ge=0, le=2**62)] = 0
    # folder for tokenised corpora, trained BPE, packings
    cache_dir: str = "~/.cache/jaxdist"
    # batches prepared ahead by a thread; 0 = none
    prefetch: Annotated[int, Interval(ge=0, le=64)] = 2

    def cache_folder(self) -> Path:
        """Returns `cache_dir` with `~` resolved."""
        return expanded(self.cache_dir)

    @property
    def name(self) -> str:
        """Source and path as logs and errors show them, also a path that is
        not UTF-8.
        """
        return f"{self.source} {self.path}".encode("utf-8", "backslashreplace").decode()

    @property
    def is_text(self) -> bool:
        return self.source not in NOT_TEXT

    @property
    def truncates(self) -> bool:
        """Whether of documents longer than a sequence only the begin is read."""
        chats = self.long_documents == "auto" and self.format == "chat"
        return self.long_documents == "truncate" or chats

    @property
    def cut(self) -> str:
        """How documents become samples, as the data's fingerprint has it."""
        # as it was before this could be chosen
        usual = self.truncates == (self.format == "chat")
        return self.packing if usual else f"{self.packing} {self.long_documents}"

    def faults(self) -> list[str]:
        """Returns one line per contradiction between the options."""
        faults = []
        if self.source not in WITHOUT_PATH and not self.path:
            faults.append(
                f"data.source={self.source} needs data.path; it is empty. Set data.path."
            )
        if self.source in WITHOUT_PATH and self.path:
            kind = next(
                (kind for end, kind in _SOURCES.items() if self.path.endswith(end)),
                "text",
            )
            cure = f"set data.source={kind} to read it, or clear data.path"
            faults.append(
                f"data.path={self.path} is not read by data.source={self.source}: {cure}."
            )
        if (self.source == "mixture") != bool(self.mixture):
            faults.append(
                f"data.source={self.source} with {len(self.mixture)} entries in data.mixture: set "
                'data.source=mixture and data.mixture=("0.7:stdlib:", "0.3:jsonl:FILE") together.'
            )
        if self.source in WITHOUT_PATH and self.validation_path:
            faults.append(
                f"data.validation_path is not used by data.source={self.source}: clear it."
            )
        if self.source == "given":
            faults.append(
                "data.source=given is what jaxdist.fit writes: only there batches are given."
            )
        if self.packing == "documents" and self.source in ("bin", *NOT_TEXT):
            faults.append(
                f"data.packing=documents needs documents, and data.source={self.source} has none: "
                "set data.packing=window or use data.source=megatron."
            )
        if self.packing == "window" and self.long_documents == "truncate":
            faults.append(
                "data.long_documents=truncate: windows cut nothing off; set data.packing=documents."
            )
        if self.packing == "window" and self.balance != "none":
            faults.append(
                f"data.balance={self.balance}: windows all have the same work; set data.packing=documents."
            )
        return faults + list(self._chat_faults())

    def _chat_faults(self) -> Iterator[str]:
        if self.format == "text":
            if self.chat_template:
                yield f"data.chat_template={self.chat_template}: nothing is a chat; set data.format=chat."
            return
        if self.source not in (*CHATS, "mixture"):
            kinds = ", ".join(CHATS)
            yield f"data.format=chat: data.source={self.source} has no chats; required: {kinds}."
        if self.packing == "window":
            yield "data.format=chat: windows would mix examples; set data.packing=documents."
        if self.special_tokens == "text":
            yield "data.format=chat: chats need their special tokens; set data.special_tokens=tokens."


def sources_of(config: DataConfig) -> tuple[list[float], list[DataConfig]]:
    """Returns the weights and the single-source configs of a config; raises every fault
    of them.
    """
    if config.source != "mixture":
        return [1.0], [config]
    weights, configs, faults = [], [], []
    kinds = typing.get_args(TextSource)
    # One text may hold several entries, as the command line gives them; a path may hold
    # commas too.
    for entry in re.split(r",\s*(?=[\d.]+:)", ",".join(config.mixture)):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+):(\w+):?(.*)", entry)
        if not match or float(match[1]) == 0 or match[2] not in kinds:
            faults.append(
                f"data.mixture entry {entry!r}: required weight:source:path with a weight > 0 and "
                f"a source of {', '.join(kinds)}."
            )
            continue
        source = typing.cast(TextSource, match[2])
        weights.append(float(match[1]))
        configs.append(
            dataclasses.replace(config, source=source, path=match[3], mixture=())
        )
        faults += configs[-1].faults()
    if faults:
        raise ConfigError(faults)
    return weights, configs


class Document(NamedTuple):
    """One text with an id that does not depend on where the corpus lies."""

    id: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A set of documents."""

    name: str  # "jsonl data/*.jsonl", for logs and errors
    # changes when the documents may have changed; cheap (sizes and times, not contents)
    stamp: str
    summary: str  # one line: how much there is
    documents: Callable[[], Iterator[Document]]  # all of them, always in the same order


def open_corpus(config: DataConfig) -> Corpus:
    """Returns the corpus of a text source (stdlib, text, jsonl, huggingface, parquet).

    Raises:
      ConfigError: where nothing is found. `documents` raises it too, naming the file
        and line or row that is not as it must be.
      ImportError: naming the extra that a source needs.
    """
    if config.source == "stdlib":
        return _stdlib()
    if config.source == "huggingface":
        return extras.load("jaxdist.data.huggingface").open_corpus(config)
    name = config.name
    if config.source == "text":
        return _corpus_of(name, find_files(config), _read_text)
    if config.source == "jsonl":
        files, read = find_files(config, ".jsonl", ".json", ".gz"), _read_jsonl
    else:
        files = find_files(config, ".parquet")
        read = extras.load("jaxdist.data.parquet").read_parquet
    corpus = _corpus_of(name, files, lambda file: read(file, config))
    return dataclasses.replace(corpus, stamp=digest(corpus.stamp, *fields_of(config)))


def fields_of(config: DataConfig) -> tuple[str, ...]:
    """Returns the fields or columns that are read of a record, beside its `id`."""
    return (config.text_field,) if config.format == "text" else chat_rows.FIELDS


def columns_of(config: DataConfig, names: Sequence[str], where: object) -> list[str]:
    """Returns which columns of a table to read; raises ConfigError where it lacks what
    is needed.
    """
    record_fault(config, names, where)
    return [name for name in names if name in (*fields_of(config), "id")]


def record_fault(config: DataConfig, names: Iterable[str], where: object) -> None:
    """Raises ConfigError where fields or columns of these names are no record of the
    config's format.
    """
    known, field = set(names), config.text_field
    chats = "messages" in known or {"prompt", "completion"} <= known
    has = f"(has: {one_line(', '.join(sorted(known)))})"
    if config.format == "chat" and not chats:
        raise ConfigError(
            f"{where}: no {chat_rows.NEEDED} {has}. Rename the fields, or set data.format=text."
        )
    if config.format == "text" and field not in known:
        cure = "Set data.format=chat" if chats else "Set data.text_field"
        raise ConfigError(f"{where}: no text in field {field!r} {has}. {cure}.")


def record_document(
    record: object, config: DataConfig, *, where: str, default_id: str
) -> Document:
    """Returns the document of one record, under its own `id` if it has one.
    Raises ConfigError where the record is not what `data.format` says."""
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: it is {type(record).__name__}; required: an object with fields."
        )
    record_fault(config, record, where)
    identity = record.get("id")
    name = default_id if identity is None else str(identity)
    if config.format == "chat":
        try:
            return Document(name, chat_rows.chat_row(record))
        except Malformed as error:
            raise ConfigError(f"{where}: {error}. Mend or remove the row.") from error
    text = record[config.text_field]
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: field {config.text_field!r} is {type(text).__name__}; required: a text. Mend the row, "
            "or set data.text_field."
        )
    # JSON may spell half a surrogate pair, which no tokenizer takes
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return Document(name, text)


# --- Files ----------------------------------------------------------------------------


@contextlib.contextmanager
def reading(what: object, *others: type[Exception]) -> Iterator[None]:
    """Makes any error of reading a file (READ_ERRORS and others) one kind, which names
    it.

    Raises:
      ConfigError: the body failed on the file.
    """
    kinds: tuple[type[Exception], ...] = (*READ_ERRORS, *others)
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(
            f"{what}: cannot be read ({one_line(error)}). Mend or replace it."
        ) from error


def one_line(text: object) -> str:
    """Returns a text or an error that others wrote, short enough for a message."""
    return " ".join(str(text)[:1000].split())[:300] or type(text).__name__


def expanded(path: str) -> Path:
    """Returns a path with `~` resolved; that of an unknown user stays."""
    return Path(os.path.expanduser(path))


class File(NamedTuple):
    """A file and its path below the pattern that found it."""

    path: Path
    id: str


def find_files(config: DataConfig, *suffixes: str) -> list[File]:
    """Returns the files of `data.path`: entries in the order given, each one's files
    sorted by id.

    Folders contribute the files below them that end in one of `suffixes` (all, if
    none), without hidden ones; a file or glob is taken as it is.
    Raises ConfigError naming every entry that finds nothing."""
    files, faults = [], []
    for entry in filter(None, (part.strip() for part in config.path.split(","))):
        shown = one_line(entry)
        try:
            matches = _find(expanded(entry), suffixes)
        except (OSError, ValueError, RecursionError) as error:
            faults.append(f"data.path={shown}: no path or glob ({one_line(error)}).")
            continue
        if not matches:
            kinds = " or ".join(suffixes) or "text"
            faults.append(
                f"data.path={shown}: no {config.source} file there (looked from {Path.cwd()}); "
                f"give a {kinds} file, a folder of them, or a glob."
            )
        files += matches
    if faults or not files:
        raise ConfigError(faults or f"data.path={config.path!r}: empty. Set data.path.")
    return files


def _find(entry: Path, suffixes: tuple[str, ...]) -> list[File]:
    if entry.is_file():
        return [File(entry, entry.name)]
    fixed = next(
        (i for i, part in enumerate(entry.parts) if set("*?[") & set(part)), None
    )
    if entry.is_dir():
        root, pattern = entry, "**/*"
    elif fixed is not None:
        root, pattern = Path(*entry.parts[:fixed]), "/".join(entry.parts[fixed:])
        # `**` again and again multiplies the time.
        pattern = re.sub(r"(?<![^/])(\*\*/)+(?=\*\*(/|$))", "", pattern)
    else:
        return []
    files = [
        File(path, path.relative_to(root).as_posix())
        for path in root.glob(pattern)
        if path.is_file()
    ]
    if entry.is_dir():
        files = [file for file in files if not re.search(r"(^|/)\.", file.id)]
        files = [file for file in files if not suffixes or file.id.endswith(suffixes)]
    return sorted(files, key=lambda file: file.id)


def _corpus_of(
    name: str, files: list[File], read: Callable[[File], Iterator[Document]]
) -> Corpus:
    """Returns the documents that `read` finds in files, stamped with their sizes and
    times.
    """
    with reading(name):
        stats = [os.stat(file.path) for file in files]
    stamps = (
        (f.id, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)
    )
    summary = f"{len(files)} files, {sum(s.st_size for s in stats) / 1e6:.2f} MB"
    return Corpus(
        name, digest(*stamps), summary, lambda: chain.from_iterable(map(read, files))
    )


def _read_text(file: File) -> Iterator[Document]:
    """Yields the file as UTF-8 (other bytes become U+FFFD); nothing where it
    is binary.
    """
    with reading(file.path):
        content = file.path.read_bytes()
    if b"\0" not in content[:8192]:
        yield Document(file.id, content.decode("utf-8", "replace"))


def _read_jsonl(file: File, config: DataConfig) -> Iterator[Document]:
    """Yields one document per line."""
    opener = gzip.open if file.path.suffix == ".gz" else open
    with reading(file.path), opener(file.path, "rb") as lines:
        begin = 0
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE), b""), 1):
            where, before = f"{file.path} line {number}", begin
            begin += len(line)
            if len(line) == _MAX_LINE:
                raise ConfigError(
                    f"{where}: longer than {_MAX_LINE:,} bytes; give one object per line."
                )
            if not line.strip():
                continue
            try:
                record = parse_json(
                    line.decode("utf-8-sig" if number == 1 else "utf-8"), dict
                )
            except UnicodeDecodeError as error:
                place = f"byte {before + error.start} of the file"
                raise ConfigError(
                    f"{where}: not UTF-8 at {place}; write the file again as UTF-8."
                ) from error
            except Malformed as error:
                raise ConfigError(
                    f"{where}: {error}; give one object per line."
                ) from error
            yield record_document(
                record, config, where=where, default_id=f"{file.id}#{number}"
            )


# --- The running Python ---------------------------------------------------------------


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [File(path, path.relative_to(root).as_posix()) for path in paths]
    if len(files) < 100:  # zipped, or compiled only
        return _topics()
    files.sort(key=lambda file: file.id)
    corpus = _corpus_of("stdlib", files, _read_text)
    # 10 MB: the contents themselves, in 20 ms.
    stamp = digest_bytes(b"".join(file.path.read_bytes() for file in files))
    summary = f"{corpus.summary}, sha256 {stamp[:12]} ({root})"
    return dataclasses.replace(corpus, stamp=stamp, summary=summary)


def _topics() -> Corpus:
    """Returns the topics of the Python reference, which every Python has inside a
    module.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigError(
            "data.source=stdlib: this Python has neither .py sources nor pydoc_data; "
            "set data.source=text and data.path."
        ) from error
    documents = [Document(*item) for item in sorted(topics.items())]
    stamp = digest(*(document.text for document in documents))
    summary = f"no .py sources here; {len(topics)} topics of Python's reference, sha256 {stamp[:12]}"
    return Corpus("stdlib (pydoc_data.topics)", stamp, summary, lambda: iter(documents))
