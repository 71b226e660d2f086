"""Value types shared by all layers. No behaviour beyond small derivations, no I/O."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from typing_extensions import Buffer

BLOCK_BYTES = 1 << 20
"""Size of every block of a file but its last, and the largest block there is."""


class Medium(Enum):
    """What a tier is made of, fastest first."""

    MEM = "MEM"
    SSD = "SSD"
    HDD = "HDD"


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """One version of one object as the origin describes it.

    `version` is opaque: an ETag, or whatever else changes whenever the content does. Two
    `ObjectMeta` with equal versions at the same path stand for the same bytes.
    """

    size_bytes: int
    mtime_ns: int
    version: str


class Entry(NamedTuple):
    """One name in a directory. `meta` is None for a directory."""

    name: str
    meta: ObjectMeta | None


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


__all__ = [
    "BLOCK_BYTES",
    "BlockKey",
    "BlockLocation",
    "Buffer",
    "Entry",
    "Medium",
    "ObjectMeta",
    "ObjectRef",
]
