"""`cachefs check`: compares a cache directory that no daemon uses with its index, and repairs it.

The first pass over the index records which slots have rows (claims). Then each slab is read once,
from start to end, and its slot table and bytes are compared with the index (`slab.py`).
Memory use is one byte per slot, plus the findings of one slab.

With `repair`, a new index is built while the slabs are read (`repair.py`).
"""

import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cachefs.cache.check.repair import Repair
from cachefs.cache.check.slab import Problem, check_slots, describe, read_header
from cachefs.cache.tier.index import boot_id
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.db import DamagedDatabaseError, DatabaseReader, database_exists
from cachefs.db.read_through import refuse_unreadable
from cachefs.errors import CacheDirError
from cachefs.format.index_record import (
    BLOCK_RECORD,
    BLOCKS_TABLE,
    CLEAN_KEY,
    RECENCY_TABLE,
    SLAB_KEY_BYTES,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    TIER_KEY,
    SlabRow,
    decode_slab_key,
    decode_slab_row,
    encode_slab_key,
    pack_bitmap,
)
from cachefs.format.paths import TierPaths, slab_id_of, slab_name
from cachefs.format.slab import EntryMask, SlabLayout, decode_header, slab_layout
from cachefs.format.tier_identity import MOST_BYTES, TierIdentity, decode_identity
from cachefs.trusted_path import check_directory as check_root
from cachefs.trusted_path import open_own_file, read_own_file
from cachefs.types import BlockLocation

Progress = Callable[[int, int], None]
"""Arguments: number of slabs done, total number of slabs."""

MOST_DETAILS = 5
"""Maximum number of details in a report per kind of problem."""

_ANY_QUOTA_BYTES = 1 << 40


@dataclass(slots=True)
class Report:
    """The findings in one cache directory."""

    path: Path
    slabs: int = 0
    blocks: int = 0
    """Number of correct blocks that the index has now."""
    block_bytes: int = 0
    counts: Counter[Problem] = field(default_factory=Counter)
    details: dict[Problem, list[str]] = field(default_factory=dict)
    recoverable: int = 0
    """Correct blocks that only the slot tables have: a crash lost their rows, or they were
    evicted."""
    recovered: int = 0
    clean: bool = False
    """The last daemon closed the directory, and the machine has not restarted since."""
    repaired: bool = False
    left: list[str] = field(default_factory=list)
    """Paths that a repair does not touch."""

    def add(self, problem: Problem, detail: str) -> None:
        """Count a problem, and store its detail if there are fewer than `MOST_DETAILS`."""
        self.counts[problem] += 1
        details = self.details.setdefault(problem, [])
        if len(details) < MOST_DETAILS:
            details.append(detail)


def check_directory(
    path: Path, repair: bool = False, progress: Progress = lambda done, total: None
) -> Report:
    """Verify a cache directory under its lock, and return a report. Changes nothing unless
    `repair` is set.

    Raises `CacheDirError` if `path` is not a cache directory, is in use, or can't be read or
    written.
    """
    paths = TierPaths(path)
    try:
        check_root(path)
        data = read_own_file(paths.identity, MOST_BYTES)
    except FileNotFoundError as error:
        raise CacheDirError(f"{path} is not a cache directory: no {paths.identity.name}") from error
    except OSError as error:
        raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
    source = decode_identity(data, str(path)).source
    tier = CacheDirectory.open(path, _ANY_QUOTA_BYTES, source)
    try:
        return _check_locked(tier.paths, tier.identity, repair, progress)
    except OSError as error:
        raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
    finally:
        tier.close()


def _check_locked(
    paths: TierPaths, identity: TierIdentity, repair: bool, progress: Progress
) -> Report:
    why: str | None = None
    reader = None
    try:
        reader = _open_index(paths, identity)
    except DamagedDatabaseError as error:
        why = error.why
    rebuilt = Repair(paths, identity, _ANY_QUOTA_BYTES) if repair else None
    try:
        check = _Check(paths, identity, reader, rebuilt, why)
        check.run(progress)
        check.finish_repair()
    finally:
        if reader is not None:
            reader.close()
        if rebuilt is not None:
            rebuilt.abandon()
    return check.report


