"""Checksums of parts of large blocks, so that a small read takes a small part from the disk.

They follow from a block's bytes alone, and are found by the checksum of the whole: nothing ever
makes them invalid. They may be missing, or overwritten by those of another block: whoever finds
none, or wrong ones, compares the whole block. Behind the relay they lie in the table that it reads,
too (fuse/relay/sums.h); else here.
"""

from array import array
from typing import Protocol, TypeAlias

import xxhash

from cachefs.format.slab import checksum_of
from cachefs.types import BlockLocation

Bytes: TypeAlias = bytes | bytearray | memoryview

PART_BYTES = 8192
"""More would make a read of 4 KiB slower: a disk gives twice that in the same time."""
PARTS_ABOVE = 128 << 10
"""Blocks up to that length are always compared as a whole."""
_BLOCKS = 1 << 15
"""That are known here: 20 MiB at most."""


class Table(Protocol):
    """What is used of `cachefs.fuse.relay._relay.Table`."""

    def note_sums(self, checksum: int, block: Bytes, /) -> None: ...
    def has_sums(self, checksum: int, /) -> bool: ...
    def sums_agree(self, checksum: int, offset: int, data: Bytes, /) -> bool: ...


class Sums:
    """Of all tiers of a mount. Any thread may call any method."""

    def __init__(self) -> None:
        self._table: Table | None = None
        self._known: dict[int, tuple[int, array[int]]] = {}

    def share(self, table: Table) -> None:
        """Keep them there from now on."""
        self._table = table
        self._known.clear()

    def note(self, checksum: int, block: Bytes) -> None:
        """Keep those of a block that is right. Up to 0.2 ms for a whole one."""
        if len(block) <= PARTS_ABOVE:
            return
        if self._table is not None:
            self._table.note_sums(checksum, block)
        else:
            self._known[checksum % _BLOCKS] = (checksum, _sums_of(block))

    def range_of(self, location: BlockLocation, offset: int, length: int) -> tuple[int, int]:
        """Where the bytes begin and end, in the block, that must be read so that these can be
        compared with a checksum."""
        if length == location.length or not self._knows(location):
            return 0, location.length
        end = -(-(offset + length) // PART_BYTES) * PART_BYTES
        return offset - offset % PART_BYTES, min(end, location.length)

    def agree(self, location: BlockLocation, offset: int, data: Bytes) -> bool:
        """Whether these bytes, of a range as `range_of` says, are right. False also if what was
        known of the block's parts has gone."""
        if len(data) == location.length:
            return checksum_of(data) == location.checksum
        if self._table is not None:
            return self._table.sums_agree(location.checksum, offset, data)
        checksum, sums = self._known.get(location.checksum % _BLOCKS, (0, array("I")))
        first = offset // PART_BYTES
        found = _sums_of(data)
        return checksum == location.checksum and sums[first : first + len(found)] == found

    def _knows(self, location: BlockLocation) -> bool:
        if location.length <= PARTS_ABOVE:
            return False
        if self._table is not None:
            return self._table.has_sums(location.checksum)
        return self._known.get(location.checksum % _BLOCKS, (0,))[0] == location.checksum


def _sums_of(data: Bytes) -> "array[int]":
    view = memoryview(data)
    sums = array("I")
    for first in range(0, len(view), PART_BYTES):
        sums.append(xxhash.xxh3_64_intdigest(view[first : first + PART_BYTES]) & 0xFFFFFFFF)
    return sums
