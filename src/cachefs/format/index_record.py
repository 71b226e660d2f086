"""Keys and values of a cache directory's index (docs/formats/index.md), format 1.

Keys are big-endian, so that the blocks of one object version lie side by side and in order;
values are little-endian.
"""

import struct
import sys
from array import array
from typing import NamedTuple

from cachefs.types import BlockKey, BlockLocation

BLOCKS_TABLE = "blocks"
SLABS_TABLE = "slabs"
STATE_TABLE = "state"
RECENCY_TABLE = "recency"
TABLES = (BLOCKS_TABLE, SLABS_TABLE, STATE_TABLE, RECENCY_TABLE)

CLEAN_KEY = b"clean"
"""In the state table while no daemon has the directory open and the last one closed it."""

TIER_KEY = b"tier"
"""In the state table: the uuid of the cache directory whose index this is."""

CRASHED_KEY = b"crashed"
"""In the state table since the directory was first opened after a crash."""

NEXT_SLAB_KEY = b"next_slab"
"""In the state table since a slab was made: a u32, above the ids of all slabs there ever were."""

BLOCK_RECORD = struct.Struct("<IIIQ")
"""slab, slot, length, checksum."""
_BLOCK_KEY = struct.Struct(">16sI")
BLOCK_KEY_BYTES = _BLOCK_KEY.size
_SLAB_KEY = struct.Struct(">I")
SLAB_KEY_BYTES = _SLAB_KEY.size
_NEXT_SLAB = struct.Struct("<I")
_SLAB_ROW = struct.Struct("<HHIIIQ")
"""class, flags, slot count, used count, recency tick, bytes of the blocks; then the bitmaps."""
_HAS_KEPT = 1
"""Flag: a second bitmap follows, of the slots that are kept."""

_RECENCY_HEAD = struct.Struct("<HH")
"""class, 0; then a u32 for each slot."""

assert BLOCK_RECORD.size == 20
assert _BLOCK_KEY.size == 20
assert _SLAB_ROW.size == 24
assert _RECENCY_HEAD.size == array("I").itemsize == 4

NO_CLASS = 0xFFFF
"""Class of a slab that belongs to none (found damaged, not yet rewritten)."""


def encode_block_key(key: BlockKey) -> bytes:
    return _BLOCK_KEY.pack(key.object_id, key.block_index)


def decode_block_key(data: bytes) -> BlockKey:
    return BlockKey(*_BLOCK_KEY.unpack(data))


def encode_location(location: BlockLocation) -> bytes:
    return BLOCK_RECORD.pack(*location)


def decode_location(data: bytes) -> BlockLocation:
    return BlockLocation(*BLOCK_RECORD.unpack(data))


def encode_slab_key(slab_id: int) -> bytes:
    return _SLAB_KEY.pack(slab_id)


def decode_slab_key(data: bytes) -> int:
    slab_id: int = _SLAB_KEY.unpack(data)[0]
    return slab_id


def encode_next_slab(slab_id: int) -> bytes:
    return _NEXT_SLAB.pack(slab_id)


def decode_next_slab(data: bytes | None) -> int:
    """0 if there is none, or if it makes no sense."""
    if data is None or len(data) != _NEXT_SLAB.size:
        return 0
    slab_id: int = _NEXT_SLAB.unpack(data)[0]
    return slab_id


class SlabRow(NamedTuple):
    """What is known of a slab without opening it.

    `bitmap` has one bit a slot, lowest bit first: 1 means that a key in the blocks table points
    there. `kept_bitmap` has a 1 for those that must not be evicted, and is empty if there are
    none. `tick` is the recency of the most recently used slot when the row was written.
    """

    class_index: int
    slot_count: int
    used_count: int
    tick: int
    used_bytes: int
    bitmap: bytes
    kept_bitmap: bytes = b""


def encode_slab_row(row: SlabRow) -> bytes:
    flags = _HAS_KEPT if row.kept_bitmap else 0
    fields = (row.class_index, flags, row.slot_count, row.used_count, row.tick, row.used_bytes)
    return _SLAB_ROW.pack(*fields) + row.bitmap + row.kept_bitmap


def decode_slab_row(data: bytes) -> SlabRow | None:
    """None if the row contradicts itself; the slab's header is asked then."""
    if len(data) < _SLAB_ROW.size:
        return None
    class_index, flags, slot_count, used_count, tick, used_bytes = _SLAB_ROW.unpack_from(data)
    bitmap_bytes = -(-slot_count // 8)
    bitmap = data[_SLAB_ROW.size : _SLAB_ROW.size + bitmap_bytes]
    kept = data[_SLAB_ROW.size + bitmap_bytes :]
    if len(bitmap) != bitmap_bytes or used_count > slot_count or flags not in (0, _HAS_KEPT):
        return None
    if len(kept) != (bitmap_bytes if flags == _HAS_KEPT else 0):
        return None
    if int.from_bytes(kept, "little") & ~int.from_bytes(bitmap, "little"):
        return None
    return SlabRow(class_index, slot_count, used_count, tick, used_bytes, bitmap, kept)


def encode_recency(class_index: int, ticks: "array[int]") -> bytes:
    """The recency clock of every slot's last use; `ticks` holds unsigned 32-bit numbers."""
    return _RECENCY_HEAD.pack(class_index, 0) + _swapped(ticks).tobytes()


def decode_recency(data: bytes, class_index: int, slot_count: int) -> "array[int] | None":
    """None if the row was written for a slab of another class or number of slots."""
    if len(data) != _RECENCY_HEAD.size + 4 * slot_count:
        return None
    if _RECENCY_HEAD.unpack_from(data)[0] != class_index:
        return None
    ticks = array("I")
    ticks.frombytes(data[_RECENCY_HEAD.size :])
    return _swapped(ticks)


def _swapped(numbers: "array[int]") -> "array[int]":
    """From the machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


_TO_DIGITS = bytes(ord("1") if value == 1 else ord("0") for value in range(256))
_FROM_DIGITS = bytes(1 if value == ord("1") else 0 for value in range(256))


def pack_bitmap(states: bytes | bytearray) -> bytes:
    """One bit for each byte of `states`, set where the byte is 1."""
    if not states:
        return b""
    digits = states.translate(_TO_DIGITS)[::-1]
    return int(digits, 2).to_bytes(-(-len(states) // 8), "little")


def unpack_bitmap(bitmap: bytes, count: int) -> bytearray:
    """The inverse of `pack_bitmap`: `count` bytes, each 0 or 1."""
    if count == 0:
        return bytearray()
    digits = format(int.from_bytes(bitmap, "little"), f"0{count}b")[-count:]
    return bytearray(digits.encode().translate(_FROM_DIGITS)[::-1])
