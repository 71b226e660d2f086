"""Slab files that are not what they were (format/slab.py, cache/tier/slab_files.py,
cache/check/directory.py).

An input is a byte of flags, and patches: slab, offset (4 bytes), length, bytes.
"""

from pathlib import Path
from struct import Struct

import xxhash

from cachefs.db import Database
from cachefs.format.index_record import CLEAN_KEY, STATE_TABLE, TABLES, TIER_KEY
from cachefs.format.paths import TierPaths
from cachefs.format.slab import EntryMask, decode_header, entry_at, slab_layout
from tests.fuzz.targets._cache import damage

_PATCH = Struct("<BIB")
_CRASHED, _RIGHT_CHECKSUM, _NO_INDEX = 1, 2, 4
_FIELDS = 44


def fuzz(data: bytes) -> None:
    if not data:
        return
    flags, patches = data[0], data[1:]
    decode_header(patches)
    entry_at(patches, 0, mask=EntryMask(7, covers_fields=True))

    def change(path: Path) -> None:
        _patch(TierPaths(path), patches, bool(flags & _RIGHT_CHECKSUM))
        if flags & _NO_INDEX:
            (path / "index" / "data.mdb").unlink()
        elif flags & _CRASHED:
            database = Database.open(str(path / "index"), TABLES, 1 << 30)
            assert database.get(STATE_TABLE, TIER_KEY)
            database.delete(STATE_TABLE, CLEAN_KEY)
            database.close()

    damage(change, not flags & _CRASHED)


def _patch(paths: TierPaths, patches: bytes, right_checksum: bool) -> None:
    slabs = sorted(paths.slabs.iterdir())
    at = 0
    while at + _PATCH.size <= len(patches):
        number, offset, length = _PATCH.unpack_from(patches, at)
        at += _PATCH.size
        file = slabs[number % len(slabs)]
        content = bytearray(file.read_bytes())
        if length == 255:  # cut, or longer than it should be
            content = content[:offset].ljust(min(offset, len(content) + 8192), b"\0")
        else:
            offset %= max(1, len(content))
            content[offset : offset + length] = patches[at : at + length]
            at += length
        if right_checksum and len(content) > _FIELDS + 8:
            digest = xxhash.xxh3_64_intdigest(content[:_FIELDS])
            content[_FIELDS : _FIELDS + 8] = digest.to_bytes(8, "little")
            header = decode_header(bytes(content[:4096]))
            assert header is None or slab_layout(header.class_index, header.slab_bytes)
        file.write_bytes(content)
