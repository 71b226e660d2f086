"""Repairs a cache directory that no daemon uses: a new index, and slab files of the right size.

The new index is built while the slabs are checked. It contains the verified rows, and the blocks
that only the slot tables have. One rename replaces the old index: it is the commit point. Slab
files change only after it, or in ways that do no harm before it (docs/DURABILITY.md).
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from operator import and_
from pathlib import Path

from cachefs.cache.check.slab import FoundBlock, SlabFindings
from cachefs.cache.tier.index import boot_id, map_size_bytes, set_aside
from cachefs.db import DatabaseBuilder, replace_database
from cachefs.format.index_record import (
    BLOCKS_TABLE,
    CLEAN_KEY,
    RECENCY_TABLE,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    TIER_KEY,
    SlabRow,
    decode_recency,
    encode_slab_key,
    encode_slab_row,
    pack_bitmap,
    unpack_bitmap,
)
from cachefs.format.paths import TierPaths
from cachefs.format.slab import SlabHeader
from cachefs.format.tier_identity import TierIdentity
from cachefs.trusted_path import open_own_file


class Repair:
    """The repair of one directory, whose lock the caller holds. The caller must call `abandon` at
    the end, also after `install`."""

    def __init__(self, paths: TierPaths, identity: TierIdentity, quota_bytes: int) -> None:
        self._paths = paths
        self._identity = identity
        shutil.rmtree(paths.new_index, ignore_errors=True)  # left by an interrupted repair
        self._builder = DatabaseBuilder(paths.new_index, TABLES, map_size_bytes(quota_bytes))

    def add_slab(
        self,
        header: SlabHeader,
        found: SlabFindings,
        recovers: bool,
        old: SlabRow | None,
        recency: bytes | None,
    ) -> list[FoundBlock]:
        """Put one slab and its correct blocks into the new index, and return these blocks.

        With `recovers`, blocks that only the slot table has are among them. `old` and `recency` are
        the slab's rows in the old index.
        """
        blocks = list(found.good)
        for block in blocks:
            self._builder.put(BLOCKS_TABLE, block.key, block.value)
        if recovers:
            blocks += [
                block
                for block in found.recoverable
                if self._builder.put(BLOCKS_TABLE, block.key, block.value)
            ]
        key = encode_slab_key(header.slab_id)
        row, layout = _slab_row(header, blocks, old), header.layout
        self._builder.put(SLABS_TABLE, key, encode_slab_row(row))
        if recency and decode_recency(recency, layout.class_index, layout.slot_count):
            self._builder.put(RECENCY_TABLE, key, recency)
        return blocks

    def install(self, misfits: Iterable[Path], invalid: Iterable[Path]) -> None:
        """Set the slab files `misfits` to their correct size, install the new index, then remove
        the files `invalid`."""
        for path in misfits:
            _resize(path, self._identity.slab_bytes)
        self._builder.put(STATE_TABLE, TIER_KEY, self._identity.uuid)
        self._builder.put(STATE_TABLE, CLEAN_KEY, boot_id())
        self._builder.finish()
        if self._paths.index.exists() and not self._paths.index.is_dir():
            set_aside(self._paths.index)
        replace_database(self._paths.new_index, self._paths.index)  # the commit point
        for path in invalid:
            path.unlink()

    def abandon(self) -> None:
        """Remove the new index unless it was installed."""
        self._builder.abandon()
        shutil.rmtree(self._paths.new_index, ignore_errors=True)


def _slab_row(header: SlabHeader, blocks: list[FoundBlock], old: SlabRow | None) -> SlabRow:
    layout = header.layout
    states = bytearray(layout.slot_count)
    for block in blocks:
        states[block.slot] = 1
    pinned = bytearray(len(states))
    if old is not None and old[:2] == (layout.class_index, layout.slot_count):
        pinned = bytearray(map(and_, unpack_bitmap(old.pinned_bitmap, len(states)), states))
    return SlabRow(
        layout.class_index,
        layout.slot_count,
        len(blocks),
        old.tick if old is not None else 0,
        sum(block.length for block in blocks),
        pack_bitmap(states),
        pack_bitmap(pinned) if any(pinned) else b"",
        header.whole,
    )


def _resize(path: Path, size_bytes: int) -> None:
    """Set a slab file to its correct size.

    Missing bytes at the end become zeros; the check has already found their blocks bad.
    """
    fd = open_own_file(path, os.O_RDWR)
    try:
        os.ftruncate(fd, size_bytes)
        with contextlib.suppress(OSError):  # a full disk: the first write allocates the space
            os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)