def _open_index(paths: TierPaths, identity: TierIdentity) -> DatabaseReader | None:
    """Open the index; None if there is none.

    Raises `DamagedDatabaseError` if it is damaged or belongs to another directory.
    """
    place = paths.index
    if place.exists() and not place.is_dir():
        raise DamagedDatabaseError(str(place), "not a directory")
    if not database_exists(place):
        return None
    refuse_unreadable(place, TABLES)
    reader = DatabaseReader(place, TABLES)
    if reader.get(STATE_TABLE, TIER_KEY) not in (None, identity.uuid):
        reader.close()
        raise DamagedDatabaseError(str(place), "another cache directory's")
    return reader


class _Check:
    """One check of one directory. `reader` reads its index; `repair` builds the new one. Either
    can be None."""

    def __init__(
        self,
        paths: TierPaths,
        identity: TierIdentity,
        reader: DatabaseReader | None,
        repair: Repair | None,
        why_no_index: str | None,
    ) -> None:
        self.report = Report(paths.root)
        self._paths = paths
        self._identity = identity
        self._reader = reader
        self._repair = repair
        self._layouts: dict[int, SlabLayout] = {}
        """Slab id -> layout, of the slabs that belong to this directory."""
        self._masks: dict[int, EntryMask] = {}
        """Slab id -> entry mask, of the same slabs."""
        self._claims: dict[int, bytearray] = {}
        """Slab id -> one byte per slot, 1 if a possible row of the index points to it."""
        self._claimed_bytes: Counter[int] = Counter()
        self._rows: dict[int, SlabRow | None] = {}
        self._invalid: set[Path] = set()
        """Paths of entries that are named like a slab but are not valid slabs: a repair removes
        them."""
        self._misfits: list[Path] = []
        """Paths of slab files of the wrong size."""
        if reader is not None:
            self.report.clean = reader.get(STATE_TABLE, CLEAN_KEY) == boot_id()
        elif why_no_index is not None:
            self.report.add(Problem.BAD_INDEX, why_no_index)

    def run(self, progress: Progress) -> None:
        """Fill `report`, and put the rows of the new index into the repair."""
        self._look_at_files()
        if self._reader is None and self._layouts and not self.report.counts[Problem.BAD_INDEX]:
            self.report.add(Problem.BAD_INDEX, "there is none")
        self._note_claims()
        self._look_at_rows()
        for number in range(0 if self._reader is None else self._reader.bad_rows):
            self.report.add(Problem.BAD_ROW, f"number {number + 1}")
        self.report.slabs = len(self._layouts)
        for number, slab_id in enumerate(sorted(self._layouts)):
            progress(number, len(self._layouts))
            self._check_slab(slab_id)
        progress(len(self._layouts), len(self._layouts))

    # -- the slab files --------------------------------------------------------------------------

    def _look_at_files(self) -> None:
        for name in sorted(os.listdir(self._paths.slabs)):
            path = self._paths.slabs / name
            slab_id = slab_id_of(name)
            status = path.lstat()
            if slab_id is None or stat.S_ISDIR(status.st_mode):
                self.report.add(Problem.FOREIGN_FILE, name)
                self.report.left.append(f"slabs/{name}")
            elif not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                self.report.add(Problem.FOREIGN_FILE, name)
                self._invalid.add(path)
            else:
                self._look_at_slab(slab_id, path, status.st_size)

    def _look_at_slab(self, slab_id: int, path: Path, size_bytes: int) -> None:
        identity = self._identity
        fd = open_own_file(path)
        try:
            header = decode_header(read_header(fd))
        finally:
            os.close(fd)
        mine = (slab_id, identity.slab_bytes, identity.uuid)
        if header is None or (header.slab_id, header.slab_bytes, header.tier_uuid) != mine:
            self.report.add(Problem.BAD_HEADER, path.name)
            self._invalid.add(path)
            return
        if size_bytes != identity.slab_bytes:
            self.report.add(Problem.WRONG_SIZE, f"{path.name}: {size_bytes} bytes")
            self._misfits.append(path)
        layout = slab_layout(header.class_index, identity.slab_bytes)
        self._layouts[slab_id] = layout
        self._masks[slab_id] = header.mask
        self._claims[slab_id] = bytearray(layout.slot_count)

    # -- the index ---------------------------------------------------------------------------------

    def _note_claims(self) -> None:
        if self._reader is None:
            return
        for key, value in self._reader.scan(BLOCKS_TABLE):
            row = self._decode(value)
            if row is not None and row.slab not in self._layouts:
                self.report.add(Problem.NO_SLAB, f"{describe(key)}: slab {row.slab}")
            elif row is None or not self._is_possible(row):
                shown = None if row is None else tuple(row)
                self.report.add(Problem.OUT_OF_BOUNDS, f"{describe(key)}: {shown}")
            elif self._claims[row.slab][row.slot]:
                place = f"{slab_name(row.slab)}, slot {row.slot}"
                self.report.add(Problem.SHARED_SLOT, f"{describe(key)}: {place}")
            else:
                self._claims[row.slab][row.slot] = 1
                self._claimed_bytes[row.slab] += row.length

    @staticmethod
    def _decode(value: bytes) -> BlockLocation | None:
        if len(value) != BLOCK_RECORD.size:
            return None
        return BlockLocation(*BLOCK_RECORD.unpack(value))

    def _is_possible(self, row: BlockLocation) -> bool:
        layout = self._layouts.get(row.slab)
        return (
            layout is not None
            and row.slot < layout.slot_count
            and 0 < row.length <= layout.slot_bytes
            and row.checksum != 0
        )

    def _get(self, table: str, key: bytes) -> bytes | None:
        return None if self._reader is None else self._reader.get(table, key)

    def _find(self, key: bytes) -> BlockLocation | None:
        """Return the row of a block, or None if it has none or an impossible one."""
        value = self._get(BLOCKS_TABLE, key)
        row = None if value is None else self._decode(value)
        return row if row is not None and self._is_possible(row) else None

    def _look_at_rows(self) -> None:
        if self._reader is None:
            return
        for key, value in self._reader.scan(SLABS_TABLE):
            if len(key) != SLAB_KEY_BYTES:
                self.report.add(Problem.NO_FILE, f"a row with a key of {len(key)} bytes")
                continue
            slab_id, row = decode_slab_key(key), decode_slab_row(value)
            self._rows[slab_id] = row
            layout = self._layouts.get(slab_id)
            name = slab_name(slab_id)
            if layout is None:
                if self._paths.slab(slab_id) not in self._invalid:  # counted already
                    self.report.add(Problem.NO_FILE, name)
            elif row is None or row[:2] != (layout.class_index, layout.slot_count):
                self.report.add(Problem.WRONG_ROW, name)
            elif row[2:] != self._recount(slab_id, row):
                self.report.add(Problem.WRONG_COUNT, name)
        for slab_id in self._layouts.keys() - self._rows.keys():
            self.report.add(Problem.NO_ROW, slab_name(slab_id))

    def _recount(self, slab_id: int, row: SlabRow) -> tuple[int, int, int, bytes, bytes]:
        """Return the expected fields of the row, from the used count on.

        The tick and the bitmap of pinned slots are taken from the row: they can't be recomputed.
        """
        claims = self._claims[slab_id]
        counted = (sum(claims), row.tick, self._claimed_bytes[slab_id], pack_bitmap(claims))
        return (*counted, row.pinned_bitmap)

    # -- the content of the slabs ------------------------------------------------------------------

    def _check_slab(self, slab_id: int) -> None:
        report, layout = self.report, self._layouts[slab_id]
        path = self._paths.slab(slab_id)
        fd = open_own_file(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            mask, claims = self._masks[slab_id], self._claims[slab_id]
            found = check_slots(fd, slab_id, layout, mask, claims, self._find)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # only this check needed the pages
        finally:
            os.close(fd)
        for problem, detail in found.problems:
            report.add(problem, f"{path.name}, {detail}")
        report.recoverable += len(found.recoverable)
        blocks = found.good
        if self._repair is not None:
            recency = self._get(RECENCY_TABLE, encode_slab_key(slab_id))
            old = self._rows.get(slab_id)
            # After a clean close only evicted blocks are missing from the index.
            recovers = not report.clean
            blocks = self._repair.add_slab(slab_id, layout, found, recovers, old, recency)
            report.recovered += len(blocks) - len(found.good)
        report.blocks += len(blocks)
        report.block_bytes += sum(block.length for block in blocks)

    def finish_repair(self) -> None:
        """Install what the repair has built, if there is anything to repair."""
        if self._repair is not None and (self.report.counts or self.report.recovered):
            self._repair.install(self._misfits, self._invalid)
            self.report.repaired = True
