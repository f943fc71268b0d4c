"""The tokenizer of a trained run."""

from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.data import Tokenizer, load_tokenizer
from jaxdist.data.sources.source import TokenSource
from jaxdist.data.sources.table import SOURCES
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig


def run_tokenizer(config: RunConfig, folder: Path) -> Tokenizer:
    """Opens the tokenizer that a run was trained with.

    Args:
      config: the run's config.
      folder: the workdir, which may hold a copy of the tokenizer.

    Raises:
      ConfigError: the run's data hold token ids and name no tokenizer, or the tokenizer
        has more ids than the model.
    """
    data = config.data
    source = SOURCES[data.source]
    holds_ids = isinstance(source, TokenSource) or source.from_caller
    if holds_ids and data.tokenizer == "bytes":
        alternative = ""
        if source.from_caller:
            alternative = "; or take generate_tokens, whose prompts are ids"
        raise ConfigError(
            f"data.source={data.source}: these tokens were made elsewhere; set data.tokenizer "
            f"in {folder / workdir.CONFIG} to the path of their tokenizer.json{alternative}"
        )
    tokenizer = load_tokenizer(
        data.tokenizer,
        folder=folder,
        cache=data.cache_folder(),
        special_tokens=data.special_tokens,
    )
    vocab_size = config.vocab_size
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {data.tokenizer} has ids up to {tokenizer.vocab_size - 1}, model.vocab_size "
            f"is {vocab_size}; put the model's tokenizer.json into {folder}"
        )
    return tokenizer
