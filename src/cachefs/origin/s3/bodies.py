"""The bodies of writes: their digests, and how they are sent."""

import base64
import hashlib
from typing import Any

from cachefs.origin.http.wire import Fed
from cachefs.origin.writable import Content
from cachefs.types import Buffer

MOST_BYTES = 256 << 10
"""The longest body of a request without a thread. A SHA-256 of it occupies the loop for .2 ms."""
_HASHED_BYTES = 1 << 20


def md5_of(content: Content) -> bytes:
    """Return the MD5 of all bytes. Blocks."""
    found: bytes = _digest(hashlib.md5(usedforsecurity=False), content).digest()
    return found


def digests(content: Content, wants_sha256: bool, wants_md5: bool) -> tuple[str, bytes | None]:
    """Return the SHA-256 of all bytes in hexadecimal digits, and their MD5, as far as each is
    wanted. Blocks. Modern processors need less than half of the time of an MD5 for a SHA-256."""
    sha256 = _digest(hashlib.sha256(), content).hexdigest() if wants_sha256 else ""
    return sha256, md5_of(content) if wants_md5 else None


def _digest(found: Any, content: Content) -> Any:
    for offset in range(0, content.size_bytes, _HASHED_BYTES):
        length = min(_HASHED_BYTES, content.size_bytes - offset)
        found.update(content.read(offset, length))
    return found


def as_header(md5: bytes) -> str:
    """Return a value for Content-MD5."""
    return base64.b64encode(md5).decode()


def sent_as(content: Content) -> Buffer | Fed:
    """Return the body of a request: the bytes, or for many of them what a thread reads."""
    if is_short(content):
        return content.read(0, content.size_bytes)
    return Fed(content.size_bytes, content.read, content.note_sent)


def is_short(content: Content) -> bool:
    """Whether the loop may read and hash all of it."""
    return content.is_in_memory and content.size_bytes <= MOST_BYTES
