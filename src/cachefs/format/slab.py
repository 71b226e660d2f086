"""The bytes of a slab file (docs/formats/slab.md), format 2.

    0      header, padded with zeros to 4096 bytes
    4096   slot table: 32 bytes a slot
    ...    zeros up to the next multiple of 4096
    data   slots of equal size, each a multiple of 512 bytes, one block in each

All numbers are little-endian. A table entry is a hint, never a proof: only bytes whose xxh3_64
is the checksum that came with their key are served.
"""

import struct
from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import xxhash

from cachefs.types import BLOCK_BYTES, BlockKey, Buffer

SLAB_MAGIC = b"cachefsS"
SLAB_FORMAT = 2
HEADER_BYTES = 4096
SLOT_ALIGN_BYTES = 512
FRONT_BYTES = 2 * HEADER_BYTES
"""Header and table of a slab of whole blocks."""
MIN_SLAB_BYTES = 2 << 20
MAX_SLAB_BYTES = 64 << 20
HUGE_SLAB_BYTES = 1 << 31
"""Without `FRONT_BYTES`. Huge ones are for huge caches; the header has 32 bits for the size."""

_HEADER = struct.Struct("<8sHHIIII16s")
"""magic, format, class, slot bytes, slot count, slab id, slab bytes, tier uuid."""
_HEADER_CHECKSUM = struct.Struct("<Q")
"""xxh3_64 of the fields above; follows them."""
SLOT_ENTRY = struct.Struct("<16sIIQ")
"""object id, block index, length (0: never used), checksum."""

assert _HEADER.size == 44
assert SLOT_ENTRY.size == 32


def _slot_classes() -> tuple[int, ...]:
    sizes = [SLOT_ALIGN_BYTES]
    while sizes[-1] < BLOCK_BYTES:
        grown = int(sizes[-1] * 1.125) // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
        sizes.append(min(BLOCK_BYTES, max(sizes[-1] + SLOT_ALIGN_BYTES, grown)))
    return tuple(sizes)


SLOT_CLASSES = _slot_classes()
"""Slot size in bytes of every class. Part of the format: never reorder."""

assert SLOT_CLASSES[-1] == BLOCK_BYTES


def class_of(length: int) -> int:
    """The class with the smallest slot that holds `length` bytes; 1 <= length <= 1 MiB."""
    return bisect_left(SLOT_CLASSES, length)


def checksum_of(data: Buffer) -> int:
    """xxh3_64, with 0 replaced by 1 so that 0 can stand for "not proven"."""
    return xxhash.xxh3_64_intdigest(data) or 1


class SlabLayout(NamedTuple):
    """Where things are in a slab of one class."""

    class_index: int
    slot_bytes: int
    slot_count: int
    data_offset: int

    def slot_offset(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_bytes


@cache
def slab_layout(class_index: int, slab_bytes: int) -> SlabLayout:
    """The most slots that fit; the data start at a multiple of 4096."""
    slot_bytes = SLOT_CLASSES[class_index]
    count = (slab_bytes - HEADER_BYTES) // (slot_bytes + SLOT_ENTRY.size)
    while True:
        front = HEADER_BYTES + count * SLOT_ENTRY.size
        data_offset = -(-front // HEADER_BYTES) * HEADER_BYTES
        if data_offset + count * slot_bytes <= slab_bytes:
            return SlabLayout(class_index, slot_bytes, count, data_offset)
        count -= 1


def table_offset(slot: int) -> int:
    return HEADER_BYTES + slot * SLOT_ENTRY.size


class SlabHeader(NamedTuple):
    """What the header says about its own slab."""

    slab_id: int
    class_index: int
    slab_bytes: int
    tier_uuid: bytes


def encode_header(header: SlabHeader) -> bytes:
    """4096 bytes."""
    layout = slab_layout(header.class_index, header.slab_bytes)
    fields = _HEADER.pack(
        SLAB_MAGIC,
        SLAB_FORMAT,
        header.class_index,
        layout.slot_bytes,
        layout.slot_count,
        header.slab_id,
        header.slab_bytes,
        header.tier_uuid,
    )
    checksum = _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return (fields + checksum).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> SlabHeader | None:
    """None unless every field is right: a slab with any other header holds nothing of use."""
    if len(data) < _HEADER.size + _HEADER_CHECKSUM.size:
        return None
    (checksum,) = _HEADER_CHECKSUM.unpack_from(data, _HEADER.size)
    if xxhash.xxh3_64_intdigest(data[: _HEADER.size]) != checksum:
        return None
    magic, version, class_index, slot_bytes, slot_count, slab_id, slab_bytes, uuid = (
        _HEADER.unpack_from(data)
    )
    if magic != SLAB_MAGIC or version != SLAB_FORMAT or class_index >= len(SLOT_CLASSES):
        return None
    layout = slab_layout(class_index, slab_bytes)
    if (slot_bytes, slot_count) != (layout.slot_bytes, layout.slot_count):
        return None
    return SlabHeader(slab_id, class_index, slab_bytes, uuid)


class SlotEntry(NamedTuple):
    """One row of the slot table. It may be older than the slot's use: see the module docstring."""

    key: BlockKey
    length: int
    checksum: int


def encode_entry(entry: SlotEntry) -> bytes:
    return SLOT_ENTRY.pack(entry.key.object_id, entry.key.block_index, entry.length, entry.checksum)


def entry_at(table: bytes | memoryview, slot: int) -> SlotEntry | None:
    """The entry of `slot`; None if it was never used, or the table is cut off before it."""
    position = slot * SLOT_ENTRY.size
    if position + SLOT_ENTRY.size > len(table):
        return None
    object_id, block_index, length, checksum = SLOT_ENTRY.unpack_from(table, position)
    if length == 0:
        return None
    return SlotEntry(BlockKey(object_id, block_index), length, checksum)
