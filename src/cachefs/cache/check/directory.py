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
from cachefs.cache.check.slab import Problem, check_slots, describe
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
from cachefs.format.paths import TierPaths, slab_id_of, slab_id_of_table, slab_name
from cachefs.format.slab import SlabHeader
from cachefs.format.tier_identity import MOST_BYTES, TierIdentity, decode_identity
from cachefs.trusted_path import check_directory as check_root
from cachefs.trusted_path import read_own_file
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
        return _check_locked(tier, repair, progress)
    except OSError as error:
        raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
    finally:
        tier.close()


def _check_locked(tier: CacheDirectory, repair: bool, progress: Progress) -> Report:
    paths, identity = tier.paths, tier.identity
    why: str | None = None
    reader = None
    try:
        reader = _open_index(paths, identity)
    except DamagedDatabaseError as error:
        why = error.why
    rebuilt = Repair(paths, identity, _ANY_QUOTA_BYTES) if repair else None
    try:
        check = _Check(tier, reader, rebuilt, why)
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
        tier: CacheDirectory,
        reader: DatabaseReader | None,
        repair: Repair | None,
        why_no_index: str | None,
    ) -> None:
        self.report = Report(tier.paths.root)
        self._tier = tier
        self._paths = tier.paths
        self._reader = reader
        self._repair = repair
        self._headers: dict[int, SlabHeader] = {}
        """Slab id -> header, of the slabs that belong to this directory."""
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
        if self._reader is None and self._headers and not self.report.counts[Problem.BAD_INDEX]:
            self.report.add(Problem.BAD_INDEX, "there is none")
        self._note_claims()
        self._look_at_rows()
        for number in range(0 if self._reader is None else self._reader.bad_rows):
            self.report.add(Problem.BAD_ROW, f"number {number + 1}")
        self.report.slabs = len(self._headers)
        for number, slab_id in enumerate(sorted(self._headers)):
            progress(number, len(self._headers))
            self._check_slab(slab_id)
        progress(len(self._headers), len(self._headers))

    # -- the slab files --------------------------------------------------------------------------

    def _look_at_files(self) -> None:
        for name in sorted(os.listdir(self._paths.slabs)):
            path = self._paths.slabs / name
            slab_id, of_table = slab_id_of(name), slab_id_of_table(name)
            status = path.lstat()
            if (slab_id, of_table) == (None, None) or stat.S_ISDIR(status.st_mode):
                self.report.add(Problem.FOREIGN_FILE, name)
                self.report.left.append(f"slabs/{name}")
            elif not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                self.report.add(Problem.FOREIGN_FILE, name)
                self._invalid.add(path)
            elif slab_id is not None:
                self._look_at_slab(slab_id, path, status.st_size)
            elif of_table is not None and not self._paths.slab(of_table).exists():
                self.report.add(Problem.BAD_HEADER, f"{name}: its slab is gone")
                self._invalid.add(path)

    def _look_at_slab(self, slab_id: int, path: Path, size_bytes: int) -> None:
        opened = self._tier.open_slab(slab_id)
        opened.close()
        header = opened.header
        if header is None:
            self.report.add(Problem.BAD_HEADER, path.name)
            self._invalid.add(path)
            if self._paths.table(slab_id).exists():
                self._invalid.add(self._paths.table(slab_id))
            return
        if size_bytes != header.slab_bytes:
            self.report.add(Problem.WRONG_SIZE, f"{path.name}: {size_bytes} bytes")
            self._misfits.append(path)
        self._headers[slab_id] = header
        self._claims[slab_id] = bytearray(header.layout.slot_count)

    # -- the index ---------------------------------------------------------------------------------

    def _note_claims(self) -> None:
        if self._reader is None:
            return
        for key, value in self._reader.scan(BLOCKS_TABLE):
            row = self._decode(value)
            if row is not None and row.slab not in self._headers:
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
        header = self._headers.get(row.slab)
        return (
            header is not None
            and row.slot < header.layout.slot_count
            and 0 < row.length <= header.layout.slot_bytes
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
            header = self._headers.get(slab_id)
            name = slab_name(slab_id)
            if header is None:
                if self._paths.slab(slab_id) not in self._invalid:  # counted already
                    self.report.add(Problem.NO_FILE, name)
            elif row is None or not _agree(row, header):
                self.report.add(Problem.WRONG_ROW, name)
            elif row[2:6] != self._recount(slab_id, row):
                self.report.add(Problem.WRONG_COUNT, name)
        for slab_id in self._headers.keys() - self._rows.keys():
            self.report.add(Problem.NO_ROW, slab_name(slab_id))

    def _recount(self, slab_id: int, row: SlabRow) -> tuple[int, int, int, bytes]:
        """Return the expected fields of the row, from the used count to the bitmap.

        The tick is taken from the row, as it can't be recomputed.
        """
        claims = self._claims[slab_id]
        return (sum(claims), row.tick, self._claimed_bytes[slab_id], pack_bitmap(claims))

    # -- the content of the slabs ------------------------------------------------------------------

    def _check_slab(self, slab_id: int) -> None:
        report, header = self.report, self._headers[slab_id]
        path = self._paths.slab(slab_id)
        opened = self._tier.open_slab(slab_id)
        try:
            os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            found = check_slots(opened, header, self._claims[slab_id], self._find)
            self._tier.disk.forget(opened.fd)  # only this check needed the pages
        finally:
            opened.close()
        for problem, detail in found.problems:
            report.add(problem, f"{path.name}, {detail}")
        report.recoverable += len(found.recoverable)
        blocks = found.good
        if self._repair is not None:
            recency = self._get(RECENCY_TABLE, encode_slab_key(slab_id))
            old = self._rows.get(slab_id)
            # After a clean close only evicted blocks are missing from the index.
            recovers = not report.clean
            blocks = self._repair.add_slab(header, found, recovers, old, recency)
            report.recovered += len(blocks) - len(found.good)
        report.blocks += len(blocks)
        report.block_bytes += sum(block.length for block in blocks)

    def finish_repair(self) -> None:
        """Install what the repair has built, if there is anything to repair."""
        if self._repair is not None and (self.report.counts or self.report.recovered):
            self._repair.install(self._misfits, self._invalid)
            self.report.repaired = True


def _agree(row: SlabRow, header: SlabHeader) -> bool:
    """Whether the index and the slab's header name the same class, number of slots and object."""
    of_header = (header.class_index, header.layout.slot_count, header.whole)
    return of_header == (row.class_index, row.slot_count, row.whole)
