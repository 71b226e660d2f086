"""A manifest as a table on disk, so that it needs little memory, whatever its length.

The table is built once from the file and kept until another manifest is mounted on the same cache
directory. If the manifest lacks attributes of a file, the table is built again at each start, so
that attributes requested from the origin last no longer than the mount.
"""

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cachefs.db import DamagedDatabaseError, Database, DatabaseBuilder
from cachefs.errors import CacheDirError, UsageError
from cachefs.format.manifest_record import (
    PATH_ROW,
    ROOT_NUMBER,
    TABLES,
    Directory,
    ManifestRow,
    name_of_row,
    pack_row,
    row_key,
    unpack_row,
)
from cachefs.format.paths import ManifestPaths
from cachefs.manifest.files import Listed
from cachefs.origin.names import is_name
from cachefs.types import NO_POSIX, ObjectMeta

_MAP_BYTES = 1 << 37
_KNOWN_DIRECTORIES = 20_000
_PATH_CHARACTERS = 8_000
"""Longest path of a directory. HDFS allows this length, and no source allows more."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a manifest: files, files with unknown attributes (`is_unknown`), and entries that
    the mount cannot show (invalid names, or paths below a file)."""

    files: int
    unknown: int
    skipped: int


def build(paths: ManifestPaths, listed: Iterable[Listed], needs_owners: bool) -> Counts:
    """Build `paths.table` from the files in `listed`, and return their counts. First deletes all
    tables of manifests that are there. Blocks.

    With `needs_owners`, a file without an owner counts as unknown too. Raises the errors of
    `listed`, and `UsageError` for a manifest without files.
    """
    for other in paths.all_entries():
        shutil.rmtree(other, ignore_errors=True)
    paths.new.parent.mkdir(mode=0o700, exist_ok=True)
    paths.new.mkdir(mode=0o700)
    builder = _Builder(paths.new / paths.table.name, needs_owners)
    try:
        for item in listed:
            builder.add(item)
        counts = builder.finish()
    except BaseException:
        builder.abandon()
        shutil.rmtree(paths.new, ignore_errors=True)
        raise
    paths.new.rename(paths.root)
    return counts


def is_unknown(meta: ObjectMeta | None, needs_owners: bool) -> bool:
    """Return whether the manifest lacks attributes of a file, so that they must be requested from
    the origin."""
    return meta is None or (needs_owners and meta.posix == NO_POSIX)


def _directory_number(
    path: str, known: OrderedDict[str, int | None], child: Callable[[int, str], int | None]
) -> int | None:
    """Return the number of a directory; None if the path cannot be a directory.

    `known` has the numbers of the directories that were needed last. `child(parent, name)` gives
    the others. Not recursive, because paths may be thousands of levels deep.
    """
    names: list[str] = []
    while path and path not in known:
        path, _, name = path.rpartition("/")
        names.append(name)
    number = known.get(path, ROOT_NUMBER)
    if path:
        known.move_to_end(path)
    while names:
        name = names.pop()
        path = f"{path}/{name}" if path else name
        number = None if number is None or not is_name(name) else child(number, name)
        known[path] = number
        if len(known) > _KNOWN_DIRECTORIES:
            known.popitem(last=False)
    return number


class _Builder:
    """Writes a new table: `add` each file, then `finish` or `abandon`."""

    def __init__(self, path: Path, needs_owners: bool) -> None:
        self._needs_owners = needs_owners
        self._db = DatabaseBuilder(path, TABLES, _MAP_BYTES)
        self._directories: OrderedDict[str, int | None] = OrderedDict()
        self._next_number = ROOT_NUMBER + 1
        self._files = self._unknown = self._skipped = 0

    def add(self, listed: Listed) -> None:
        """Add one file. If a manifest names a file twice, the last entry wins."""
        above, _, name = listed.path.rpartition("/")
        parent = None
        if len(above) <= _PATH_CHARACTERS:
            parent = _directory_number(above, self._directories, self._make)
        if parent is None or not is_name(name):
            self._skipped += 1
            return
        key = row_key(parent, name.encode("utf-8", "surrogateescape"))
        value = pack_row(listed.meta)
        if not self._db.put("rows", key, value):
            stored = self._db.get("rows", key)
            known = None if stored is None else unpack_row(stored)
            if isinstance(known, Directory):
                # The rule of `Origin.stat`: an object of one byte or more wins over a directory.
                if listed.meta is None or not listed.meta.size_bytes:
                    self._skipped += 1
                    return
                self._directories.clear()
            else:
                self._files -= 1
                self._unknown -= self._is_unknown(known)
            self._db.put("rows", key, value, overwrite=True)
        self._files += 1
        self._unknown += self._is_unknown(listed.meta)

    def _is_unknown(self, meta: ObjectMeta | None) -> bool:
        return is_unknown(meta, self._needs_owners)

    def _make(self, parent: int, name: str) -> int | None:
        """Return the number of a directory, which is added if needed; None if it is a file."""
        key = row_key(parent, name.encode("utf-8", "surrogateescape"))
        number = self._next_number
        if not self._db.put("rows", key, pack_row(Directory(number))):
            stored = self._db.get("rows", key)
            known = None if stored is None else unpack_row(stored)
            if isinstance(known, Directory):
                return known.number
            if known is not None and known.size_bytes:
                return None
            self._db.put("rows", key, pack_row(Directory(number)), overwrite=True)
            self._files -= 1
            self._unknown -= self._is_unknown(known)
            self._skipped += 1
        self._next_number += 1
        return number

    def finish(self) -> Counts:
        if not self._files:
            raise UsageError("the manifest names no file; nothing would be mounted")
        counts = Counts(self._files, self._unknown, self._skipped)
        text = f"{counts.files} {counts.unknown} {counts.skipped}"
        self._db.put("meta", b"counts", text.encode())
        self._db.finish()
        return counts

    def abandon(self) -> None:
        self._db.abandon()


