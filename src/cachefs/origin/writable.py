"""The interface through which an origin is written to, and the values that it takes.

`Origin.writer` is the `WritableOrigin` of an origin, or None. Paths are those of `Origin`.
"""

import errno
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, Protocol, TypeVar

from cachefs.errors import OriginError
from cachefs.origin.names import is_key_name
from cachefs.types import Buffer, Directory, ObjectMeta

T = TypeVar("T")

_MIB = 1 << 20
MOST_PUT_BYTES = 16 * _MIB
"""A larger object should be written with an upload in parts."""
MOST_OBJECT_BYTES = 5 << 40
"""The most bytes of an object, as S3 allows."""
LEAST_PART_BYTES = 5 * _MIB
"""The least size of each part but the last one, as S3 requires."""
MOST_PARTS = 10_000
_MOST_KEY = 1024
"""The most bytes of a key, as S3 and OSS allow."""
_PART_SIZES = (8 * _MIB, 64 * _MIB, 640 * _MIB)
"""`MOST_PARTS` of the largest size exceed 5 TiB. A file that outgrows a size while it is sent is
sent anew, so there are few sizes."""


_PROCESS = secrets.token_hex(12)
_writes = count(1)


def part_bytes(size_bytes: int, most_parts: int = MOST_PARTS) -> int:
    """Return the size in bytes of all parts but the last of an object of `size_bytes`. The last one
    is not larger. So the parts of an upload are equal, as Cloudflare R2 requires. There are more
    than `most_parts` only where even the largest size does not suffice."""
    for part in _PART_SIZES:
        if size_bytes <= part * most_parts:
            return part
    return _PART_SIZES[-1]


class Content(ABC):
    """Bytes to write. Worker threads call `read`, perhaps several times for the same range, because
    a try is repeated. A thread of a cancelled call may still read for a moment."""

    size_bytes: int
    is_in_memory = False
    """Whether `read` never blocks."""
    is_zeros = False
    """Whether all bytes are known to be zeros."""

    @abstractmethod
    def read(self, offset: int, length: int) -> Buffer:
        """Return exactly `length` bytes at `offset`. May block. Raises `OSError`, also if the bytes
        end before."""

    def note_sent(self) -> None:  # noqa: B027 - most have nothing to note
        """Note that bytes were sent since the last call. Some origins call it, on the loop: what
        was read may take long to be sent."""


class BufferContent(Content):
    """The bytes of a buffer. It must not change before the call that writes it has returned."""

    is_in_memory = True

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.size_bytes = self._data.nbytes

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`."""
        return self._data[offset : offset + length]


class ZeroContent(Content):
    """Zeros, such as a part of a sparse file."""

    is_in_memory = True
    is_zeros = True

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`."""
        return bytes(length)


class FileContent(Content):
    """`size_bytes` bytes of a file from `offset` on. It has its own duplicate of the descriptor
    `fd`, so the caller may close `fd` at any time."""

    def __init__(self, fd: int, offset: int, size_bytes: int) -> None:
        self._fd = -1
        self._fd = os.dup(fd)
        self._offset = offset
        self.size_bytes = size_bytes
        self.is_zeros = size_bytes > 0 and _is_hole(self._fd, offset, size_bytes)

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`."""
        data = os.pread(self._fd, length, self._offset + offset)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), self._offset + offset + len(data))
            if not more:
                raise OSError("the file to be written has become shorter")
            data += more
        return data

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _is_hole(fd: int, offset: int, length: int) -> bool:
    """Whether a range of a file has no data, as lseek(2) says."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO  # there is none up to the end of the file


def content_of(body: Buffer | Content) -> Content:
    """Return `body` as a `Content`."""
    return body if isinstance(body, Content) else BufferContent(body)


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be true of the object at the path, or nothing is changed: it has the `version`, or
    it is absent (None)."""

    version: str | None


