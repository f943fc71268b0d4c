"""Data: sources, tokenizers, token files, and samples in a fixed order.

The order depends on (seed, global sample index) alone. Only `jaxdist.data.loader` needs
jax: it places batches on devices.
"""

from jaxdist.data.config import DataConfig, sample_shapes
from jaxdist.data.dataset import Dataset, SourceError
from jaxdist.data.opening import open_dataset
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
