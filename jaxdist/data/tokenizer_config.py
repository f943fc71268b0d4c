"""What the files beside a tokenizer.json say: which tokens end a text.

Hugging Face folders spread it over several files. A run keeps what it read in one of them, the
tokenizer_config.json of its workdir, which then is all that is needed.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage import atomic
from jaxdist.storage.untrusted import Malformed, of_kind, read_json

FILE = "tokenizer_config.json"
HUGGINGFACE = "huggingface"  # folder in a workdir: what is copied of the folder that its weights came from
# The first that spells a special token wins, as in transformers; end ids are those of all.
_FILES = (FILE, "special_tokens_map.json", "generation_config.json", "config.json")


@dataclass(frozen=True)
class TokenizerConfig:
    """What to know of a tokenizer beside its tokenizer.json."""

    end_tokens: tuple[int | str, ...] = ()  # ids, and the spelling of one: any of them ends a text


def read(folder: Path) -> TokenizerConfig:
    """Returns what a Hugging Face folder or a workdir says.

    Raises:
      ConfigError: a file is malformed.
    """
    ids: dict[int, None] = {}
    names: list[str] = []
    for place in (folder, folder / HUGGINGFACE):
        for name in _FILES:
            try:
                fields = read_json(place / name, dict)
                ids |= dict.fromkeys(_end_ids(fields))
                names += [_spelling(fields["eos_token"], "eos_token")] if fields.get("eos_token") else []
            except FileNotFoundError:
                continue
            except Malformed as error:
                raise ConfigError(f"{place / name}: {error}; copy it again, or remove it") from error
    return TokenizerConfig((*ids, *names[:1]))


def write(folder: Path, config: TokenizerConfig) -> None:
    """Writes what `read` has read into a workdir."""
    ids = [end for end in config.end_tokens if isinstance(end, int)]
    names = [end for end in config.end_tokens if isinstance(end, str)]
    fields: dict[str, Any] = ({"eos_token_id": ids} if ids else {}) | (
        {"eos_token": names[0]} if names else {}
    )
    if fields:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(folder / FILE, json.dumps(fields, indent=1) + "\n")


def _end_ids(fields: Mapping[str, Any]) -> Iterator[int]:
    """Yields the ids that one file says end a text; raises Malformed."""
    text = fields.get("text_config")  # of models that also see
    for part in (fields, text if isinstance(text, dict) else {}):
        ids = part.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        yield from (of_kind(end, int, "eos_token_id") for end in listed)


def _spelling(token: Any, name: str) -> str:
    """Returns how a token is spelt: a text, or the `content` of a dict."""
    return of_kind(token.get("content") if isinstance(token, dict) else token, str, name)