ABSENT = Condition(None)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the origin keeps beside the bytes. None means: not stated. `mode` has the permission
    bits. If `is_renamed`, the file was renamed to its name, and takes over nothing of the file that
    it replaces there."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    is_renamed: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    """All metadata of another object, in place of the other fields: see `metadata_of`."""


NO_ATTRIBUTES = Attributes()


@dataclass(frozen=True, slots=True)
class Guarantees:
    """Which conditions the store itself checks, in one step with the write. Where a field is false,
    the `WritableOrigin` compares with a request before the write, so another writer's change
    between the two goes unnoticed. `keeps_write_id`: objects show which write made them."""

    put_absent: bool = True
    put_version: bool = True
    complete_absent: bool = True
    complete_version: bool = True
    copy_absent: bool = True
    copy_version: bool = True
    delete_version: bool = True
    keeps_write_id: bool = True


UNCHECKED = Guarantees(
    put_absent=False,
    put_version=False,
    complete_absent=False,
    complete_version=False,
    copy_absent=False,
    copy_version=False,
    delete_version=False,
)
"""What may be relied on before `check_writable` has found out more."""


class Ask(Protocol):
    """Sends a request, perhaps several times until it succeeds."""

    def __call__(self, send: Callable[[], Awaitable[T]], /) -> Awaitable[T]: ...


def ask_once(send: Callable[[], Awaitable[T]], /) -> Awaitable[T]:
    """Send a request once."""
    return send()


WriteKind = Literal["puts", "parts", "copies", "deletes", "uploads"]


@dataclass(slots=True)
class WriteCounters:
    """Counters of requests of writes that were really sent. The writer itself updates them."""

    puts: int = 0
    """Whole objects, and markers of directories."""
    parts: int = 0
    """Parts of uploads, without those that are copied."""
    copies: int = 0
    """Copies of objects and parts at the store, and renames."""
    deletes: int = 0
    uploads: int = 0
    """Requests that begin, list, complete or abort an upload in parts."""
    sent_bytes: int = 0
    """Bytes of objects and parts that the origin has acknowledged."""
    errors: int = 0
    """Requests that failed; refused conditions are no failures."""

    def count(self, kind: WriteKind) -> None:
        """Count one request."""
        setattr(self, kind, getattr(self, kind) + 1)


class Upload(NamedTuple):
    """An upload in parts that has begun. All fields are plain text, so that they can be stored."""

    path: str
    upload_id: str
    write_id: str


class PartTag(NamedTuple):
    """A part that the origin has. `tag` is opaque, such as the ETag of the part."""

    number: int
    size_bytes: int
    tag: str


def new_write_id() -> str:
    """Return a new id for one write. The origin keeps it with the object. So a writer that does not
    know whether its write succeeded can find out, also after a crash."""
    return f"{_PROCESS}{next(_writes):08x}"


def is_of_this_process(write_id: str) -> bool:
    """Return whether this process has made the id."""
    return write_id.startswith(_PROCESS)


class WritableOrigin(ABC):
    """Writes to an origin. All methods run on the trio loop and never block it. They raise only
    `OriginError` and its subclasses: `ConflictError` if the condition is false,
    `AccessDeniedError`, `OriginUnavailableError`, `OriginBusyError`, ...

    Every method may be called again with the same arguments if it is not known whether it
    succeeded. The bytes of a path are those of one write at any time, never a mix.
    """

    guarantees: Guarantees
    """As `check_writable` has found them. A caller that knows them from an earlier check may set
    them."""

    checks_parts = False
    """`complete` fails if a part is not the one with the given tag. So an upload can be continued
    after a part was sent again, or by another process."""

    can_rename = False
    """`rename` works; otherwise it must be done with `copy` and `delete`."""

    leaves_rest = False
    """A killed process may leave something beside the path: see `remove_rest`."""

    keeps_attributes = False
    """A new version keeps owner, group and mode of the one before, so a write states only what a
    user has set. Otherwise it must state all of them."""

    reads_copies = False
    """If the store refuses to copy, a copy may be made of bytes that were read: see `metadata_of`.
    """

    acts_for_callers = False
    """Changes are made with the rights of the process that asked for them: see `on_behalf.py`."""

    repeats_versions = False
    """Other bytes may get the version of earlier ones, if they have the same size and a user sets
    the same mtime."""

    def can_have(self, path: str) -> bool:
        """Whether the origin can have an object of this path."""
        return (
            all(is_key_name(name) for name in path.split("/")) and len(path.encode()) <= _MOST_KEY
        )

    async def set_attributes(
        self, path: str, attributes: Attributes, version: str | None = None
    ) -> ObjectMeta | None:
        """Set the attributes of a file or directory, and return a file's new version. Return None
        if the origin can change them only together with the content. Raises `ObjectChangedError` if
        `version` is stated and the file has another one."""
        return None

    async def check_key(self) -> str | None:
        """Return what the result of `check_writable` depends on, as one printable word. Another
        mount with the same key may rely on it. None: the check costs no request."""
        return None

    @abstractmethod
    async def check_writable(self, path: str = "", ask: Ask = ask_once) -> Guarantees:
        """Find out, once at mount time, whether objects can be written and deleted below the
        directory `path`, and which conditions the store checks. Sets and returns `guarantees`.
        Tries it with objects of hidden names, and removes them. `ask` sends each request.

        Raises `AccessDeniedError` for wrong credentials or a read-only source, and
        `OriginUnavailableError`.
        """

    @abstractmethod
    async def put(
        self,
        path: str,
        body: Buffer | Content,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """Write a whole object. Return its size and its new version. Its time may differ by some
        seconds from the one that a later `stat` returns.

        If the object already is the result of the write `write_id`, this is a success, even though
        the condition is false by now. So a caller that repeats a write must pass the same id; None
        means a new one. Raises `ConflictError`.
        """

    @abstractmethod
    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        """Return the object at `path` if the write `write_id` has made it, otherwise None. None
        also if the origin does not keep the ids of writes."""

    @abstractmethod
    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        """Begin an upload in parts. Nothing is visible before `complete`. An upload that is neither
        completed nor aborted may cost money at the store."""

    @abstractmethod
    async def put_part(
        self, upload: Upload, number: int, offset: int, body: Buffer | Content
    ) -> PartTag:
        """Write part `number` (from 1), whose bytes begin at `offset` of the object. Parts may be
        written in any order and at the same time. A part that is written again replaces the earlier
        one. Raises `UploadLostError` if the upload no longer exists."""

    @abstractmethod
    async def copy_part(
        self, upload: Upload, number: int, offset: int, path: str, meta: ObjectMeta, length: int
    ) -> PartTag:
        """Do `put_part` with the `length` bytes at `offset` of the version `meta` of the object at
        `path`. The bytes do not pass through this machine. Raises `ObjectChangedError` if the
        object has another version now, `NotFoundError` if it no longer exists, `UploadLostError` if
        the upload no longer exists."""

    @abstractmethod
    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        """Make the object of its `parts` in the order of their numbers. Return it as `put` does. If
        this upload has been completed already, and the object is still its result, this is a
        success. Object stores keep the attributes of `start_upload` instead of `attributes`. Raises
        `ConflictError`, and the upload remains; `UploadLostError` if the upload no longer exists
        and the object is not its result."""

    @abstractmethod
    async def parts(self, upload: Upload) -> list[PartTag]:
        """Return the parts that the origin has, by number. A part that was written twice may be
        missing. Raises `UploadLostError` if the upload no longer exists."""

    @abstractmethod
    async def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts. Succeeds if there is no such upload."""

    @abstractmethod
    async def abort_started(self, upload: Upload, began_s: float, ended_s: float) -> None:
        """Drop an upload without a part that `start_upload` has begun, if it has, although its
        answer was lost. The id of `upload` is empty. `start_upload` was called `began_s` seconds
        ago, and ended `ended_s` seconds ago at the latest. Drops nothing if several uploads may be
        the one."""

    async def remove_rest(self, path: str, write_id: str) -> None:
        """Remove what a write of a process that was killed has left beside `path`, if
        `leaves_rest`. Parts of uploads are none of it."""
        raise OriginError(f"nothing is left beside {path}")

    @abstractmethod
    async def copy(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None = None,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """Copy the version `meta` of the object at `path` with its attributes to `target`. The
        `condition` is about `target`. Return the copy as `put` does; `write_id` is as there.
        Raises `ObjectChangedError` or `NotFoundError` because of `path`, `ConflictError` because of
        `target`."""

    async def metadata_of(self, path: str, meta: ObjectMeta) -> Attributes:
        """Return what a write must state so that it has the metadata of the version `meta` of the
        object at `path`. Raises `ObjectChangedError`, `NotFoundError`."""
        return NO_ATTRIBUTES

    async def rename(self, path: str, target: str, condition: Condition | None = None) -> None:
        """Give an object or a directory another name in one step, if `can_rename`. An object at
        `target` is replaced. The `condition` is about `target`. Raises `NotFoundError`,
        `ConflictError`, `NotEmptyError` for a directory that has entries."""
        raise OriginError(f"{path} can't be renamed in one step at this source")

    @abstractmethod
    async def delete(self, path: str, condition: Condition | None = None) -> None:
        """Delete an object. Succeeds if there is none. Raises `ConflictError`."""

    @abstractmethod
    async def delete_many(self, paths: Sequence[str]) -> dict[str, OriginError]:
        """Delete objects, any number of them. Return the errors of those that could not be
        deleted. A path that ends with a slash is a marker of a directory. Raises `OriginError` if
        none could be deleted."""

    @abstractmethod
    async def make_directory(
        self,
        path: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        is_new: bool = False,
        write_id: str | None = None,
    ) -> Directory | None:
        """Make an empty directory; in an object store, its marker. Return what it is, if the origin
        can tell. Succeeds if the directory exists. With `is_new`, this raises `ConflictError`, and
        so does a file at `path`, but if the write `write_id` has made the directory, it is a
        success. A store that keeps no metadata of markers can't tell.

        Raises `NotADirError` if `path` is a file, `NotFoundError` if a real directory above it does
        not exist."""

    @abstractmethod
    async def remove_directory(self, path: str) -> None:
        """Remove an empty directory. Succeeds if there is none. Raises `NotEmptyError`,
        `NotADirError`."""
