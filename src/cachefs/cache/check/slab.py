"""Compares one slab file with the index. It reads only."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from cachefs.cache_dir.directory import OpenedSlab
from cachefs.format.index_record import BLOCK_KEY_BYTES, BLOCK_RECORD, decode_block_key
from cachefs.format.slab import SLOT_ENTRY, SlabHeader, checksum_of, table_offset
from cachefs.types import BlockLocation

_CHUNK_BYTES = 4 << 20


class Problem(Enum):
    """A kind of problem of a cache directory. The value is its description in the plural."""

    BAD_INDEX = "indexes that can't be used"
    FOREIGN_FILE = "files in slabs/ that are no slabs"
    BAD_HEADER = "slabs whose header is damaged or another's"
    WRONG_SIZE = "slabs of the wrong size"
    BAD_ROW = "rows of the index whose checksum is wrong"
    NO_ROW = "slabs that the index doesn't know"
    NO_FILE = "slabs that the index knows and whose file is gone"
    WRONG_ROW = "slabs that the index has another class or number of slots for"
    WRONG_COUNT = "slabs whose counts in the index are wrong"
    NO_SLAB = "blocks in slabs that are not there"
    OUT_OF_BOUNDS = "blocks that can't be where the index says"
    SHARED_SLOT = "blocks in a slot that the index gives to another block too"
    OTHER_KEY = "slots that hold another block than the index says"
    OTHER_ENTRY = "blocks whose length or checksum in the slot table is wrong"
    BAD_BYTES = "blocks whose bytes are not what was stored"
    UNREADABLE = "reads that the disk refused"


class FoundBlock(NamedTuple):
    """A block with correct bytes. `key` and `value` are its row in the index."""

    slot: int
    key: bytes
    value: bytes
    length: int


@dataclass(slots=True)
class SlabFindings:
    """The findings in one slab."""

    good: list[FoundBlock] = field(default_factory=list)
    """Correct blocks that the index has."""
    recoverable: list[FoundBlock] = field(default_factory=list)
    """Correct blocks that only the slot table has."""
    problems: list[tuple[Problem, str]] = field(default_factory=list)


def check_slots(
    opened: OpenedSlab,
    header: SlabHeader,
    claims: bytearray,
    find: Callable[[bytes], BlockLocation | None],
) -> SlabFindings:
    """Read the slab once, from start to end, and compare it with the index.

    `header` is that of the slab.
    `claims` has one byte per slot: 1 if a possible row of the index points to it. `find` returns
    the index row of a block key, or None if it has none or an impossible one.
    """
    found = SlabFindings()
    fd, slab_id, layout, mask = opened.fd, header.slab_id, header.layout, header.mask
    table = _read(opened.table_fd, layout.slot_count * SLOT_ENTRY.size, table_offset(0), found)
    table = table.ljust(layout.slot_count * SLOT_ENTRY.size, b"\0")
    step = max(1, _CHUNK_BYTES // layout.slot_bytes)
    for first in range(0, layout.slot_count, step):
        stop = min(first + step, layout.slot_count)
        part = table[first * SLOT_ENTRY.size : stop * SLOT_ENTRY.size]
        if not any(claims[first:stop]) and not any(part):
            continue
        size_bytes = (stop - first) * layout.slot_bytes
        data = memoryview(_read(fd, size_bytes, layout.slot_offset(first), found))
        entries = enumerate(SLOT_ENTRY.iter_unpack(part), first)
        for slot, (object_id, block_index, length, masked) in entries:
            if not claims[slot] and not length:
                continue
            key = object_id + block_index.to_bytes(4, "big")
            fields = part[(slot - first) * SLOT_ENTRY.size :]
            entry = BlockLocation(slab_id, slot, length, masked ^ mask.of(fields))
            start = (slot - first) * layout.slot_bytes
            slot_data = data[start : start + layout.slot_bytes]
            _check_slot(key, entry, find(key), bool(claims[slot]), slot_data, found)
    return found


def _check_slot(
    key: bytes,
    entry: BlockLocation,
    row: BlockLocation | None,
    claimed: bool,
    data: memoryview,
    found: SlabFindings,
) -> None:
    """Check one used slot and add the result to `found`.

    `entry` is what the slot table says of the slot, `row` the index row of the key in that entry.
    `claimed` is the slot's claim.
    """
    slot = entry.slot
    here = row is not None and row[:2] == entry[:2]
    if claimed and not here:
        found.problems.append((Problem.OTHER_KEY, f"slot {slot}"))
    if row is not None and not here:
        return  # the index has the block in another slot: this copy was evicted
    location = entry if row is None else row
    length = location.length
    right = 0 < length <= len(data) and checksum_of(data[:length]) == location.checksum
    block = FoundBlock(slot, key, BLOCK_RECORD.pack(*location), length)
    if row is None:
        if right:
            found.recoverable.append(block)
    elif not right:
        found.problems.append((Problem.BAD_BYTES, f"slot {slot}, {describe(key)}"))
    elif entry != row:
        found.problems.append((Problem.OTHER_ENTRY, f"slot {slot}, {describe(key)}"))
    else:
        found.good.append(block)


def describe(key: bytes) -> str:
    """Return a description of a block for the report, from the key of its row."""
    if len(key) != BLOCK_KEY_BYTES:
        return f"a row with a key of {len(key)} bytes"
    object_id, block_index = decode_block_key(key)
    return f"block {block_index} of {object_id.hex()}"


def _read(fd: int, length: int, offset: int, found: SlabFindings) -> bytes:
    """Read a range. An unreadable range is added to `found` and counts as missing."""
    try:
        return os.pread(fd, length, offset)
    except OSError as error:
        found.problems.append((Problem.UNREADABLE, f"offset {offset}: {error.strerror}"))
        return b""
