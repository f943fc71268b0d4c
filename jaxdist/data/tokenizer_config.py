"""Settings in the other files of a tokenizer's folder: end tokens, chat template.

Hugging Face folders spread these settings over several files. A run writes all of them
to its workdir, into tokenizer_config.json and chat_template.jinja.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxdist.config import ConfigError
from jaxdist.storage import atomic
from jaxdist.storage.untrusted import Malformed, of_kind, read_bytes, read_json

# Encoding of a text that spells a special token: the token's id, or its characters.
SpecialTokens = Literal["tokens", "text"]

FILE = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Folder in a workdir with copies of small files, from the folder of its initial
# weights.
HUGGINGFACE = "huggingface"
# Files with settings. As in transformers, the first file with a special token or a
# template wins. The end ids of all files count.
_FILES = (
    TEMPLATE,
    FILE,
    "special_tokens_map.json",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
)
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerConfig:
    """Settings of a tokenizer that its tokenizer.json does not have."""

    end_ids: tuple[int, ...] = ()  # ids of which each ends a text
    # {name: text} of bos_token, eos_token, ...
    special: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""  # a jinja program; "" = none


def read(folder: Path) -> TokenizerConfig:
    """Reads the settings of a Hugging Face folder or of a workdir.

    Raises:
      ConfigError: a file is malformed.
    """
    config = TokenizerConfig()
    for place in (folder, folder / HUGGINGFACE):
        for name in _FILES:
            config = _joined(config, _read(place / name))
    return config


def write(folder: Path, config: TokenizerConfig) -> None:
    """Writes settings to a workdir, where `read` finds them. Empty ones are skipped."""
    fields: dict[str, Any] = dict(config.special)
    if config.end_ids:
        fields = {"eos_token_id": list(config.end_ids), **fields}
    contents = {TEMPLATE: config.chat_template}
    if fields:
        contents[FILE] = json.dumps(fields, indent=1) + "\n"
    for name, text in contents.items():
        if text:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(folder / name, text)


def copy_small_files(source: Path, target: Path) -> None:
    """Copies the files of a Hugging Face folder that describe how to use its weights.

    Files that `source` does not have are skipped.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in _SMALL_FILES:
        file = source / name
        if file.is_file():
            shutil.copyfile(file, target / name)


def kept_template(folder: Path | None) -> str:
    """Reads the chat template in a workdir; "" if it has none.

    Raises:
      ConfigError: the file is malformed.
    """
    if folder is None:
        return ""
    return _read(folder / TEMPLATE).chat_template


def _read(file: Path) -> TokenizerConfig:
    """Reads the settings in one file, which may be absent."""
    try:
        if file.name == TEMPLATE:
            return TokenizerConfig(chat_template=_read_text(file))
        fields = read_json(file, dict)
        special = {
            name: _spelling(fields[name], name) for name in _SPECIAL if fields.get(name)
        }
        return TokenizerConfig(
            end_ids=tuple(dict.fromkeys(_end_ids(fields))),
            special=special,
            chat_template=_template(fields.get("chat_template")),
        )
    except FileNotFoundError:
        return TokenizerConfig()
    except Malformed as error:
        raise ConfigError(f"{file}: {error}; copy it again, or remove it") from error


def _read_text(file: Path) -> str:
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 at byte {error.start}") from error


def _joined(first: TokenizerConfig, second: TokenizerConfig) -> TokenizerConfig:
    return TokenizerConfig(
        end_ids=tuple(dict.fromkeys((*first.end_ids, *second.end_ids))),
        special={**second.special, **first.special},
        chat_template=first.chat_template or second.chat_template,
    )


def _end_ids(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yields the ids of one file that end a text.

    Raises:
      Malformed: they are no integers.
    """
    text_config = fields.get("text_config")  # models for text and images have it
    if not isinstance(text_config, dict):
        text_config = {}
    for part in (fields, text_config):
        ids = part.get("eos_token_id")
        if ids is None:
            ids = []
        if not isinstance(ids, list):
            ids = [ids]
        for end in ids:
            yield of_kind(end, int, "eos_token_id")


def _spelling(token: Any, name: str) -> str:
    """Reads the text of a token, which is a string or the `content` of a dict."""
    if isinstance(token, dict):
        token = token.get("content")
    return of_kind(token, str, name)


def _template(value: Any) -> str:
    """Reads a chat template. A list has one named `default`, which is used.

    Raises:
      Malformed: the value is no template.
    """
    if isinstance(value, list):
        named = {
            of_kind(entry, dict, "a chat template").get("name"): entry
            for entry in value
        }
        value = named.get("default", {}).get("template")
    if value is None:
        return ""
    return of_kind(value, str, "chat_template")
