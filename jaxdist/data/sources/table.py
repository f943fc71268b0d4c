"""List of the data sources: for each value of `data.source`, the form of `data.path`.

stdlib       empty; reads the source files of the running Python
text         files, globs (`docs/**/*.md`) or folders (all text files below),
             comma separated
jsonl        the same, `.jsonl` or `.json`, also gzipped (`.gz`): one object per line
bin          the same, `.bin`: nanoGPT's raw ids, or with Karpathy's header
megatron     pairs PREFIX.bin and PREFIX.idx, by prefix or glob
huggingface  NAME[:CONFIG[:SPLIT]] of a dataset, or a folder of one (extra hf)
parquet      like jsonl, with `.parquet` (extra hf)
mixture      empty; `data.mixture` lists sources, each with a path
digits       empty; reads scikit-learn's handwritten digits (extra vision)
arrays       a file of named arrays, `.npz`
given        the shapes of a sample of the caller's batches, set by `jaxdist.fit`
"""

from collections.abc import Callable

import numpy as np

from jaxdist.config import extras
from jaxdist.data import samples
from jaxdist.data.sources import files, jsonl, npz, stdlib
from jaxdist.data.sources.bin_files import open_bin
from jaxdist.data.sources.documents import Corpus, SourceOptions
from jaxdist.data.sources.megatron import open_megatron
from jaxdist.data.sources.source import (
    Mixture,
    SampleShape,
    SampleShapes,
    SampleSource,
    Source,
    TextSource,
    TokenSource,
)


def _late_corpus(module: str) -> Callable[[SourceOptions], Corpus]:
    """Makes an opener that imports `module`, which needs an optional package."""

    def open_corpus(options: SourceOptions) -> Corpus:
        corpus: Corpus = extras.load(module).open_corpus(options)
        return corpus

    return open_corpus


def _digits_shapes(path: str) -> SampleShapes:
    return {
        "image": SampleShape((8, 8, 1), "float32"),
        "label": SampleShape((), "int32"),
    }


def _read_digits(path: str) -> tuple[dict[str, np.ndarray], str]:
    digits = extras.load("jaxdist.data.sources.digits")
    arrays_and_stamp: tuple[dict[str, np.ndarray], str] = digits.read(path)
    return arrays_and_stamp


_RECORD = ("format", "text_field")  # keys that say which text a record has

SOURCES: dict[str, Source] = {
    "stdlib": TextSource(open=stdlib.open_corpus, takes_path=False),
    "text": TextSource(open=files.open_text),
    "jsonl": TextSource(
        open=jsonl.open_corpus,
        endings=(".jsonl", ".jsonl.gz", ".json", ".json.gz"),
        has_records=True,
        reads=_RECORD,
    ),
    "bin": TokenSource(
        open=open_bin, endings=(".bin",), has_documents=False, reads=("bin_dtype",)
    ),
    "megatron": TokenSource(open=open_megatron, endings=(".idx",)),
    "huggingface": TextSource(
        open=_late_corpus("jaxdist.data.sources.huggingface"),
        has_records=True,
        reads=_RECORD,
    ),
    "parquet": TextSource(
        open=_late_corpus("jaxdist.data.sources.parquet"),
        endings=(".parquet",),
        has_records=True,
        reads=_RECORD,
    ),
    "mixture": Mixture(takes_path=False, has_records=True),
    "digits": SampleSource(shapes=_digits_shapes, read=_read_digits, takes_path=False),
    "arrays": SampleSource(shapes=npz.shapes, read=npz.read, endings=(".npz",)),
    "given": SampleSource(shapes=samples.parse_shapes, from_caller=True),
}


def readers_of(option: str) -> tuple[str, ...]:
    """Lists the sources that read a key of `data.*`. A mixture may have one of them."""
    return tuple(
        name
        for name, source in SOURCES.items()
        if option in source.reads or isinstance(source, Mixture)
    )


def guess_source(path: str) -> str:
    """Guesses the source of a path by its ending. The default is "text"."""
    for name, source in SOURCES.items():
        if path.endswith(source.endings):
            return name
    return "text"


def parts_of_mixtures() -> list[str]:
    """Lists the sources that an entry of `data.mixture` may have."""
    return [
        name
        for name, source in SOURCES.items()
        if isinstance(source, TextSource | TokenSource)
    ]


def sources_of_records() -> list[str]:
    """Lists the sources that read records, sources of files first."""
    names = [
        name
        for name, source in SOURCES.items()
        if source.has_records and isinstance(source, TextSource)
    ]
    return sorted(names, key=lambda name: not SOURCES[name].endings)


def has_ids(name: str) -> bool:
    """Tests whether a source reads token ids of an unknown tokenizer."""
    return isinstance(SOURCES.get(name), TokenSource)


def has_samples(name: str) -> bool:
    """Tests whether a source reads samples without tokens."""
    return isinstance(SOURCES.get(name), SampleSource)
