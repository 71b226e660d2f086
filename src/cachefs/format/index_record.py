"""Encode and decode keys and values of a cache directory's index, format 1 (docs/formats/index.md).

Integers are big-endian in keys, so that the blocks of one object version are adjacent and in
order. They are little-endian in values.
"""

import struct
import sys
from array import array
from typing import NamedTuple

from cachefs.format.slab import WHOLE_BYTES, WholeObject, decode_whole, encode_whole
from cachefs.types import BlockKey, BlockLocation

BLOCKS_TABLE = "blocks"
SLABS_TABLE = "slabs"
STATE_TABLE = "state"
RECENCY_TABLE = "recency"
TABLES = (BLOCKS_TABLE, SLABS_TABLE, STATE_TABLE, RECENCY_TABLE)

CLEAN_KEY = b"clean"
"""In the state table: the boot id of the machine when the last daemon closed the directory. It is
absent while a daemon has the directory open, and after a crash."""

TIER_KEY = b"tier"
"""In the state table: the uuid of the cache directory that this index belongs to."""

CRASHED_KEY = b"crashed"
"""In the state table: present since the directory was first opened after a crash."""

NEXT_SLAB_KEY = b"next_slab"
"""In the state table: present since the first slab was made. A u32 greater than the id of every
slab that was ever made."""

BLOCK_RECORD = struct.Struct("<IIIQ")
"""Slab id, slot, length in bytes, checksum."""
_BLOCK_KEY = struct.Struct(">16sI")
BLOCK_KEY_BYTES = _BLOCK_KEY.size
_SLAB_KEY = struct.Struct(">I")
SLAB_KEY_BYTES = _SLAB_KEY.size
_NEXT_SLAB = struct.Struct("<I")
_SLAB_ROW = struct.Struct("<HHIIIQ")
"""Class, flags, slot count, used count, recency tick, bytes of the blocks. The bitmaps follow."""
_HAS_PINNED = 1
"""Flag: a second bitmap follows, with the pinned slots."""
_IS_WHOLE = 2
"""Flag: at the end, the object follows that the slab holds (`format/slab.py`)."""

_RECENCY_HEAD = struct.Struct("<HH")
"""Class, 0. A u32 for each slot follows."""

assert BLOCK_RECORD.size == 20
assert _BLOCK_KEY.size == 20
assert _SLAB_ROW.size == 24
assert _RECENCY_HEAD.size == array("I").itemsize == 4

NO_CLASS = 0xFFFF
"""The class of a slab that belongs to no class: it was found damaged and is not yet rewritten."""


def encode_block_key(key: BlockKey) -> bytes:
    """Return the key of a block in the blocks table."""
    return _BLOCK_KEY.pack(key.object_id, key.block_index)


def decode_block_key(data: bytes) -> BlockKey:
    """Invert `encode_block_key`. Raises `struct.error` for another length."""
    return BlockKey(*_BLOCK_KEY.unpack(data))


def encode_location(location: BlockLocation) -> bytes:
    """Return the value of a block in the blocks table."""
    return BLOCK_RECORD.pack(*location)


def decode_location(data: bytes) -> BlockLocation:
    """Invert `encode_location`. Raises `struct.error` for another length."""
    return BlockLocation(*BLOCK_RECORD.unpack(data))


def encode_slab_key(slab_id: int) -> bytes:
    """Return the key of a slab in the slabs and recency tables."""
    return _SLAB_KEY.pack(slab_id)


def decode_slab_key(data: bytes) -> int:
    """Invert `encode_slab_key`. Raises `struct.error` for another length."""
    slab_id: int = _SLAB_KEY.unpack(data)[0]
    return slab_id


def encode_next_slab(slab_id: int) -> bytes:
    """Return the value for `NEXT_SLAB_KEY`."""
    return _NEXT_SLAB.pack(slab_id)


def decode_next_slab(data: bytes | None) -> int:
    """Return the slab id in the row `NEXT_SLAB_KEY`; 0 if there is no row, or its length is
    wrong."""
    if data is None or len(data) != _NEXT_SLAB.size:
        return 0
    slab_id: int = _NEXT_SLAB.unpack(data)[0]
    return slab_id


