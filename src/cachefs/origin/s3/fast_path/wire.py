"""GETs of small objects on the wire: writes the request and parses the head of the answer.

This module handles only the usual case. For any unexpected answer, the caller repeats the request
through `BucketReader`, which handles all cases.
"""

from typing import NamedTuple
from urllib.parse import quote, urlsplit

from botocore.credentials import ReadOnlyCredentials

from cachefs.foreign_numbers import whole_number
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.listing import MOST_BYTES, mtime_ns_in, version_of
from cachefs.origin.s3.signing import signed_headers
from cachefs.types import ObjectMeta

_HEAD_LINES = 100
_SIZE_BYTES = 1024
"""The longest line with the size of a chunk, and its extensions."""
_MOST_CHUNKS = 1000
"""Of one short answer. Servers send it in one to twenty."""
REPLACED = (404, 412)
"""Statuses that concern only one object: it is absent or has another version."""
ERROR_BYTES = 64 << 10
"""The longest body of an error that is read; after a longer one the connection is closed."""


class Wanted(NamedTuple):
    """An object to read, or a part of it. If `md5` is not None, the bytes are compared with it."""

    key: str
    e_tag: str
    size_bytes: int
    """The size of the whole object."""
    md5: bytes | None
    part: range | None = None
    """The positions of the bytes to read; None means the whole object."""

    @property
    def length_bytes(self) -> int:
        """How many bytes to read."""
        return self.size_bytes if self.part is None else len(self.part)


class UnusualError(Exception):
    """The request or the answer is not the usual case that this module handles."""


class Head(NamedTuple):
    """The head of an answer."""

    status: int
    is_wanted: bool
    """The wanted object follows."""
    length_bytes: int | None
    """The length of the body; None if the head does not state it."""
    is_chunked: bool
    """The body consists of chunks."""
    stays_open: bool
    """The server accepts another request on this connection afterwards."""
    headers: dict[bytes, bytes]
    """The headers by lower-case names."""


def get_request(
    target: S3Target, item: Wanted, credentials: ReadOnlyCredentials | None, now_s: float
) -> bytes:
    """Return the GET of an object or its part. Raises `UnusualError` if a header is not
    printable."""
    conditions = {"if-match": item.e_tag}
    if item.part is not None:
        conditions["range"] = f"bytes={item.part.start}-{item.part.stop - 1}"
    return _request(target, item.key, conditions, credentials, now_s)


def look_up_request(
    target: S3Target,
    key: str,
    most_bytes: int,
    credentials: ReadOnlyCredentials | None,
    now_s: float,
) -> bytes:
    """Return the GET of the first `most_bytes` of any version. Raises as `get_request`."""
    return _request(target, key, {"range": f"bytes=0-{most_bytes - 1}"}, credentials, now_s)


def _request(
    target: S3Target,
    key: str,
    conditions: dict[str, str],
    credentials: ReadOnlyCredentials | None,
    now_s: float,
) -> bytes:
    address = urlsplit(target.base_url)
    path = f"{address.path}/{quote(key, safe='/-_.~')}"
    headers = {"host": address.netloc, **conditions}
    if target.unpacks:
        headers["accept-encoding"] = "gzip"
    if credentials is not None:
        headers |= signed_headers(
            credentials, target.region, address.netloc, path, now_s, target.headers
        )
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if not "".join(lines).isprintable():
        raise UnusualError
    return "\r\n".join([*lines, "\r\n"]).encode("ascii")


