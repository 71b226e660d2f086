"""GETs and HEADs of objects. `get` and `head` block and must be called in a worker thread."""

from collections.abc import Mapping
from typing import NamedTuple

from cachefs.errors import BadDataError
from cachefs.foreign_numbers import whole_number
from cachefs.origin.body import Body
from cachefs.origin.s3 import digest
from cachefs.origin.s3.bucket_reader import BucketReader
from cachefs.origin.s3.exchange import Exchange
from cachefs.origin.s3.listing import MOST_BYTES, mtime_ns_in, version_of
from cachefs.types import ObjectMeta


class Got(NamedTuple):
    """The result of a GET. `data` is None if the answer has the wrong version or length.
    `size_bytes` is the length that arrived or was announced."""

    version: str
    size_bytes: int
    data: memoryview | None = None
    is_as_told: bool = True


def get(
    reader: BucketReader,
    key: str,
    meta: ObjectMeta,
    offset: int,
    length: int,
    md5: bytes | None,
    body: Body | None,
    exchange: Exchange,
) -> Got:
    """Return `length` bytes at `offset` of the version `meta`, and whether they have this MD5. If
    the answer announces another version or length, its body is not read and takes no memory. Never
    reads on after more than `length` bytes. Raises `OriginError`."""
    headers = {}
    if is_strong(meta.version):
        headers["if-match"] = meta.version
    part = None
    if (offset, length) != (0, meta.size_bytes):
        part = range(offset, offset + length)
        headers["range"] = f"bytes={part.start}-{part.stop - 1}"
    sink = _Bytes(reader, key, meta, length, part, body)
    reader.send("GET", key, headers=headers, sink=sink, exchange=exchange)
    if not sink.is_wanted or sink.count != length:
        return Got(sink.version, sink.told_bytes if not sink.is_wanted else sink.count)
    data = sink.data()
    return Got(sink.version, length, data, md5 is None or digest.has_md5(data, md5))


class _Bytes:
    """The bytes of one GET; see `exchange.Sink`. They go to `body`, or to a buffer of its own."""

    def __init__(
        self,
        reader: BucketReader,
        key: str,
        meta: ObjectMeta,
        length: int,
        part: range | None,
        body: Body | None,
    ) -> None:
        self._target = reader.target
        self._key = key
        self._meta = meta
        self._length = length
        self._part = part
        self._body = body
        self._own = bytearray()
        self.version = ""
        self.told_bytes = 0
        self.count = 0
        self.is_wanted = False

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Sink.begin`. Raises `BadDataError` if a part does not say that it is the right
        one."""
        found = meta_from(headers, self._size_bytes(status, headers))
        self.version = found.version
        told = headers.get("content-length")
        self.told_bytes = self._length if told is None else whole_number(told) or 0
        self.is_wanted = (self.version, self.told_bytes) == (self._meta.version, self._length)
        return self.is_wanted

    def _size_bytes(self, status: int, headers: Mapping[str, str]) -> str:
        """Return the size of the whole object, as the answer says it."""
        if self._part is None and status == 200:
            return headers.get("content-length", str(self._length))
        told, _, size = headers.get("content-range", "").rpartition("/")
        part = self._part
        wanted = "" if part is None else f"bytes {part.start}-{part.stop - 1}"
        if status != 206 or told != wanted:
            raise BadDataError(
                f"{self._target.scheme}://{self._target.bucket}/{self._key} can't be read: "
                f"{self._target.endpoint} sent another part than the one that was asked, or did "
                "not say which"
            )
        return str(self._meta.size_bytes) if size == "*" else size

    def room(self, most_bytes: int) -> memoryview | None:
        """See `Sink.room`."""
        most_bytes = min(most_bytes, self._length - self.count)
        if self._body is not None:
            return self._body.room(most_bytes)
        if not self._own:
            self._own = bytearray(self._length)
        return memoryview(self._own)[self.count : self.count + most_bytes]

    def filled(self, count: int) -> None:
        """See `Sink.filled`."""
        self.count += count
        if self._body is not None:
            self._body.filled(count)

    def data(self) -> memoryview:
        """Return all bytes."""
        return memoryview(self._own) if self._body is None else self._body.take()


def head(reader: BucketReader, key: str, exchange: Exchange | None = None) -> ObjectMeta:
    """Return the metadata of an object. Raises `OriginError`."""
    headers = reader.send("HEAD", key, exchange=exchange).headers
    return meta_from(headers, headers.get("content-length", ""))


def meta_from(headers: Mapping[str, str], size: str) -> ObjectMeta:
    """Return the metadata that headers (by lower-case names) tell of an object of `size` bytes.
    Raises `BadDataError` if there is neither an ETag nor a time: some servers answer like this for
    a directory, which is no object."""
    mtime_ns = mtime_ns_in(headers.get("last-modified", ""))
    e_tag = headers.get("etag")
    if not e_tag and not mtime_ns:
        raise BadDataError("the answer has neither an ETag nor a time, so it describes no object")
    size_bytes = whole_number(size)
    if size_bytes is None or size_bytes > MOST_BYTES:
        raise BadDataError("the answer does not tell a size that an object can have")
    return ObjectMeta(size_bytes, mtime_ns or 0, version_of(e_tag, mtime_ns or 0, size_bytes))


def is_strong(version: str) -> bool:
    """Whether `version` is an ETag that can be sent as If-Match. Weak ETags never match. A version
    that no header can hold is only compared with the version of the answer."""
    return version.startswith('"') and version.isascii() and version.isprintable()