class SlabRow(NamedTuple):
    """The state of a slab as the index has it, so that the slab file need not be opened.

    `bitmap` has one bit for each slot, lowest bit first: 1 means that a key in the blocks table
    points to the slot. `pinned_bitmap` has a 1 for each pinned slot, which must not be evicted; it
    is empty if no slot is pinned. `tick` is the recency of the most recently used slot when the
    row was written.
    """

    class_index: int
    slot_count: int
    used_count: int
    tick: int
    used_bytes: int
    bitmap: bytes
    pinned_bitmap: bytes = b""
    whole: WholeObject | None = None


def encode_slab_row(row: SlabRow) -> bytes:
    """Return the value of a slab in the slabs table."""
    flags = (_HAS_PINNED if row.pinned_bitmap else 0) | (_IS_WHOLE if row.whole else 0)
    fields = (row.class_index, flags, row.slot_count, row.used_count, row.tick, row.used_bytes)
    whole = b"" if row.whole is None else encode_whole(row.whole)
    return _SLAB_ROW.pack(*fields) + row.bitmap + row.pinned_bitmap + whole


def decode_slab_row(data: bytes) -> SlabRow | None:
    """Invert `encode_slab_row`. Return None if the row contradicts itself: the caller then reads
    the slab's header instead."""
    if len(data) < _SLAB_ROW.size:
        return None
    class_index, flags, slot_count, used_count, tick, used_bytes = _SLAB_ROW.unpack_from(data)
    whole = None
    if flags & _IS_WHOLE:
        data, whole = data[:-WHOLE_BYTES], decode_whole(data[-WHOLE_BYTES:])
        if whole is None or whole.layout[:3:2] != (class_index, slot_count):
            return None
        flags &= ~_IS_WHOLE
    bitmap_bytes = -(-slot_count // 8)
    bitmap = data[_SLAB_ROW.size : _SLAB_ROW.size + bitmap_bytes]
    pinned = data[_SLAB_ROW.size + bitmap_bytes :]
    if len(bitmap) != bitmap_bytes or used_count > slot_count or flags not in (0, _HAS_PINNED):
        return None
    if len(pinned) != (bitmap_bytes if flags == _HAS_PINNED else 0):
        return None
    if int.from_bytes(pinned, "little") & ~int.from_bytes(bitmap, "little"):
        return None
    return SlabRow(class_index, slot_count, used_count, tick, used_bytes, bitmap, pinned, whole)


def encode_recency(class_index: int, ticks: "array[int]") -> bytes:
    """Return the value of a slab in the recency table.

    `ticks` has the recency tick of each slot's last use, as unsigned 32-bit numbers.
    """
    return _RECENCY_HEAD.pack(class_index, 0) + _swapped(ticks).tobytes()


def decode_recency(data: bytes, class_index: int, slot_count: int) -> "array[int] | None":
    """Return the ticks of a row of the recency table. Return None if the row was written for a
    slab of another class or another number of slots."""
    if len(data) != _RECENCY_HEAD.size + 4 * slot_count:
        return None
    if _RECENCY_HEAD.unpack_from(data)[0] != class_index:
        return None
    ticks = array("I")
    ticks.frombytes(data[_RECENCY_HEAD.size :])
    return _swapped(ticks)


def _swapped(numbers: "array[int]") -> "array[int]":
    """Convert from the machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


_TO_DIGITS = bytes(ord("1") if value == 1 else ord("0") for value in range(256))
_FROM_DIGITS = bytes(1 if value == ord("1") else 0 for value in range(256))


def pack_bitmap(states: bytes | bytearray) -> bytes:
    """Return one bit for each byte of `states`, lowest bit first, set where the byte is 1."""
    if not states:
        return b""
    digits = states.translate(_TO_DIGITS)[::-1]
    return int(digits, 2).to_bytes(-(-len(states) // 8), "little")


def unpack_bitmap(bitmap: bytes, count: int) -> bytearray:
    """Invert `pack_bitmap`: return `count` bytes, each 0 or 1."""
    if count == 0:
        return bytearray()
    digits = format(int.from_bytes(bitmap, "little"), f"0{count}b")[-count:]
    return bytearray(digits.encode().translate(_FROM_DIGITS)[::-1])
