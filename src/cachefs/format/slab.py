"""Encode and decode slab files, formats 4 and 5 (docs/formats/slab.md).

    0      header, padded with zeros to 4096 bytes
    4096   slot table: 32 bytes for each slot
    ...    zeros up to the next multiple of 4096
    data   slots of equal size, each a multiple of 512 bytes, one block in each

All numbers are little-endian. A table entry is only a hint, as it may be older than the data in
its slot. A block is served only if the xxh3_64 of its bytes equals the checksum stored with its
key. An entry whose other fields were damaged gives another checksum than its block has. In format
3, the mask depends on the slab only; in format 2, the entries have no mask.

A slab of format 5 holds the blocks of one object, in order. Its file has exactly the bytes of the
object. Header and slot table are in a file beside it.
"""

import hashlib
import struct
from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import xxhash

from cachefs.types import BLOCK_BYTES, BlockKey, Buffer

SLAB_MAGIC = b"cachefsS"
SLAB_FORMAT = 4
OBJECT_FORMAT = 5
_SAME_MASK = 3
_WITHOUT_MASK = 2
"""Earlier formats. Such slabs are still read and written, until they get another class."""
HEADER_BYTES = 4096
SLOT_ALIGN_BYTES = 512
FRONT_BYTES = 2 * HEADER_BYTES
"""Size of the header and the table in a slab of whole (1 MiB) blocks."""
MIN_SLAB_BYTES = 2 << 20
MAX_SLAB_BYTES = 64 << 20
HUGE_SLAB_BYTES = 1 << 31
"""The greatest slab size for huge caches, without `FRONT_BYTES`. The header has 32 bits for the
size."""

_HEADER = struct.Struct("<8sHHIIII16s")
"""Magic, format, class, slot bytes, slot count, slab id, slab bytes, tier uuid."""
_OBJECT = struct.Struct("<Q16s")
"""Size in bytes, object id. In format 5 they follow the fields of `_HEADER`, in which the slab
bytes are 0."""
_HEADER_CHECKSUM = struct.Struct("<Q")
"""The xxh3_64 of all fields. It follows them."""
SLOT_ENTRY = struct.Struct("<16sIIQ")
"""Object id, block index, length in bytes (0: never used), checksum XOR mask of the entry."""
_ENTRY_FIELDS_BYTES = 24
"""The fields before the checksum."""
_MASK_INPUT = struct.Struct("<II")
"""What a mask is computed from: slab id, class."""

assert _HEADER.size == 44
assert SLOT_ENTRY.size == 32


def _slot_classes() -> tuple[int, ...]:
    sizes = [SLOT_ALIGN_BYTES]
    while sizes[-1] < BLOCK_BYTES:
        grown = int(sizes[-1] * 1.125) // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
        sizes.append(min(BLOCK_BYTES, max(sizes[-1] + SLOT_ALIGN_BYTES, grown)))
    return tuple(sizes)


SLOT_CLASSES = _slot_classes()
"""The slot size of each class in bytes. It is part of the format: it must not change."""

assert SLOT_CLASSES[-1] == BLOCK_BYTES

OBJECT_CLASS = len(SLOT_CLASSES)
"""The class of slabs that hold one object. Their slots have the size of a block."""


def class_of(length: int) -> int:
    """Return the class with the smallest slot that holds `length` bytes; 1 <= length <= 1 MiB."""
    return bisect_left(SLOT_CLASSES, length)


def checksum_of(data: Buffer) -> int:
    """Return the xxh3_64 of `data`, with 0 replaced by 1: a checksum of 0 means "not verified"."""
    return xxhash.xxh3_64_intdigest(data) or 1


class SlabLayout(NamedTuple):
    """Sizes and offsets, in bytes, within a slab of one class."""

    class_index: int
    slot_bytes: int
    slot_count: int
    data_offset: int

    def slot_offset(self, slot: int) -> int:
        """Return the offset of the slot's data in the file."""
        return self.data_offset + slot * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """Size of header and slot table."""
        return table_offset(self.slot_count)


