"""SHA-256 digests in hex.

Caches and checkpoints contain them, so their definition must not change.
"""

import hashlib
import os
from pathlib import Path

# Bytes that are hashed in one call, which does not hold the interpreter's lock. With
# large pieces, a thread of low priority is hardly ever interrupted while it holds it.
_PIECE_BYTES = 1 << 22


def digest(*parts: object) -> str:
    """Computes the digest of the parts' texts, with a NUL between them."""
    # Names of files that are not UTF-8 contain surrogates, which a plain encode
    # refuses.
    return digest_bytes("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))


def digest_bytes(data: bytes) -> str:
    """Computes the digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Computes the digest of a file's content, as `sha256sum` prints it."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        piece = bytearray(max(1, min(size, _PIECE_BYTES)))  # most files are small
        view = memoryview(piece)
        while count := file.readinto(piece):
            hashed.update(view[:count])
    return hashed.hexdigest()
