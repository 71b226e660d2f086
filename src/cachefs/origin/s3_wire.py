"""GETs of whole small objects as they go over the wire: the request, and the head of the answer.

For the usual case alone. An answer that is not exactly what was expected is left to obstore, which
asks again and knows what to make of it.
"""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from botocore.credentials import ReadOnlyCredentials

from cachefs.origin.s3_config import S3Target
from cachefs.origin.s3_listing import version_of
from cachefs.origin.s3_sign import signed_headers

_HEAD_LINES = 100
REPLACED = (404, 412)
"""Answers that say something about one object, and nothing about the server."""


class Wanted(NamedTuple):
    """An object; `md5` is what its bytes are compared with."""

    key: str
    e_tag: str
    size_bytes: int
    md5: bytes | None


class UnusualError(Exception):
    """The answer is not what this module was made for."""


class Head(NamedTuple):
    """Of an answer."""

    status: int
    is_wanted: bool
    """The object follows, as it is wanted."""
    length_bytes: int | None
    """Of what follows, if it is told."""
    stays_open: bool
    """The server takes another request on this connection afterwards."""
    headers: dict[bytes, bytes]
    """By lower-case names."""


def get_request(
    target: S3Target, item: Wanted, keys: ReadOnlyCredentials | None, now_s: float
) -> bytes:
    """The GET of an object. Raises `UnusualError` for a name that can't be written."""
    address = urlsplit(target.base_url)
    path = f"{address.path}/{quote(item.key, safe='/-_.~')}"
    headers = {"host": address.netloc, "if-match": item.e_tag}
    if keys is not None:
        headers |= signed_headers(keys, target.region, address.netloc, path, now_s)
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if not all(line.isprintable() for line in lines):
        raise UnusualError
    return "\r\n".join([*lines, "\r\n"]).encode("ascii")


def read_head(lines: Iterable[bytes], item: Wanted) -> Head:
    """Of the answer to that: its `lines` without their ends, up to the empty one, which is not
    among them. Raises `UnusualError`."""
    version = status = b""
    headers: dict[bytes, bytes] = {}
    for number, line in enumerate(lines):
        if number == 0:
            version, _, rest = line.partition(b" ")
            status = rest[:3]
            continue
        name, _, value = line.partition(b":")
        name = name.lower()
        if number > _HEAD_LINES or (name in headers and name in (b"content-length", b"etag")):
            raise UnusualError
        headers[name] = value.strip()
    if version != b"HTTP/1.1" or not status.isdigit():
        raise UnusualError
    length = headers.get(b"content-length", b"")
    is_counted = length.isdigit() and b"transfer-encoding" not in headers
    length_bytes = int(length) if is_counted else None
    e_tag = version_of(headers.get(b"etag", b"").decode("latin-1"), 0, 0)
    is_wanted = status == b"200" and (length_bytes, e_tag) == (item.size_bytes, item.e_tag)
    stays_open = headers.get(b"connection", b"").lower() != b"close"
    return Head(int(status), is_wanted, length_bytes, stays_open, headers)