@cache
def slab_layout(class_index: int, slab_bytes: int) -> SlabLayout:
    """Return the layout with the most slots that fit into `slab_bytes`. The data start at a
    multiple of 4096."""
    slot_bytes = SLOT_CLASSES[class_index]
    count = (slab_bytes - HEADER_BYTES) // (slot_bytes + SLOT_ENTRY.size)
    while True:
        front = HEADER_BYTES + count * SLOT_ENTRY.size
        data_offset = -(-front // HEADER_BYTES) * HEADER_BYTES
        if data_offset + count * slot_bytes <= slab_bytes:
            return SlabLayout(class_index, slot_bytes, count, data_offset)
        count -= 1


class WholeObject(NamedTuple):
    """The object version that a slab of `OBJECT_CLASS` holds."""

    object_id: bytes
    size_bytes: int

    @property
    def layout(self) -> SlabLayout:
        """The layout of its slab: slot N has block N, at the place that it has in the object."""
        return SlabLayout(OBJECT_CLASS, BLOCK_BYTES, -(-self.size_bytes // BLOCK_BYTES), 0)


def encode_whole(whole: WholeObject) -> bytes:
    """Return the 24 bytes that describe the object in a header or a row of the index."""
    return _OBJECT.pack(whole.size_bytes, whole.object_id)


def decode_whole(data: bytes | memoryview) -> WholeObject | None:
    """Invert `encode_whole`. Return None for another length, or if no slab can hold the object."""
    if len(data) != _OBJECT.size:
        return None
    size_bytes, object_id = _OBJECT.unpack(data)
    if not 0 < size_bytes <= BLOCK_BYTES << 31:
        return None
    return WholeObject(object_id, size_bytes)


WHOLE_BYTES = _OBJECT.size


class EntryMask(NamedTuple):
    """What the checksums in the slot table of one slab are combined with (XOR)."""

    number: int
    covers_fields: bool = False
    """Whether the mask of each entry is computed from its other fields, with `number` as the seed.
    Otherwise it is `number`."""

    def of(self, fields: bytes | memoryview) -> int:
        """Return the mask of the entry that begins with `fields`."""
        if self.covers_fields:
            return xxhash.xxh3_64_intdigest(bytes(fields[:_ENTRY_FIELDS_BYTES]), self.number)
        return self.number


NO_MASK = EntryMask(0)


def table_offset(slot: int) -> int:
    """Return the offset of the slot's table entry in the file."""
    return HEADER_BYTES + slot * SLOT_ENTRY.size


class SlabHeader(NamedTuple):
    """The fields of a slab's header. The layout follows from class and size, or from `whole`."""

    slab_id: int
    class_index: int
    slab_bytes: int
    tier_uuid: bytes
    format: int = SLAB_FORMAT
    whole: WholeObject | None = None
    """The object that the slab holds, in format 5."""

    @property
    def layout(self) -> SlabLayout:
        """Sizes and offsets in the slab."""
        if self.whole is not None:
            return self.whole.layout
        return slab_layout(self.class_index, self.slab_bytes)

    @property
    def mask(self) -> EntryMask:
        """What the checksums in this slab's table are combined with.

        Nobody without access to the cache directory knows it. A power cut may leave the bytes of
        an old block in the place of a table entry. These bytes then never have the checksum that
        their author wanted. Each class of the slab has another mask, as old entries don't belong to
        a new class.
        """
        if self.format == _WITHOUT_MASK:
            return NO_MASK
        what = _MASK_INPUT.pack(self.slab_id, self.class_index)
        digest = hashlib.blake2b(what, digest_size=8, key=self.tier_uuid).digest()
        return EntryMask(int.from_bytes(digest, "little"), self.format != _SAME_MASK)


def encode_header(header: SlabHeader) -> bytes:
    """Return the header, padded to 4096 bytes."""
    layout = header.layout
    fields = _HEADER.pack(
        SLAB_MAGIC,
        header.format,
        header.class_index,
        layout.slot_bytes,
        layout.slot_count,
        header.slab_id,
        0 if header.whole else header.slab_bytes,
        header.tier_uuid,
    )
    if header.whole is not None:
        fields += encode_whole(header.whole)
    checksum = _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return (fields + checksum).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> SlabHeader | None:
    """Decode a header. Return None unless every field is valid: a slab with an invalid header
    contains no usable data."""
    if len(data) < _HEADER.size + _OBJECT.size + _HEADER_CHECKSUM.size:
        return None
    magic, version, class_index, slot_bytes, slot_count, slab_id, slab_bytes, uuid = (
        _HEADER.unpack_from(data)
    )
    is_whole = version == OBJECT_FORMAT
    end = _HEADER.size + (_OBJECT.size if is_whole else 0)
    (checksum,) = _HEADER_CHECKSUM.unpack_from(data, end)
    if magic != SLAB_MAGIC or xxhash.xxh3_64_intdigest(data[:end]) != checksum:
        return None
    whole = decode_whole(data[_HEADER.size : end]) if is_whole else None
    if whole is not None:
        header = SlabHeader(slab_id, class_index, whole.size_bytes, uuid, version, whole)
        is_known = class_index == OBJECT_CLASS and slab_bytes == 0
    else:
        header = SlabHeader(slab_id, class_index, slab_bytes, uuid, version)
        is_known = version in (_WITHOUT_MASK, _SAME_MASK, SLAB_FORMAT)
        is_known = is_known and class_index < len(SLOT_CLASSES)
    if not is_known or (slot_bytes, slot_count) != header.layout[1:3]:
        return None
    return header


class SlotEntry(NamedTuple):
    """One row of the slot table. It may be older than the data in the slot: see the module
    docstring."""

    key: BlockKey
    length: int
    checksum: int


def encode_entry(entry: SlotEntry, mask: EntryMask) -> bytes:
    """Return the 32 bytes of a row of the slot table. `mask` is that of the slab."""
    key, length, checksum = entry
    row = SLOT_ENTRY.pack(key.object_id, key.block_index, length, 0)
    return SLOT_ENTRY.pack(key.object_id, key.block_index, length, checksum ^ mask.of(row))


def entry_at(table: bytes | memoryview, slot: int, mask: EntryMask) -> SlotEntry | None:
    """Return the entry of `slot`; None if the slot was never used, if `table` ends before it, or if
    it has a checksum of 0, which is never written. `mask` is that of the slab."""
    position = slot * SLOT_ENTRY.size
    if position + SLOT_ENTRY.size > len(table):
        return None
    object_id, block_index, length, masked = SLOT_ENTRY.unpack_from(table, position)
    if length == 0:
        return None
    checksum = masked ^ mask.of(table[position : position + SLOT_ENTRY.size])
    if checksum == 0:
        return None
    return SlotEntry(BlockKey(object_id, block_index), length, checksum)