def read_head(head: bytes, item: Wanted | None) -> Head:
    """Parse the head of an answer, without the empty line that ends it. Without an `item`, any
    object is wanted. Raises `UnusualError`."""
    version = status = b""
    headers: dict[bytes, bytes] = {}
    for number, line in enumerate(head.split(b"\r\n", _HEAD_LINES + 1)):
        if number == 0:
            version, _, rest = line.partition(b" ")
            status = rest[:3]
            continue
        name, _, value = line.partition(b":")
        name = name.lower()
        if number > _HEAD_LINES or (name in headers and name in (b"content-length", b"etag")):
            raise UnusualError
        headers[name] = value.strip()
    status_number = whole_number(status)
    if version != b"HTTP/1.1" or status_number is None:
        raise UnusualError
    encoding = headers.get(b"transfer-encoding")
    length_bytes = None
    if encoding is None:
        length_bytes = whole_number(headers.get(b"content-length", b""))
    content_range = headers.get(b"content-range")
    was_packed = b"gzip" in headers.get(b"x-goog-stored-content-encoding", b"")
    if was_packed and b"gzip" not in headers.get(b"content-encoding", b""):
        is_wanted = False  # the store has unpacked it on the way
    elif item is None:
        is_wanted = length_bytes is not None and (
            (status == b"200" and content_range is None)
            or (status == b"206" and _is_beginning(content_range or b"", length_bytes))
        )
    else:
        e_tag = version_of(headers.get(b"etag", b"").decode("latin-1"), 0, 0)
        is_wanted = (status, e_tag, length_bytes) == (b"200", item.e_tag, item.size_bytes)
        if item.part is not None:
            told = f"bytes {item.part.start}-{item.part.stop - 1}/{item.size_bytes}".encode()
            is_part = content_range == told
            is_right = (e_tag, length_bytes) == (item.e_tag, len(item.part))
            is_wanted = status == b"206" and is_part and is_right
    stays_open = headers.get(b"connection", b"").lower() != b"close"
    is_chunked = encoding is not None and encoding.lower() == b"chunked"
    return Head(status_number, is_wanted, length_bytes, is_chunked, stays_open, headers)


def _is_beginning(content_range: bytes, length_bytes: int) -> bool:
    """Whether a range says that it is the first `length_bytes` of an object of known size. Without
    that, a part would be taken for the whole object."""
    told, _, size = content_range.rpartition(b"/")
    size_bytes = whole_number(size)
    is_first = told == f"bytes 0-{length_bytes - 1}".encode()
    return is_first and size_bytes is not None and size_bytes >= length_bytes


def chunk_bytes(line: bytes) -> int | None:
    """Return the size that the first line of a chunk says, without its line end; None if it is no
    such line."""
    return whole_number(line.partition(b";")[0], 16)


class ChunkedBody:
    """Joins the chunks of a short answer while it arrives. It looks at each byte once, however
    small the pieces are in which a server sends them."""

    def __init__(self) -> None:
        self.received = bytearray()
        """All bytes after the head."""
        self._body = bytearray()
        self._position = 0
        """Where the next chunk begins."""
        self._chunks = 0

    def take(self, piece: bytes | memoryview) -> bytes | None:
        """Take the bytes that follow. Return the whole body; None if more bytes must come. Raises
        `UnusualError` if these are no chunks, if trailers or other bytes follow, and for more than
        `ERROR_BYTES` or `_MOST_CHUNKS`."""
        received = self.received
        received += piece
        if len(received) > ERROR_BYTES:
            raise UnusualError
        while (end := received.find(b"\r\n", self._position)) >= 0:
            if end - self._position > _SIZE_BYTES:
                raise UnusualError
            length = chunk_bytes(bytes(received[self._position : end]))
            if length is None:
                raise UnusualError
            first = end + 2
            following = first + length + 2
            if not b"\r\n".startswith(received[following - 2 : following]):
                raise UnusualError
            if following > len(received):
                return None
            if not length:
                if following != len(received):
                    raise UnusualError
                return bytes(self._body)
            self._chunks += 1
            if self._chunks > _MOST_CHUNKS:
                raise UnusualError
            self._body += received[first : first + length]
            self._position = following
        if len(received) - self._position > _SIZE_BYTES:
            raise UnusualError
        return None


def described(headers: dict[bytes, bytes]) -> ObjectMeta | None:
    """Return the metadata of the whole object from the headers of a wanted answer (`Head`). Return
    None if they lack its size, time or version; the caller sends a HEAD then."""
    length = headers.get(b"content-length", b"")
    if b"content-range" in headers:  # `read_head` has checked it
        length = headers[b"content-range"].rpartition(b"/")[2]
    e_tag = headers.get(b"etag", b"").decode("latin-1")
    size_bytes = whole_number(length)
    if size_bytes is None or size_bytes > MOST_BYTES or not e_tag:
        return None
    mtime_ns = mtime_ns_in(headers.get(b"last-modified", b"").decode("latin-1"))
    if mtime_ns is None:
        return None
    return ObjectMeta(size_bytes, mtime_ns, version_of(e_tag, mtime_ns, size_bytes))
