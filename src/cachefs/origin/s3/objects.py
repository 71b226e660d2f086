"""GETs and HEADs of objects. `get` and `head` block and must be called in a worker thread.

An object is its stored bytes. Some servers change them on the way: Google Cloud Storage unpacks an
object that is stored with Content-Encoding gzip, unless the client accepts gzip
(cloud.google.com/storage/docs/transcoding), and some gateways pack any object if the client does.
So `get` asks again, in the other way, if an answer shows this. Some gateways ignore Range; of their
answer, `get` takes the part that it needs.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from cachefs.errors import BadDataError, ObjectChangedError, OriginError
from cachefs.foreign_numbers import whole_number
from cachefs.log import warn_once
from cachefs.origin.body import Body
from cachefs.origin.s3 import digest
from cachefs.origin.s3.bucket_reader import BucketReader
from cachefs.origin.s3.exchange import Exchange
from cachefs.origin.s3.listing import MOST_BYTES, mtime_ns_in, version_of
from cachefs.origin.s3.versions import is_strong, is_version
from cachefs.types import ObjectMeta

log = logging.getLogger(__name__)

_MOST_WITHOUT_RANGES_BYTES = 64 << 20
"""The largest object that is read in parts from a server that ignores Range: each part costs all
bytes before it."""
_SKIPPED_AT_A_TIME = 256 << 10


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
    part = None
    if (offset, length) != (0, meta.size_bytes):
        part = range(offset, offset + length)
    accepts_gzip = reader.accepts_gzip
    sink = _Bytes(reader, key, meta, length, part, body)
    _receive(reader, sink, accepts_gzip, exchange)
    if sink.is_changed_on_the_way:
        accepts_gzip = not accepts_gzip
        sink = _Bytes(reader, key, meta, length, part, body)
        _receive(reader, sink, accepts_gzip, exchange)
        if sink.is_wanted:
            reader.accepts_gzip = accepts_gzip
    if not sink.is_wanted or sink.count != length:
        return Got(sink.version, sink.told_bytes if not sink.is_wanted else sink.count)
    data = sink.data()
    return Got(sink.version, length, data, md5 is None or digest.has_md5(data, md5))


def _receive(reader: BucketReader, sink: "_Bytes", accepts_gzip: bool, exchange: Exchange) -> None:
    headers = {"accept-encoding": "gzip"} if accepts_gzip else {}
    if is_strong(sink.meta.version):
        headers["if-match"] = sink.meta.version
    if sink.part is not None:
        headers["range"] = f"bytes={sink.part.start}-{sink.part.stop - 1}"
    with suppress(_EnoughError):
        reader.send("GET", sink.key, headers=headers, sink=sink, exchange=exchange)


class _EnoughError(OriginError):
    """All bytes that are needed have come, and the rest of the answer is not read."""


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
        self.key = key
        self.meta = meta
        self._length = length
        self.part = part
        self._body = body
        self._own = bytearray()
        self._skipped = bytearray()
        self._left_to_skip = 0
        self._is_whole_answer = False
        self.version = ""
        self.told_bytes = 0
        self.count = 0
        self.is_wanted = False
        self.is_changed_on_the_way = False
        """The answer has not the bytes that the store keeps, but what somebody made of them."""

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Sink.begin`. Raises `BadDataError` if a part does not say that it is the right one,
        `OriginError` if the server ignores Range and the object is too large for that."""
        told = whole_number(headers.get("content-length", ""))
        self._is_whole_answer = status == 200 and self.part is not None
        wanted_bytes = self.meta.size_bytes if self._is_whole_answer else self._length
        self.told_bytes = wanted_bytes if told is None else told
        found = meta_from(headers, self._size_bytes(status, headers))
        is_right = is_version(self.meta.version, found)
        self.version = self.meta.version if is_right else found.version
        is_other_length = self.told_bytes != wanted_bytes
        self.is_changed_on_the_way = is_unpacked(headers) or (
            is_other_length and _depends_on_encoding(headers)
        )
        is_right = is_right and not is_other_length
        self.is_wanted = is_right and not self.is_changed_on_the_way
        if self.is_wanted and self._is_whole_answer:
            self._skip_to_part()
        return self.is_wanted

    def _skip_to_part(self) -> None:
        assert self.part is not None
        if self.meta.size_bytes > _MOST_WITHOUT_RANGES_BYTES:
            raise OriginError(
                f"{self._subject} can't be read: {self._target.endpoint} ignores Range and sends "
                f"the whole object for each part, which is done up to "
                f"{_MOST_WITHOUT_RANGES_BYTES >> 20} MiB: use an endpoint without that gateway"
            )
        warn_once(
            log,
            self._target.base_url,
            "%s ignores Range and sends whole objects for their parts, so large files are slow",
            self._target.endpoint,
        )
        self._left_to_skip = self.part.start
        self._skipped = bytearray(min(_SKIPPED_AT_A_TIME, self._left_to_skip))

    @property
    def _subject(self) -> str:
        return f"{self._target.scheme}://{self._target.bucket}/{self.key}"

    def _size_bytes(self, status: int, headers: Mapping[str, str]) -> str:
        """Return the size of the whole object, as the answer says it."""
        if status == 200:
            return str(self.told_bytes)
        told, _, size = headers.get("content-range", "").rpartition("/")
        part = self.part
        wanted = "" if part is None else f"bytes {part.start}-{part.stop - 1}"
        if status != 206 or told != wanted:
            raise BadDataError(
                f"{self._subject} can't be read: {self._target.endpoint} sent another part than "
                "the one that was asked, or did not say which"
            )
        return str(self.meta.size_bytes) if size == "*" else size

    def room(self, most_bytes: int) -> memoryview | None:
        """See `Sink.room`."""
        if self._left_to_skip:
            return memoryview(self._skipped)[: min(most_bytes, self._left_to_skip)]
        most_bytes = min(most_bytes, self._length - self.count)
        if not most_bytes and self._is_whole_answer:
            raise _EnoughError
        if self._body is not None:
            return self._body.room(most_bytes)
        if not self._own:
            self._own = bytearray(self._length)
        return memoryview(self._own)[self.count : self.count + most_bytes]

    def filled(self, count: int) -> None:
        """See `Sink.filled`."""
        if self._left_to_skip:
            self._left_to_skip -= count
            count = 0
        self.count += count
        if self._body is not None:
            self._body.filled(count)

    def data(self) -> memoryview:
        """Return all bytes."""
        return memoryview(self._own) if self._body is None else self._body.take()


