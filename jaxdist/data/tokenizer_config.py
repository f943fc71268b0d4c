"""What the files beside a tokenizer.json say: which tokens end a text, and how a chat
becomes one.

Hugging Face folders spread it over several files. A run keeps what it read in one of
them, the tokenizer_config.json of its workdir, which then is all that is needed.
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

# what a text that spells a special token is encoded to: its id, or its characters
SpecialTokens = Literal["tokens", "text"]

FILE = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# folder in a workdir: what is copied of the folder that its weights came from
HUGGINGFACE = "huggingface"
# The first that spells a special token or has a template wins, as in transformers; end
# ids are those of all.
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
    """What to know of a tokenizer beside its tokenizer.json."""

    end_ids: tuple[int, ...] = ()  # any of them ends a text
    # how bos_token, eos_token, ... are spelt
    special: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""  # a jinja program; "": it has none


def read(folder: Path) -> TokenizerConfig:
    """Reads what a Hugging Face folder or a workdir says.

    Raises:
      ConfigError: a file is malformed.
    """
    config = TokenizerConfig()
    for place in (folder, folder / HUGGINGFACE):
        for name in _FILES:
            config = _joined(config, _read(place / name))
    return config


def write(folder: Path, config: TokenizerConfig) -> None:
    """Writes into a workdir what `read` has read, where there is anything."""
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
    """Copies the files of a Hugging Face folder that say how to use its weights.

    Files that `source` does not have are skipped.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in _SMALL_FILES:
        file = source / name
        if file.is_file():
            shutil.copyfile(file, target / name)


def kept_template(folder: Path | None) -> str:
    """Reads the chat template that a workdir has kept; "" if none.

    Raises:
      ConfigError: the file is malformed.
    """
    if folder is None:
        return ""
    return _read(folder / TEMPLATE).chat_template


def _read(file: Path) -> TokenizerConfig:
    """Reads what one file says; nothing where there is none."""
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
    """Yields the ids that one file says end a text; raises Malformed."""
    text = fields.get("text_config")  # of models that also see
    for part in (fields, text if isinstance(text, dict) else {}):
        ids = part.get("eos_token_id", [])
        if ids is None:
            ids = []
        for end in ids if isinstance(ids, list) else [ids]:
            yield of_kind(end, int, "eos_token_id")


def _spelling(token: Any, name: str) -> str:
    """Reads how a token is spelt: a text, or the `content` of a dict."""
    if isinstance(token, dict):
        token = token.get("content")
    return of_kind(token, str, name)


def _template(value: Any) -> str:
    """Reads a chat template; of several the one called `default`.

    Raises:
      Malformed: it is none.
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
