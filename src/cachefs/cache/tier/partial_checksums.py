"""Checksums of parts of large blocks, so that a small read needs only a small part from the disk.

Part checksums depend only on the block's bytes, and their key is the checksum of the whole block.
So they never become invalid. They may be missing, or overwritten by those of another block: a
reader that finds none, or wrong ones, compares the whole block. With a relay they are in the table
that the relay reads too (fuse/relay/sums.h); otherwise they are in this process.
"""

from array import array
from typing import Protocol, TypeAlias

import xxhash

from cachefs.format.slab import checksum_of
from cachefs.types import BlockLocation

Bytes: TypeAlias = bytes | bytearray | memoryview

PART_BYTES = 8192
"""A larger part would make a read of 4 KiB slower. A disk reads 8 KiB in the same time as 4 KiB."""
PARTS_ABOVE = 128 << 10
"""Blocks up to this length in bytes are always compared as a whole."""
_BLOCKS = 1 << 15
"""Most blocks whose part checksums this process keeps: 20 MiB at most."""


class Table(Protocol):
    """The part of `cachefs.fuse.relay._relay.Table` that this module uses."""

    def note_sums(self, checksum: int, block: Bytes, /) -> None: ...
    def has_sums(self, checksum: int, /) -> bool: ...
    def sums_agree(self, checksum: int, offset: int, data: Bytes, /) -> bool: ...


class PartialChecksums:
    """The part checksums of a mount; all its tiers share them. Any thread may call any method."""

    def __init__(self) -> None:
        self._table: Table | None = None
        self._known: dict[int, tuple[int, array[int]]] = {}

    def share(self, table: Table) -> None:
        """Store the part checksums in `table` from now on. Those stored here are dropped."""
        self._table = table
        self._known.clear()

    def note(self, checksum: int, block: Bytes) -> None:
        """Store the part checksums of a verified block. A block of full size takes up to 0.2 ms."""
        if len(block) <= PARTS_ABOVE:
            return
        if self._table is not None:
            self._table.note_sums(checksum, block)
        else:
            self._known[checksum % _BLOCKS] = (checksum, _checksums_of(block))

    def range_of(self, location: BlockLocation, offset: int, length: int) -> tuple[int, int]:
        """Return begin and end, within the block, of the bytes to read so that the requested range
        can be compared with a checksum."""
        if length == location.length or not self._knows(location):
            return 0, location.length
        end = -(-(offset + length) // PART_BYTES) * PART_BYTES
        return offset - offset % PART_BYTES, min(end, location.length)

    def agree(self, location: BlockLocation, offset: int, data: Bytes) -> bool:
        """Return whether these bytes match their checksums. `offset` and length of `data` must be
        a range that `range_of` returned. False also if the part checksums were overwritten."""
        if len(data) == location.length:
            return checksum_of(data) == location.checksum
        if self._table is not None:
            return self._table.sums_agree(location.checksum, offset, data)
        checksum, checksums = self._known.get(location.checksum % _BLOCKS, (0, array("I")))
        first = offset // PART_BYTES
        found = _checksums_of(data)
        return checksum == location.checksum and checksums[first : first + len(found)] == found

    def _knows(self, location: BlockLocation) -> bool:
        if location.length <= PARTS_ABOVE:
            return False
        if self._table is not None:
            return self._table.has_sums(location.checksum)
        return self._known.get(location.checksum % _BLOCKS, (0,))[0] == location.checksum


def _checksums_of(data: Bytes) -> "array[int]":
    view = memoryview(data)
    checksums = array("I")
    for first in range(0, len(view), PART_BYTES):
        checksums.append(xxhash.xxh3_64_intdigest(view[first : first + PART_BYTES]) & 0xFFFFFFFF)
    return checksums
