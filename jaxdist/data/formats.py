"""Formats of records as tokens: how documents are encoded, and cut into rows.

`jaxdist.data.sources.record_formats` has the other facts of each format. They stand
there because sources and the config read them, and know no tokens.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxdist.config import ConfigError
from jaxdist.data import chat, preferences, splits
from jaxdist.data.chat import ChatEncoder
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import DatasetSplit
from jaxdist.data.encoders import OpenEncoder
from jaxdist.data.preferences import PreferenceEncoder, ScoredEncoder
from jaxdist.data.token_cache import Encoder, Log, TextEncoder
from jaxdist.data.token_files import TokenStore
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.data.tokenizer_config import TokenizerConfig


class Cut(Protocol):
    """Function that cuts the documents of one side of a source into rows."""

    def __call__(
        self,
        config: DataConfig,
        store: TokenStore,
        *,
        sequence_length: int,
        log: Log,
        held_out: bool = False,
        stride: int | None = None,
    ) -> DatasetSplit:
        """Cuts documents; see `splits.cut_texts`."""


class Format(NamedTuple):
    """Encoder and rows of a format."""

    open_encoder: OpenEncoder
    cut: Cut


def _text_encoder(
    config: DataConfig, tokenizer: Tokenizer, folder: Path | None
) -> tuple[Encoder, TokenizerConfig]:
    return TextEncoder(tokenizer), tokenizer.config


def _opener(encoder_class: type[ChatEncoder]) -> OpenEncoder:
    """Makes a function that opens a chat encoder of a class."""

    def open_encoder(
        config: DataConfig, tokenizer: Tokenizer, folder: Path | None
    ) -> tuple[Encoder, TokenizerConfig]:
        chats = chat.open_encoder(config, tokenizer, folder, encoder_class)
        settings = dataclasses.replace(
            tokenizer.config,
            end_ids=chats.end_ids,
            chat_template=chats.template.source if chats.template else "",
        )
        return chats, settings

    return open_encoder


FORMATS: dict[str, Format] = {
    "text": Format(_text_encoder, splits.cut_texts),
    "chat": Format(_opener(ChatEncoder), splits.cut_examples),
    "preferences": Format(_opener(PreferenceEncoder), preferences.cut_pairs),
}
# Formats whose documents can be scored at their last token, which is then an input.
_SCORED: dict[str, Format] = {
    "preferences": Format(_opener(ScoredEncoder), preferences.cut_scored_pairs),
}


def format_of(config: DataConfig, *, scored: bool) -> Format:
    """Finds the encoder and the rows of a config's format.

    Args:
      config: settings of the data.
      scored: whether a model scores documents at their last token.

    Raises:
      ConfigError: documents of the format are not scored.
    """
    formats = _SCORED if scored else FORMATS
    if config.format not in formats:
        raise ConfigError(
            f"data.format={config.format} has no documents to score; "
            f"set data.format={' or '.join(_SCORED)}"
        )
    return formats[config.format]
