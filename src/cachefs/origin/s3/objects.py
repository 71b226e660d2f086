"""GETs and HEADs of objects.

An object is its stored bytes. Some servers change them on the way: Google Cloud Storage unpacks an
object that is stored with Content-Encoding gzip, unless the client accepts gzip
(cloud.google.com/storage/docs/transcoding), and some gateways pack any object if the client does.
So `get` asks again, in the other way, if an answer shows this. Some gateways ignore Range; of their
answer, `get` takes the part that it needs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import trio

from cachefs.errors import BadDataError, CredentialsError, ObjectChangedError, OriginError
from cachefs.foreign_numbers import whole_number
from cachefs.log import warn_once
from cachefs.origin.body import Body
from cachefs.origin.http._engine import Room, Transfer
from cachefs.origin.http.wire import Answer, End, Expected, GoOn
from cachefs.origin.s3 import digest, redirects
from cachefs.origin.s3.bucket_reader import BucketReader, Wanted
from cachefs.origin.s3.listing import MOST_BYTES, mtime_ns_in, version_of
from cachefs.origin.s3.versions import is_strong, is_version
from cachefs.types import ObjectMeta, Reply

log = logging.getLogger(__name__)

_MOST_WITHOUT_RANGES_BYTES = 64 << 20
"""The largest object that is read in parts from a server that ignores Range: each part costs all
bytes before it."""
_OF_ONE_OBJECT = (200, 206, 404, 412, *redirects.STATUSES)
"""With another answer than the expected one, these say nothing about other objects."""
_PLAIN_STATUSES = (400, 404, 405, 410, 429, 451)
"""With those from 500 on, the results of a look-up: no such object, a refusal, or a server problem.
Rights and conditions are left out."""
_MOST_HASHED_BYTES = 1 << 20
"""The engine computes the MD5 of so many bytes at most. With more, its thread would do nothing else
for several milliseconds."""


class Got(NamedTuple):
    """The result of a GET. `data` is None if the answer has the wrong version or length.
    `size_bytes` is the length that arrived or was announced. `first_byte_s` is how long the first
    byte took after the request was sent."""

    version: str
    size_bytes: int
    data: memoryview | None = None
    is_as_told: bool = True
    first_byte_s: float = 0.0


async def get(
    reader: BucketReader,
    key: str,
    meta: ObjectMeta,
    offset: int,
    length: int,
    md5: bytes | None,
    body: Body | None,
) -> Got:
    """Return `length` bytes at `offset` of the version `meta`, and whether they have this MD5. If
    the answer announces another version or length, its body is not read and takes no memory. Never
    reads on after more than `length` bytes. Raises `OriginError`."""
    part = None
    if (offset, length) != (0, meta.size_bytes):
        part = range(offset, offset + length)
    accepts_gzip = reader.accepts_gzip
    is_hashed = md5 is not None and length <= _MOST_HASHED_BYTES
    sink = _Bytes(reader, key, meta, length, part, body)
    answer = await _receive(reader, sink, accepts_gzip, is_hashed)
    if sink.is_changed_on_the_way:
        accepts_gzip = not accepts_gzip
        sink = _Bytes(reader, key, meta, length, part, body)
        answer = await _receive(reader, sink, accepts_gzip, is_hashed)
        if sink.is_wanted:
            reader.accepts_gzip = accepts_gzip
    count = answer.filled_bytes
    if not sink.is_wanted or count != length:
        return Got(sink.version, count if sink.is_wanted else sink.told_bytes)
    data, is_as_told = memoryview(sink.room), True
    if is_hashed:
        is_as_told = answer.md5 == md5
    elif md5 is not None:
        is_as_told = await trio.to_thread.run_sync(digest.has_md5, data, md5)
    return Got(sink.version, length, data, is_as_told, answer.first_byte_s)


async def _receive(
    reader: BucketReader, sink: "_Bytes", accepts_gzip: bool, is_hashed: bool
) -> Answer:
    headers = {"accept-encoding": "gzip"} if accepts_gzip else {}
    if is_strong(sink.meta.version):
        headers["if-match"] = sink.meta.version
    if sink.part is not None:
        headers["range"] = f"bytes={sink.part.start}-{sink.part.stop - 1}"
    return await reader.send("GET", sink.key, headers=headers, sink=sink, wants_md5=is_hashed)


class _Bytes:
    """The bytes of one GET; see `wire.Sink`. They go to `body`, or to a buffer of its own."""

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
        # The kernel gives memory only when it is written to.
        self.room = Room(length) if body is None else body.room()
        self.follow: Callable[[Callable[[], int]], Callable[[], None]] | None = None
        if body is not None:
            self.follow = body.follow
        self.version = meta.version
        self.told_bytes = 0
        self.is_wanted = True
        self.is_changed_on_the_way = False
        """The answer has not the bytes that the store keeps, but what somebody made of them."""

    @property
    def expected(self) -> Expected | None:
        """See `Sink.expected`."""
        if not is_strong(self.meta.version):
            return None
        headers = [("etag", self.meta.version), ("content-length", str(self._length))]
        if self.part is None:
            return 200, tuple(headers)
        told = f"bytes {self.part.start}-{self.part.stop - 1}/{self.meta.size_bytes}"
        return 206, (*headers, ("content-range", told))

    def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
        """See `Sink.begin`. Raises `BadDataError` if a part does not say that it is the right one,
        `OriginError` if the server ignores Range and the object is too large for that."""
        told = whole_number(headers.get("content-length", ""))
        is_whole_answer = status == 200 and self.part is not None
        wanted_bytes = self.meta.size_bytes if is_whole_answer else self._length
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
        if not self.is_wanted:
            return None
        if is_whole_answer and self.part is not None:
            self._allow_whole_answers()
            return GoOn(self.part.start, stops_when_full=True)
        return GoOn()

    def _allow_whole_answers(self) -> None:
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


def is_unpacked(headers: Mapping[str, str]) -> bool:
    """Whether the store has unpacked the object of an answer on the way. `headers` have lower-case
    names."""
    was_packed = "gzip" in headers.get("x-goog-stored-content-encoding", "")
    return was_packed and "gzip" not in headers.get("content-encoding", "")


def _depends_on_encoding(headers: Mapping[str, str]) -> bool:
    """Whether an answer says that another Accept-Encoding would change it."""
    varies = "accept-encoding" in headers.get("vary", "").lower()
    return varies or "content-encoding" in headers


class _Exactly(NamedTuple):
    """Takes an expected answer, and no other; see `wire.Sink`."""

    room: Room
    expected: Expected
    follow: None = None

    def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
        """See `Sink.begin`."""
        return None


def begin_get(
    reader: BucketReader,
    key: str,
    meta: ObjectMeta,
    md5: bytes | None,
    on_got: Callable[[memoryview | None, float], None],
    on_failure: Callable[[], None],
    reply: Reply | None,
) -> bool:
    """Begin to get a whole small object with a strong version, and return whether it has begun.
    Then `on_got` is called with its bytes, and how many seconds the first of them took; with None
    if another answer than the expected one came, or other bytes than those of `md5`. `on_failure`
    is called before for answers that say something about the store itself. `reply`: see
    `Wire.begin`; if it could not be sent, `on_got` gets None, too."""
    room = Room(meta.size_bytes)

    def take(transfer: Transfer) -> None:
        end, _, status, _, _, filled, first_us, _, fits = transfer.result()
        if end == End.DONE and fits and filled == meta.size_bytes:
            is_right = md5 is None or transfer.md5 == md5
            is_right = is_right and (reply is None or transfer.is_replied)
            on_got(memoryview(room) if is_right else None, first_us / 1e6)
            return
        if end not in (End.DONE, End.CANCELLED) or status not in _OF_ONE_OBJECT:
            on_failure()
        on_got(None, 0.0)

    headers, expected = _whole(reader, meta)
    return reader.begin(key, headers, _Exactly(room, expected), md5, take, reply)


def _whole(reader: BucketReader, meta: ObjectMeta) -> tuple[dict[str, str], Expected]:
    """Return the headers of a GET of a whole object with a strong version, and its answer."""
    headers = {"if-match": meta.version}
    if reader.accepts_gzip:
        headers["accept-encoding"] = "gzip"
    told = (("etag", meta.version), ("content-length", str(meta.size_bytes)))
    return headers, (200, told)


async def get_many(
    reader: BucketReader,
    wanted: Sequence[tuple[str, ObjectMeta]],
    at_a_time: int,
    stopped: Callable[[], bool],
    on_failure: Callable[[], None],
    found: list[tuple[memoryview, float] | None],
) -> None:
    """Put the bytes of whole objects with strong versions into `found`, and how many seconds the
    first byte of each took, where they come as expected; `wanted` has the keys. Once `stopped()`,
    send no more requests. `on_failure` is called for answers that say something about the store
    itself. The bytes are not compared with an MD5."""
    rooms: dict[int, Room] = {}

    def requests() -> Iterator[tuple[int, Wanted]]:
        for number, (key, meta) in enumerate(wanted):
            if stopped():
                return
            headers, expected = _whole(reader, meta)
            room = rooms[number] = Room(meta.size_bytes)
            yield number, reader.get_into(key, headers, _Exactly(room, expected))

    def take(number: int, transfer: Transfer) -> None:
        end, _, status, _, _, filled, first_us, _, fits = transfer.result()
        room = rooms.pop(number)
        is_whole = fits and filled == wanted[number][1].size_bytes
        if end == End.DONE and is_whole:
            found[number] = memoryview(room), first_us / 1e6
        elif end not in (End.DONE, End.CANCELLED) or status not in _OF_ONE_OBJECT:
            on_failure()

    await reader.get_many(requests(), at_a_time, take)


class LookedUp(NamedTuple):
    """The present version of an object, its first bytes, and the MD5 of these."""

    meta: ObjectMeta
    data: memoryview
    md5: bytes


async def look_up(reader: BucketReader, key: str, most_bytes: int) -> LookedUp | None:
    """Return the present version of an object with its first `most_bytes`, or None if the caller
    must send a HEAD to know more: some answers do not say all of this, a server may ignore Range,
    and HEAD may be allowed where GET is not, as for archived objects. Raises `OriginError`."""
    headers = {"range": f"bytes=0-{most_bytes - 1}"}
    if reader.accepts_gzip:
        headers["accept-encoding"] = "gzip"
    try:
        answer, error = await reader.ask(reader.get_wanted(key, headers, most_bytes))
    except BadDataError:  # it has more bytes
        return None
    if error is not None:
        status = answer.status
        if isinstance(error, CredentialsError) or status in _PLAIN_STATUSES or status >= 500:
            raise error
        return None
    if answer.room is None or is_unpacked(answer.headers):
        return None
    data = memoryview(answer.room)
    meta = _described(answer.status, answer.headers, len(data))
    return None if meta is None else LookedUp(meta, data, answer.md5)


def _described(status: int, headers: Mapping[str, str], length: int) -> ObjectMeta | None:
    """Return the metadata of an object whose first `length` bytes an answer has. None if it does
    not tell its size, time and version: a part would be taken for the whole."""
    size, part = headers.get("content-length", ""), headers.get("content-range")
    if status == 206:
        told, _, size = (part or "").rpartition("/")
        if told != f"bytes 0-{length - 1}":
            return None
    elif part is not None:
        return None
    size_bytes = whole_number(size)
    e_tag, mtime_ns = headers.get("etag"), mtime_ns_in(headers.get("last-modified", ""))
    if size_bytes is None or not length <= size_bytes <= MOST_BYTES:
        return None
    if not e_tag or mtime_ns is None or (status == 200 and size_bytes != length):
        return None
    return ObjectMeta(size_bytes, mtime_ns, version_of(e_tag, mtime_ns, size_bytes))


async def head(reader: BucketReader, key: str) -> ObjectMeta:
    """Return the metadata of an object. Raises `OriginError`."""
    headers = (await reader.send("HEAD", key)).headers
    size = headers.get("x-goog-stored-content-length") or headers.get("content-length")
    return meta_from(headers, size or await _size_from_part(reader, key))


async def _size_from_part(reader: BucketReader, key: str) -> str:
    """Return the size of an object as the answer to a GET of its first byte tells it: some gateways
    send no Content-Length."""
    sink = _Nowhere()
    try:
        await reader.send("GET", key, headers={"range": "bytes=0-0"}, sink=sink)
    except ObjectChangedError:  # 416: it has no first byte
        return "0"
    return sink.size


class _Nowhere:
    """Takes no body; see `wire.Sink`."""

    room = Room(0)
    expected = None
    follow = None
    size = ""

    def begin(self, status: int, headers: Mapping[str, str]) -> GoOn | None:
        """See `Sink.begin`."""
        self.size = headers.get("content-range", "").rpartition("/")[2]
        return None


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
