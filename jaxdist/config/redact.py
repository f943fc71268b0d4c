"""Texts without the secrets of URLs.

A URL may carry a password (`ftp://me:PASSWORD@host/run`) or a signature
(`https://host/run?sig=...`). Neither may be printed, logged or stored.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote

HIDDEN = "***"
# A path that was made of a URL has one slash.
_MARK = re.compile("(:/{1,2})")
# Schemes whose user is the name of an account or a container. In other schemes, such as
# https, it may be a token.
_NAMED_USERS = re.compile(
    "(abfss?|wasbs?|sftp|ssh|scp|ftps?|smb|hdfs|webhdfs|hf)", re.IGNORECASE
)
_SCHEME = re.compile(r"[A-Za-z0-9+.-]{1,32}\Z")
# What follows the slashes of a URL: in a sentence, and in a text that is one URL, with
# or without a flag. A password may have marks that end a URL in a sentence.
_REST = re.compile(r"(?:[^\s/@\"<>`]*@)?[^\s\"'<>`]*")
_WHOLE_REST = re.compile(r"\S*")
_WHOLE = re.compile(r"(--[\w.-]+=)?[A-Za-z0-9+.-]{1,32}:/{1,2}\S*")
# a user whose password has marks that begin a query or a fragment
_ODD_USER = re.compile(r"[^/?#@:]*:(?!\d+[?#])[^/@]*?[?#][^/@]*@")
_VALUE = re.compile(r"=[^&;]*")
_STEP = re.compile("[0-9]{1,18}")  # of FOLDER@STEP
_PUNCTUATION = ".,:;!)]}"
# A value whose name is that of a secret, as clients print a URL without its scheme.
_NAMED_SECRET = re.compile(
    r"([?&;][\w.%-]{0,40}(?:token|sig|signature|secret|passw(?:or)?d|credential|key|auth)"
    r"[\w.%-]{0,40}=)[^&;\s\"'<>`]*[^&;\s\"'<>`.,:!)\]}]",
    re.IGNORECASE,
)
_SHORTEST = 4  # characters of a secret that is hidden wherever it occurs


def without_secrets(text: str, url: str = "") -> str:
    """Hides the passwords and the values of queries in all URLs of a text.

    Args:
      text: the text, such as a URL or a message that contains URLs.
      url: a URL whose secrets are hidden wherever they occur. A store's client may
        print parts of its URL.
    """
    for secret in _secrets(url):
        text = text.replace(secret, HIDDEN)
    if ":/" in text:
        is_whole = _WHOLE.fullmatch(text) is not None
        pieces = _MARK.split(text)
        shown = pieces[:1]
        for number in range(1, len(pieces), 2):
            scheme = _SCHEME.search(pieces[number - 1][-32:])
            rest = _hide(pieces[number + 1], scheme[0] if scheme else "", is_whole)
            shown += [pieces[number], rest]
        text = "".join(shown)
    if "=" in text:
        text = _NAMED_SECRET.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redacted(value: object) -> object:
    """Hides the secrets of URLs in all texts of a JSON value, such as a config."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redacted(item) for item in value])
    return value


def is_redacted(url: str) -> bool:
    """Tests whether the secrets of a URL were hidden, so that it cannot be used."""
    return HIDDEN in url and without_secrets(url) == url


def _hide(text: str, scheme: str, is_whole: bool) -> str:
    """Hides the secrets of a URL's rest.

    Args:
      text: the text that begins with the rest.
      scheme: the URL's scheme.
      is_whole: whether the whole text is the rest.
    """
    found = (_WHOLE_REST if is_whole else _REST).match(text)
    assert found is not None  # the pattern matches an empty text, too
    rest = found[0].rstrip(_PUNCTUATION)
    after = text[len(rest) :]
    place, query, fragment = _cut(rest)
    user, host = _cut_user(place)
    if user and (":" in user or not _NAMED_USERS.fullmatch(scheme)):
        user = HIDDEN
    shown = f"{user}@{host}" if user else host
    if query:
        shown += "?" + _hide_values(query)
    if fragment:
        # The fragment of a page is no secret.
        shown += "#" + (_hide_values(fragment) if "=" in fragment else fragment)
    return shown + after


def _cut(rest: str) -> tuple[str, str, str]:
    """Cuts a URL's rest into its place, query and fragment."""
    odd_user = _ODD_USER.match(rest)
    start = odd_user.end() if odd_user else 0
    place, _, fragment = rest[start:].partition("#")
    place, _, query = place.partition("?")
    return rest[:start] + place, query, fragment


def _cut_user(place: str) -> tuple[str, str]:
    """Cuts a URL's place into its user with the password, and its host with the path.

    A password may have a slash that is not quoted, as keys of S3 do.
    """
    authority = place.partition("/")[0]
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        if ":" not in user and _STEP.fullmatch(host):
            return "", place  # BUCKET@STEP
        return user, place[len(user) + 1 :]
    user, at, host = place.rpartition("@")
    has_port = authority.rpartition(":")[2].isdecimal()
    if at and ":" in authority and not has_port and not _STEP.fullmatch(host):
        return user, host
    return "", place


def _hide_values(query: str) -> str:
    if "=" not in query:
        return HIDDEN
    return _VALUE.sub(f"={HIDDEN}", query)


def _secrets(url: str) -> list[str]:
    """Lists the secret parts of a URL, the longest first."""
    place, query, fragment = _cut(url.partition("://")[2])
    user = _cut_user(place)[0]
    parts = [user.partition(":")[2], query]
    if ":" in user:
        parts.append(user)
    if "=" in fragment:
        parts.append(fragment)
    for pairs in (query, fragment):
        parts += [found[0][1:] for found in _VALUE.finditer(pairs)]
    parts += [unquote(part) for part in parts]
    found = {part for part in parts if len(part) >= _SHORTEST and part != HIDDEN}
    return sorted(found, key=len, reverse=True)
