"""Data: sources, tokenizers, token files, and samples in an order that depends on
nothing else than (seed, global sample index). Device placement is in
`jaxdist.data.loader`; the rest needs no jax."""

from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset, SourceError
from jaxdist.data.opening import open_dataset, sample_shapes
from jaxdist.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataConfig",
    "Dataset",
    "SourceError",
    "Tokenizer",
    "load_tokenizer",
    "open_dataset",
    "sample_shapes",
]
