"""`cachefs check`: compares a cache directory that no daemon uses with its index, and repairs it.

The first pass over the index records which slots have rows (claims). Then each slab is read once,
from start to end, and its slot table and bytes are compared with the index (`slab.py`).
Memory use is one byte per slot, plus the findings of one slab.

A repair writes a new index while the slabs are read. It contains the verified rows, and the blocks
that only the slot tables have. One rename replaces the old index: it is the commit point. Slab
files change only after it, or in ways that do no harm before it (docs/DURABILITY.md).
"""

import contextlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import and_
from pathlib import Path

from cachefs.cache.check.slab import (
    FoundBlock,
    Problem,
    Row,
    SlabFindings,
    check_slots,
    describe,
    read_header,
)
from cachefs.cache.tier.index import boot_id, map_size_bytes, set_aside
from cachefs.db import (
    DamagedDatabaseError,
    DatabaseBuilder,
    DatabaseReader,
    database_exists,
    replace_database,
)
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
    decode_recency,
    decode_slab_key,
    decode_slab_row,
    encode_slab_key,
    encode_slab_row,
    pack_bitmap,
    unpack_bitmap,
)
from cachefs.format.paths import TierPaths, slab_id_of, slab_name
from cachefs.format.slab import SlabLayout, decode_header, slab_layout
from cachefs.format.tier_identity import TierIdentity, decode_identity
from cachefs.tiers.tier import Tier

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
        data = paths.identity.read_bytes()
    except FileNotFoundError as error:
        raise CacheDirError(f"{path} is not a cache directory: no {paths.identity.name}") from error
    except OSError as error:
        raise CacheDirError(f"cache directory {path}: {error.strerror}") from error
    source = decode_identity(data, str(path)).source
    tier = Tier.open(path, _ANY_QUOTA_BYTES, source)
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
    builder = None
    if repair:
        shutil.rmtree(paths.new_index, ignore_errors=True)  # left by an interrupted repair
        builder = DatabaseBuilder(paths.new_index, TABLES, map_size_bytes(_ANY_QUOTA_BYTES))
    try:
        check = _Check(paths, identity, reader, builder, why)
        check.run(progress)
        if builder is not None:
            check.finish_repair()
    finally:
        if reader is not None:
            reader.close()
        if builder is not None:
            builder.abandon()
            shutil.rmtree(paths.new_index, ignore_errors=True)
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
    """One check of one directory. `reader` reads its index; `builder` builds the new one. Either
    can be None."""

    def __init__(
        self,
        paths: TierPaths,
        identity: TierIdentity,
        reader: DatabaseReader | None,
        builder: DatabaseBuilder | None,
        why_no_index: str | None,
    ) -> None:
        self.report = Report(paths.root)
        self._paths = paths
        self._identity = identity
        self._reader = reader
        self._builder = builder
        self._layouts: dict[int, SlabLayout] = {}
        """Slab id -> layout, of the slabs that belong to this directory."""
        self._claims: dict[int, bytearray] = {}
        """Slab id -> one byte per slot, 1 if a possible row of the index points to it."""
        self._claimed_bytes: Counter[int] = Counter()
        self._rows: dict[int, SlabRow | None] = {}
        self._nobodys: set[str] = set()
        """Names of entries that are named like a slab but are not valid slabs: a repair removes
        them."""
        self._misfits: list[Path] = []
        """Paths of slab files of the wrong size."""
        if reader is not None:
            self.report.clean = reader.get(STATE_TABLE, CLEAN_KEY) == boot_id()
        elif why_no_index is not None:
            self.report.add(Problem.BAD_INDEX, why_no_index)

    def run(self, progress: Progress) -> None:
        """Fill `report`, and put the rows of the new index into the builder."""
        self._look_at_files()
        if self._reader is None and self._layouts and not self.report.counts[Problem.BAD_INDEX]:
            self.report.add(Problem.BAD_INDEX, "there is none")
        self._note_claims()
        self._look_at_rows()
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
            elif not stat.S_ISREG(status.st_mode):
                self.report.add(Problem.FOREIGN_FILE, name)
                self._nobodys.add(path.name)
            else:
                self._look_at_slab(slab_id, path, status.st_size)

    def _look_at_slab(self, slab_id: int, path: Path, size_bytes: int) -> None:
        identity = self._identity
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = decode_header(read_header(fd))
        finally:
            os.close(fd)
        mine = (slab_id, identity.slab_bytes, identity.uuid)
        if header is None or (header.slab_id, header.slab_bytes, header.tier_uuid) != mine:
            self.report.add(Problem.BAD_HEADER, path.name)
            self._nobodys.add(path.name)
            return
        if size_bytes != identity.slab_bytes:
            self.report.add(Problem.WRONG_SIZE, f"{path.name}: {size_bytes} bytes")
            self._misfits.append(path)
        layout = slab_layout(header.class_index, identity.slab_bytes)
        self._layouts[slab_id] = layout
        self._claims[slab_id] = bytearray(layout.slot_count)

    # -- the index ---------------------------------------------------------------------------------

    def _note_claims(self) -> None:
        if self._reader is None:
            return
        for key, value in self._reader.scan(BLOCKS_TABLE):
            row = self._decode(value)
            if row is not None and row[0] not in self._layouts:
                self.report.add(Problem.NO_SLAB, f"{describe(key)}: slab {row[0]}")
            elif row is None or not self._is_possible(row):
                self.report.add(Problem.OUT_OF_BOUNDS, f"{describe(key)}: {row}")
            elif self._claims[row[0]][row[1]]:
                place = f"{slab_name(row[0])}, slot {row[1]}"
                self.report.add(Problem.SHARED_SLOT, f"{describe(key)}: {place}")
            else:
                self._claims[row[0]][row[1]] = 1
                self._claimed_bytes[row[0]] += row[2]

    @staticmethod
    def _decode(value: bytes) -> Row | None:
        return BLOCK_RECORD.unpack(value) if len(value) == BLOCK_RECORD.size else None

    def _is_possible(self, row: Row) -> bool:
        layout = self._layouts.get(row[0])
        return (
            layout is not None
            and row[1] < layout.slot_count
            and 0 < row[2] <= layout.slot_bytes
            and row[3] != 0
        )

    def _find(self, key: bytes) -> Row | None:
        """Return the row of a block, or None if it has none or an impossible one."""
        value = self._reader.get(BLOCKS_TABLE, key) if self._reader is not None else None
        row = self._decode(value) if value is not None else None
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
                if name not in self._nobodys:  # `_look_at_slab` has counted them
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            found = check_slots(fd, slab_id, layout, self._claims[slab_id], self._find)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # only this check needed the pages
        finally:
            os.close(fd)
        for problem, detail in found.problems:
            report.add(problem, f"{path.name}, {detail}")
        report.recoverable += len(found.recoverable)
        blocks = found.good
        if self._builder is not None:
            blocks = self._rebuild(slab_id, found)
        report.blocks += len(blocks)
        report.block_bytes += sum(block.length for block in blocks)

    # -- repair ------------------------------------------------------------------------------------

    def _rebuild(self, slab_id: int, found: SlabFindings) -> list[FoundBlock]:
        """Put the correct blocks of one slab into the new index, and return them.

        After a clean close only evicted blocks are missing from the index: these are not recovered.
        """
        assert self._builder is not None
        blocks = found.good
        for block in blocks:
            self._builder.put(BLOCKS_TABLE, block.key, block.value)
        if not self.report.clean:
            recovered = [
                block
                for block in found.recoverable
                if self._builder.put(BLOCKS_TABLE, block.key, block.value)
            ]
            self.report.recovered += len(recovered)
            blocks = blocks + recovered
        self._put_slab_row(slab_id, blocks)
        return blocks

    def _put_slab_row(self, slab_id: int, blocks: list[FoundBlock]) -> None:
        assert self._builder is not None
        layout, key = self._layouts[slab_id], encode_slab_key(slab_id)
        old = self._rows.get(slab_id)
        states = bytearray(layout.slot_count)
        for block in blocks:
            states[block.slot] = 1
        pinned = bytearray(len(states))
        if old is not None and old[:2] == (layout.class_index, layout.slot_count):
            pinned = bytearray(map(and_, unpack_bitmap(old.pinned_bitmap, len(states)), states))
        row = SlabRow(
            layout.class_index,
            layout.slot_count,
            len(blocks),
            old.tick if old is not None else 0,
            sum(block.length for block in blocks),
            pack_bitmap(states),
            pack_bitmap(pinned) if any(pinned) else b"",
        )
        self._builder.put(SLABS_TABLE, key, encode_slab_row(row))
        recency = self._reader.get(RECENCY_TABLE, key) if self._reader is not None else None
        if recency and decode_recency(recency, layout.class_index, layout.slot_count):
            self._builder.put(RECENCY_TABLE, key, recency)

    def finish_repair(self) -> None:
        """If there is anything to repair: install the new index, then remove invalid slab files."""
        assert self._builder is not None
        if not self.report.counts and not self.report.recovered:
            return
        for path in self._misfits:
            self._resize(path)
        self._builder.put(STATE_TABLE, TIER_KEY, self._identity.uuid)
        self._builder.put(STATE_TABLE, CLEAN_KEY, boot_id())
        self._builder.finish()
        if self._paths.index.exists() and not self._paths.index.is_dir():
            set_aside(self._paths.index)
        replace_database(self._paths.new_index, self._paths.index)  # the commit point
        for name in self._nobodys:
            (self._paths.slabs / name).unlink()
        self.report.repaired = True

    def _resize(self, path: Path) -> None:
        """Set a slab file to its correct size.

        Missing bytes at the end become zeros; the check has already found their blocks bad.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, self._identity.slab_bytes)
            with contextlib.suppress(OSError):  # a full disk: the first write allocates the space
                os.posix_fallocate(fd, 0, self._identity.slab_bytes)
        finally:
            os.close(fd)
