"""Value types shared by all layers. No behaviour beyond small derivations, no I/O."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from typing_extensions import Buffer

BLOCK_BYTES = 1 << 20
"""Size of every block of a file but its last, and the largest block there is."""


class Medium(Enum):
    """What a tier is made of, fastest first."""

    MEM = "MEM"
    SSD = "SSD"
    HDD = "HDD"


UNKNOWN_ID = (1 << 32) - 1
"""No uid or gid: the kernel's own word for none."""
UNKNOWN_MODE = (1 << 16) - 1
MOST_MODE = 0o1777
"""Permission bits and the sticky bit: no setuid, no setgid, and no bits of the file's type."""
MOST_SIZE_BYTES = 1 << 62
"""Of a file: what is said to be larger is nonsense."""


class Posix(NamedTuple):
    """Owner, group and mode as far as an origin tells them: ids of this machine, and the
    permission bits with the sticky bit."""

    uid: int = UNKNOWN_ID
    gid: int = UNKNOWN_ID
    mode: int = UNKNOWN_MODE


NO_POSIX = Posix()
"""Of an origin that has no such thing."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """One version of one object as the origin describes it.

    `version` is opaque: an ETag, or whatever else changes whenever the content does. Two
    `ObjectMeta` with equal versions at the same path stand for the same bytes; `posix` may change
    within a version.
    """

    size_bytes: int
    mtime_ns: int
    version: str
    posix: Posix = field(default=NO_POSIX, compare=False)


Found: TypeAlias = ObjectMeta | Posix | None
"""What a path leads to: an object, or a directory (`None`: one without owner and mode)."""


class Entry(NamedTuple):
    """One name in a directory."""

    name: str
    meta: Found

    @property
    def is_dir(self) -> bool:
        return not isinstance(self.meta, ObjectMeta)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """All that is needed to fetch and to cache the blocks of one object version.

    `object_id` is the 128-bit id of (origin identity, path, version), see
    `format.object_id`; it is the same on every node. `path` is relative to the mounted prefix.
    """

    object_id: bytes
    path: str
    meta: ObjectMeta

    @property
    def block_count(self) -> int:
        return -(-self.meta.size_bytes // BLOCK_BYTES)

    def block_length(self, block_index: int) -> int:
        """Length in bytes of one block; the last one may be short."""
        return min(BLOCK_BYTES, self.meta.size_bytes - block_index * BLOCK_BYTES)


class BlockKey(NamedTuple):
    """Names one block of one object version, on every node alike."""

    object_id: bytes
    block_index: int


class BlockLocation(NamedTuple):
    """Where a tier holds a block: `slot` of slab number `slab`; `checksum` is xxh3_64."""

    slab: int
    slot: int
    length: int
    checksum: int


class DataPathName(Enum):
    """Who answers the kernel."""

    RELAY = "relay"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class DataPath:
    """How a mount is served, as its daemon tells. `reason` says why it isn't the relay, if so;
    the rest is about the relay's supervisor and its daemons: how often another was started, the
    last time at `restarted_at` (seconds since the epoch), because the one before `last_end`."""

    name: DataPathName
    reason: str | None = None
    supervisor_pid: int | None = None
    restarts: int = 0
    restarted_at: float | None = None
    last_end: str | None = None


__all__ = [
    "BLOCK_BYTES",
    "MOST_MODE",
    "MOST_SIZE_BYTES",
    "NO_POSIX",
    "UNKNOWN_ID",
    "UNKNOWN_MODE",
    "BlockKey",
    "BlockLocation",
    "Buffer",
    "DataPath",
    "DataPathName",
    "Entry",
    "Found",
    "Medium",
    "ObjectMeta",
    "ObjectRef",
    "Posix",
]
