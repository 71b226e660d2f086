"""Value types that all layers share. They do no I/O and contain only small derivations."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, NamedTuple, TypeAlias

import typing_extensions

Buffer: TypeAlias = typing_extensions.Buffer

BLOCK_BYTES = 1 << 20
"""The size of every block of a file except the last, and the maximum size of a block."""


class Medium(Enum):
    """The storage medium of a tier, fastest first."""

    MEM = "MEM"
    SSD = "SSD"
    HDD = "HDD"


UNKNOWN_ID = (1 << 32) - 1
"""The kernel's value for no uid or gid."""
UNKNOWN_MODE = (1 << 16) - 1
MOST_MODE = 0o1777
"""The permission bits and the sticky bit, without setuid, setgid and the file type."""
MOST_SIZE_BYTES = 1 << 62
"""The maximum size of a file; a larger value is invalid."""
_MOST_NS = (1 << 63) - 1


def storable_ns(mtime_ns: int) -> int:
    """Return the nearest time that 64 bits can hold. Some file systems have times after 2262."""
    return max(-_MOST_NS, min(mtime_ns, _MOST_NS))


class Posix(NamedTuple):
    """Owner, group and mode as far as an origin gives them: ids of this machine, and the
    permission bits with the sticky bit."""

    uid: int = UNKNOWN_ID
    gid: int = UNKNOWN_ID
    mode: int = UNKNOWN_MODE

    def with_known(self, other: "Posix") -> "Posix":
        """Return this with those fields of `other` that are known."""
        return Posix(
            self.uid if other.uid == UNKNOWN_ID else other.uid,
            self.gid if other.gid == UNKNOWN_ID else other.gid,
            self.mode if other.mode == UNKNOWN_MODE else other.mode,
        )


NO_POSIX = Posix()
"""The value for an origin without owners and modes."""


class Caller(NamedTuple):
    """The process that asked for a change. `groups` are its supplementary groups. `capabilities`
    has those of capabilities(7), as a bit mask, that let root pass over the permissions of files;
    0 for other users."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    capabilities: int = 0


# Not frozen: to make a frozen one takes five times as long, and each look-up makes several. mypy
# refuses changes of `Final` fields.
@dataclass(slots=True, unsafe_hash=True)
class ObjectMeta:
    """One version of one object as the origin describes it.

    `version` is opaque: an ETag, or another value that changes whenever the content does. Two
    `ObjectMeta` with equal versions at the same path have the same bytes; `posix` may change
    within a version.
    """

    size_bytes: Final[int]
    mtime_ns: Final[int]
    version: Final[str]
    posix: Final[Posix] = field(default=NO_POSIX, compare=False)


class Reply(NamedTuple):
    """The answer to a READ of the kernel: `length` bytes at `offset` of a file, for the request
    `unique` that came through /dev/fuse (`device_fd`)."""

    device_fd: int
    unique: int
    offset: int
    length: int


class Directory(NamedTuple):
    """A directory as the origin describes it. `place` says which one it is: if the origin renames
    another directory to its path, that one has another place. It is "" if the origin can't tell."""

    posix: Posix = NO_POSIX
    place: str = ""


Found: TypeAlias = ObjectMeta | Directory | None
"""The result of a path: an object, or a directory (`None`: nothing is known of it)."""


class Entry(NamedTuple):
    """One name in a directory."""

    name: str
    meta: Found

    @property
    def is_dir(self) -> bool:
        return not isinstance(self.meta, ObjectMeta)


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see `ObjectMeta`
class ObjectRef:
    """The data needed to fetch and to cache the blocks of one object version.

    `object_id` is the 128-bit id of (origin identity, path, version), see
    `format.object_id`; it is the same on every node. `path` is relative to the mounted prefix.
    """

    object_id: Final[bytes]
    path: Final[str]
    meta: Final[ObjectMeta]

    @property
    def block_count(self) -> int:
        return -(-self.meta.size_bytes // BLOCK_BYTES)

    def block_length(self, block_index: int) -> int:
        """Return the length in bytes of one block; the last one may be short."""
        return min(BLOCK_BYTES, self.meta.size_bytes - block_index * BLOCK_BYTES)


class BlockKey(NamedTuple):
    """The key of one block of one object version; the same on every node."""

    object_id: bytes
    block_index: int


class Priority(IntEnum):
    """Who waits for a request to the origin, the most urgent first."""

    READER = 0
    READ_AHEAD = 1
    """No reader waits yet, but one is expected soon."""
    LOAD = 2


class Turn:
    """The priority of one request in all queues on its way to the origin. It rises when a reader
    begins to wait for the request (`Fetches.wait_for`). `began_at`: when an earlier try began, on
    trio's clock, which counts for the deadline."""

    __slots__ = ("began_at", "priority")

    def __init__(self, priority: Priority, began_at: float | None = None) -> None:
        self.priority = priority
        self.began_at = began_at


READER_TURN: Final = Turn(Priority.READER)
"""The turn of all requests that readers have begun. It can't rise, so they share it."""


class BlockLocation(NamedTuple):
    """The place of a block in a tier: `slot` of slab number `slab`. `checksum` is xxh3_64."""

    slab: int
    slot: int
    length: int
    checksum: int


class DataPathName(Enum):
    """The process type that answers the kernel."""

    RELAY = "relay"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class DataPath:
    """How a mount is served, as its daemon reports it. `reason` is why the relay does not serve it,
    if so. The other fields are about the relay's supervisor: `restarts` counts the further daemons
    that it started, `restarted_at` is the time of the last start (seconds since the epoch), and
    `last_end` is how the daemon before it ended."""

    name: DataPathName
    reason: str | None = None
    supervisor_pid: int | None = None
    restarts: int = 0
    restarted_at: float | None = None
    last_end: str | None = None