def is_unpacked(headers: Mapping[str, str]) -> bool:
    """Whether the store has unpacked the object of an answer on the way. `headers` have lower-case
    names."""
    was_packed = "gzip" in headers.get("x-goog-stored-content-encoding", "")
    return was_packed and "gzip" not in headers.get("content-encoding", "")


def _depends_on_encoding(headers: Mapping[str, str]) -> bool:
    """Whether an answer says that another Accept-Encoding would change it."""
    varies = "accept-encoding" in headers.get("vary", "").lower()
    return varies or "content-encoding" in headers


def head(reader: BucketReader, key: str, exchange: Exchange | None = None) -> ObjectMeta:
    """Return the metadata of an object. Raises `OriginError`."""
    headers = reader.send("HEAD", key, exchange=exchange).headers
    size = headers.get("x-goog-stored-content-length") or headers.get("content-length")
    return meta_from(headers, size or _size_from_part(reader, key, exchange))


def _size_from_part(reader: BucketReader, key: str, exchange: Exchange | None) -> str:
    """Return the size of an object as the answer to a GET of its first byte tells it: some gateways
    send no Content-Length."""
    sink = _Nowhere()
    try:
        reader.send("GET", key, headers={"range": "bytes=0-0"}, sink=sink, exchange=exchange)
    except ObjectChangedError:  # 416: it has no first byte
        return "0"
    return sink.size


class _Nowhere:
    """Takes no body; see `exchange.Sink`."""

    size = ""

    def begin(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Sink.begin`."""
        self.size = headers.get("content-range", "").rpartition("/")[2]
        return False

    def room(self, most_bytes: int) -> memoryview | None:
        """See `Sink.room`."""
        return None

    def filled(self, count: int) -> None:
        """See `Sink.filled`."""


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