class ManifestTable:
    """The table of a mounted manifest; its `ManifestView` owns it. All methods are synchronous and
    atomic. Only the event loop's thread may use them."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._directories: OrderedDict[str, int | None] = OrderedDict()
        stored = db.get("meta", b"counts") or b"0 1 0"
        self.counts = Counts(*map(int, stored.split()))

    @classmethod
    def open(cls, path: Path) -> "ManifestTable":
        """Open a table that `build` has made. Raises `DamagedDatabaseError` and
        `CacheDirError`."""
        db = Database.open(str(path), TABLES, _MAP_BYTES)
        try:
            return cls(db)
        except (ValueError, TypeError):
            db.abandon()
            raise DamagedDatabaseError(str(path), "its counts are no numbers") from None

    @property
    def db(self) -> Database:
        """The database, for the task that commits and closes it."""
        return self._db

    def find(self, path: str) -> ManifestRow:
        """Return the row of a path. Raises `KeyError` if the path is not in the manifest."""
        if not path:
            return Directory(ROOT_NUMBER)
        value = self._db.get("rows", self._key(path))
        if value is None:
            self._refuse_damage()
            raise KeyError(path)
        return unpack_row(value)

    def _refuse_damage(self) -> None:
        """Call this before a row counts as absent. Raises `CacheDirError` if rows are damaged: no
        other place has them."""
        if self._db.bad_rows or self._db.is_damaged:
            raise CacheDirError(
                "the table of the manifest is damaged; unmount and mount again to rebuild it"
            )

    def _key(self, path: str) -> bytes:
        above, _, name = path.rpartition("/")
        parent = _directory_number(above, self._directories, self._child)
        if parent is None or not is_name(name):
            raise KeyError(path)
        return row_key(parent, name.encode("utf-8", "surrogateescape"))

    def _child(self, parent: int, name: str) -> int:
        value = self._db.get("rows", row_key(parent, name.encode("utf-8", "surrogateescape")))
        if value is None:
            self._refuse_damage()
        row = None if value is None else unpack_row(value)
        if not isinstance(row, Directory):
            raise KeyError(name)
        return row.number

    def children(
        self, number: int, after: bytes | None, most: int
    ) -> list[tuple[bytes, ManifestRow]]:
        """Return up to `most` names and rows of directory `number`, in name order, after the name
        `after` (None: from the beginning)."""
        start = None if after is None else row_key(number, after) + b"\0"
        found = []
        for key, value in self._db.scan("rows", row_key(number, b""), start):
            found.append((name_of_row(key), unpack_row(value)))
            if len(found) == most:
                break
        self._refuse_damage()
        return found

    def freeze_file(self, path: str, meta: ObjectMeta) -> ObjectMeta:
        """Store attributes of a file that came from the origin, and return those that are valid
        from now on. Size, time and version that are already stored stay; only owner and mode are
        taken from `meta` then. Raises `KeyError`."""
        key = self._key(path)
        stored = self._db.get("rows", key) or PATH_ROW
        known = unpack_row(stored)
        if isinstance(known, ObjectMeta):
            meta = ObjectMeta(known.size_bytes, known.mtime_ns, known.version, meta.posix)
        self._db.put("rows", key, pack_row(meta))
        return meta
