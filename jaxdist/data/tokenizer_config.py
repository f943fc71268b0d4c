"""What the files beside a tokenizer.json say: which tokens end a text, and how a chat
becomes one.

Hugging Face folders spread it over several files. A run keeps what it read in one of
them, the tokenizer_config.json of its workdir, which then is all that is needed.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
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
    """Returns what a Hugging Face folder or a workdir says.

    Raises:
      ConfigError: a file is malformed.
    """
    config = TokenizerConfig()
    for place in (folder, folder / HUGGINGFACE):
        config = _joined(config, _read(place / TEMPLATE, _template_file))
        for name in _FILES:
            config = _joined(
                config, _read(place / name, lambda file: read_json(file, dict))
            )
    return config


def write(folder: Path, config: TokenizerConfig) -> None:
    """Writes into a workdir what `read` has read, where there is anything."""
    fields: dict[str, Any] = (
        {"eos_token_id": list(config.end_ids)} if config.end_ids else {}
    )
    fields |= config.special
    for name, text in (
        (TEMPLATE, config.chat_template),
        (FILE, json.dumps(fields, indent=1) + "\n"),
    ):
        if text if name == TEMPLATE else fields:
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
    """Returns the chat template that a workdir has kept; "" if none. Raises ConfigError
    as `read`.
    """
    return (
        "" if folder is None else _read(folder / TEMPLATE, _template_file).chat_template
    )


def _read(file: Path, reader: Callable[[Path], Mapping[str, Any]]) -> TokenizerConfig:
    """Returns what one file says; nothing where there is none."""
    try:
        fields = reader(file)
        spelt = {
            name: _spelling(fields[name], name) for name in _SPECIAL if fields.get(name)
        }
        ids = tuple(dict.fromkeys(_end_ids(fields)))
        return TokenizerConfig(ids, spelt, _template(fields.get("chat_template")))
    except FileNotFoundError:
        return TokenizerConfig()
    except Malformed as error:
        raise ConfigError(f"{file}: {error}; copy it again, or remove it") from error


def _joined(first: TokenizerConfig, second: TokenizerConfig) -> TokenizerConfig:
    ids = tuple(dict.fromkeys((*first.end_ids, *second.end_ids)))
    return TokenizerConfig(
        ids,
        {**second.special, **first.special},
        first.chat_template or second.chat_template,
    )


def _template_file(file: Path) -> dict[str, str]:
    try:
        return {"chat_template": read_bytes(file).decode()}
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 at byte {error.start}") from error


def _end_ids(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yields the ids that one file says end a text; raises Malformed."""
    text = fields.get("text_config")  # of models that also see
    for part in (fields, text if isinstance(text, dict) else {}):
        ids = part.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        yield from (of_kind(end, int, "eos_token_id") for end in listed)


def _spelling(token: Any, name: str) -> str:
    """Returns how a token is spelt: a text, or the `content` of a dict."""
    return of_kind(
        token.get("content") if isinstance(token, dict) else token, str, name
    )


def _template(value: Any) -> str:
    """Returns a chat template; of several the one called `default`. Raises
    Malformed.
    """
    if isinstance(value, list):
        named = {
            of_kind(entry, dict, "a chat template").get("name"): entry
            for entry in value
        }
        value = named["default"].get("template") if "default" in named else None
    return of_kind("" if value is None else value, str, "chat_template")
