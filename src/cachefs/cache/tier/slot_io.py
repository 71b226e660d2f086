"""Read, verify and write single slots of a slab file. Everything here runs in worker threads.

The caller of a read must hold a reference to the slot, so that descriptor and layout cannot change.
"""

from typing import NamedTuple

from cachefs.cache.tier.partial_checksums import Bytes
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Slab
from cachefs.format.slab import (
    SLOT_ENTRY,
    SlotEntry,
    checksum_of,
    encode_entry,
    entry_at,
    table_offset,
)
from cachefs.types import BlockLocation


class Checked(NamedTuple):
    """What a worker thread found in a slot.

    `data` is None if the bytes were not those of the block. `owner` is the slot's entry in the
    slot table; None if the entry is damaged or was not read.
    """

    data: bytes | bytearray | None
    owner: SlotEntry | None


def read_entry(disk: Disk, slab: Slab, slot: int) -> SlotEntry | None:
    """Return the slot's entry in the slot table; None if it is damaged. Raises `OSError`."""
    row = disk.read(slab.table_fd, SLOT_ENTRY.size, table_offset(slot))
    return entry_at(row.ljust(SLOT_ENTRY.size, b"\0"), 0, slab.mask)


def read_data(disk: Disk, slab: Slab, slot: int, length: int) -> bytes:
    """Return the first `length` bytes of the slot, not verified. Raises `OSError`."""
    return disk.read(slab.fd, length, slab.layout.slot_offset(slot))


def read_and_check(disk: Disk, slab: Slab, location: BlockLocation) -> Checked:
    """Read a whole block and its table entry, and verify the bytes. Raises `OSError`."""
    data = read_data(disk, slab, location.slot, location.length)
    owner = read_entry(disk, slab, location.slot)
    return Checked(data if is_right(location, data) else None, owner)


def is_right(location: BlockLocation, data: Bytes) -> bool:
    """Return whether these bytes are those of the block that its index row describes."""
    return len(data) == location.length and checksum_of(data) == location.checksum


def write_block(
    disk: Disk, slab: Slab, slot: int, entry: SlotEntry, data: bytes | memoryview
) -> None:
    """Write the slot's table entry, then the block. After an error the content of the slot is
    undefined. Raises `OSError`."""
    disk.write(slab.table_fd, encode_entry(entry, slab.mask), table_offset(slot))
    disk.write(slab.fd, data, slab.layout.slot_offset(slot))
