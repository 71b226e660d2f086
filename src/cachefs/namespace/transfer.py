"""Export a namespace's metadata in pieces, and import pieces from another node (docs/CONTROL.md).

A piece is a run of names of one directory, in the order of their bytes. The pieces of a directory
follow each other, after the piece with the directory's own name. All metadata keep the time at
which the origin was asked, so that they expire on the other node when they expire here.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import trio

from cachefs.db import Database, DatabaseSnapshot
from cachefs.errors import UsageError
from cachefs.format.inode_record import (
    KIND_DIR,
    BadRecordError,
    Listing,
    ino_key,
    name_of_key,
    unpack_dirent,
    unpack_inode_fields,
    unpack_listing,
)
from cachefs.namespace.inodes import FirstName
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.origin.names import is_encodable, is_name
from cachefs.types import (
    MOST_MODE,
    MOST_SIZE_BYTES,
    NO_POSIX,
    UNKNOWN_MODE,
    Directory,
    Found,
    ObjectMeta,
    Posix,
)

_PIECE_ENTRIES = 1_000
_ENTRIES_PER_TURN = 250
"""Entries bound between two checkpoints: some 5 us each, 10 us if the directory has names."""
_MOST_PENDING = 100_000
"""The most changes that wait for a commit. This bounds the memory."""


class KnownEntry(NamedTuple):
    """One name, as it is sent. `listed_at_ns` and `entry_count` are set for a directory that is
    completely known, else None."""

    name: str
    is_dir: bool
    size_bytes: int
    mtime_ns: int
    version: str
    uid: int
    gid: int
    mode: int
    checked_at_ns: int
    listed_at_ns: int | None
    entry_count: int | None


class Piece(NamedTuple):
    """Entries of the directory `path` that follow the name `after` ("" for the first piece).

    `is_last` means that no more follow. `listed_at_ns` is None if the directory may have more
    names than are known.
    """

    path: str
    after: str
    is_last: bool
    listed_at_ns: int | None
    entries: list[KnownEntry]


# -- from here ---------------------------------------------------------------------------------


def known_root(snapshot: DatabaseSnapshot) -> KnownEntry | None:
    """Return the root as an entry with the name ""; None if the database has no valid one. Raises
    `DamagedDatabaseError`."""
    record = snapshot.get("inodes", ino_key(ROOT_INO))
    try:
        return None if record is None else _entry(snapshot, ROOT_INO, record, 0)
    except BadRecordError:
        return None


def known_pieces(snapshot: DatabaseSnapshot) -> Iterator[Piece]:
    """Yield all known names, directory by directory. Names that are not valid UTF-8 are left out,
    and their directories count as not listed. So are further names of a directory that was yielded
    before: after damage, a directory may contain itself. Blocks for the disk."""
    root = known_root(snapshot)
    directories = [(ROOT_INO, "", None if root is None else root.listed_at_ns)]
    seen = {ROOT_INO}
    while directories:
        ino, path, listed_at_ns = directories.pop()
        entries: list[KnownEntry] = []
        below: list[tuple[int, str, int | None]] = []
        after = ""
        for key, record in snapshot.scan("dirents", ino_key(ino)):
            name = name_of_key(key)
            try:
                dirent = unpack_dirent(record)
                if not dirent.is_listed:
                    continue
                stored = snapshot.get("inodes", ino_key(dirent.ino))
                if stored is None or not _is_text(name):
                    listed_at_ns = None
                    continue
                entry = _entry(snapshot, dirent.ino, stored, dirent.checked_at_ns)
                if unpack_inode_fields(stored)[-1] != ino or entry.name.encode() != name:
                    raise BadRecordError("another name's")
            except BadRecordError:
                listed_at_ns = None
                continue
            if entry.is_dir and dirent.ino in seen:
                continue
            if len(entries) == _PIECE_ENTRIES:
                yield Piece(path, after, False, listed_at_ns, entries)
                after, entries = entries[-1].name, []
            entries.append(entry)
            if entry.is_dir:
                name_below = f"{path}/{entry.name}" if path else entry.name
                below.append((dirent.ino, name_below, entry.listed_at_ns))
                seen.add(dirent.ino)
        if entries or listed_at_ns is not None:
            yield Piece(path, after, True, listed_at_ns, entries)
        # The other node numbers directories in this order: it then needs less sorting.
        directories += reversed(below)


def _entry(snapshot: DatabaseSnapshot, ino: int, record: bytes, checked_at_ns: int) -> KnownEntry:
    kind, name, size, *fields, _ = unpack_inode_fields(record)
    listed_at_ns = entry_count = None
    if kind == KIND_DIR:
        listed_at_ns, entry_count = _listing_of(snapshot, ino, size)
        size = 0
    text = name.decode("utf-8", "surrogateescape")
    known = (text, kind == KIND_DIR, size, *fields, checked_at_ns, listed_at_ns, entry_count)
    entry = KnownEntry._make(known)
    # The place of a directory is one of this machine.
    return entry._replace(version="") if entry.is_dir else entry


def _listing_of(
    snapshot: DatabaseSnapshot, ino: int, name_count: int
) -> tuple[int | None, int | None]:
    record = snapshot.get("listings", ino_key(ino))
    if record is None:
        return None, None
    count = 0
    for key, _ in snapshot.scan("dirents", ino_key(ino)):
        if not _is_text(name_of_key(key)):
            return None, None
        count += 1
    if count != name_count:
        return None, None  # some were lost
    return unpack_listing(record).listed_at_ns, count


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


# -- to here -----------------------------------------------------------------------------------


class MetadataImport:
    """Imports pieces into the inode table. Entries may be lists (from JSON) instead of tuples. What
    the table has from a newer observation stays."""

    def __init__(self, namespace: Namespace, db: Database) -> None:
        self._namespace = namespace
        self._table = namespace.table
        self._db = db
        self._clock = namespace.clock
        self._fresh: dict[int, int] = {}
        """Directories that a piece has created, until their last piece is imported, and how many
        names each has so far. They had no names before, so nothing in them must be unbound."""

    async def import_root(self, posix: Posix) -> None:
        """Set owner and mode of the root. Raises `UsageError` for invalid values."""
        try:
            if not (0 <= posix.mode <= MOST_MODE or posix.mode == UNKNOWN_MODE):
                raise UsageError(f"the root can't have the mode {posix.mode!r}")
            self._table.note_root(Directory(posix))
        except (struct.error, TypeError):
            raise UsageError("the root is invalid") from None
        await trio.lowlevel.checkpoint()

    async def import_piece(self, piece: Piece) -> int:
        """Import a piece, and return how many names got a new inode. Raises `UsageError` for
        invalid values.

        A directory counts as listed after its last piece. If the piece's listing is newer than
        what is known here, names that it doesn't have are unbound.
        """
        if not (is_encodable(piece.path) and is_encodable(piece.after)):
            raise UsageError(f"{piece.path!r} is no path: it is not valid Unicode")
        ino = self._directory(piece.path)
        if ino is None:
            return 0
        if piece.listed_at_ns is not None and piece.listed_at_ns > self._clock.now_ns():
            piece = piece._replace(listed_at_ns=None)  # one node's clock is wrong
        bound = 0
        for start in range(0, len(piece.entries), _ENTRIES_PER_TURN):
            entries = piece.entries[start : start + _ENTRIES_PER_TURN]
            after = piece.entries[start - 1][0] if start else piece.after
            bound += self._bind(ino, entries, after, piece.listed_at_ns)
            await trio.lowlevel.checkpoint()
        if piece.is_last and piece.listed_at_ns is not None:
            self._finish(ino, piece, piece.listed_at_ns)
            self._fresh.pop(ino, None)
        if self._db.pending_count > _MOST_PENDING:
            await self._db.commit()
        return bound

    def _directory(self, path: str) -> int | None:
        """Return the directory's inode number; None if no such directory is known here."""
        ino = ROOT_INO
        for name in path.split("/") if path else ():
            dirent = self._table.dirent(ino, name.encode("utf-8", "surrogateescape"))
            if dirent is None:
                return None
            ino = dirent.ino
        inode = self._table.get(ino)
        return ino if inode is not None and inode.is_dir else None

    def _bind(
        self, ino: int, entries: list[KnownEntry], after: str, listed_at_ns: int | None
    ) -> int:
        """Bind some entries, which follow the name `after`. Return how many names got a new inode.
        There must be no await between the check of what is known and the writes."""
        known_ns = self._known_ns(ino)
        previous = first = after.encode("utf-8", "surrogateescape")
        rows: list[FirstName] = []
        seen: set[bytes] = set()
        now_ns = self._clock.now_ns()
        absent_at_ns = self._namespace.absent.found_at_ns
        try:
            for text, is_dir, size, mtime_ns, version, uid, gid, mode, checked_ns, _, _ in entries:
                name = text.encode("utf-8", "surrogateescape")
                if name <= previous or not is_name(text):
                    raise UsageError(f"{text!r} is no name, or not in the order of names")
                if not (0 <= mode <= MOST_MODE or mode == UNKNOWN_MODE):
                    raise UsageError(f"{text!r} can't have the mode {mode!r}")
                if not 0 <= size <= MOST_SIZE_BYTES:
                    raise UsageError(f"{text!r} can't have a size of {size!r} bytes")
                previous = name
                seen.add(name)
                observed_ns = listed_at_ns or 0
                if observed_ns < checked_ns <= now_ns:
                    observed_ns = checked_ns
                if observed_ns >= known_ns and observed_ns >= absent_at_ns(ino, name):
                    posix = (uid, gid, mode)
                    rows.append((name, is_dir, size, mtime_ns, version, posix, observed_ns))
            bound = self._bind_rows(ino, first, rows)
        except (struct.error, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"an entry is invalid: {error}") from error
        changed = False
        if listed_at_ns is not None and known_ns <= listed_at_ns and ino not in self._fresh:
            changed = self._sweep(ino, first, previous, seen, listed_at_ns)
        if bound or changed:
            self._note_change(ino)
        return bound

    def _bind_rows(self, ino: int, after: bytes, rows: list[FirstName]) -> int:
        """Bind the rows, and return how many names got a new inode."""
        if next(self._table.dirents(ino, after or None, unlisted=True), None) is None:
            inos = self._table.bind_first(ino, rows)
            self._fresh |= {child: 0 for child, row in zip(inos, rows, strict=True) if row[1]}
            if ino in self._fresh:
                self._fresh[ino] += len(inos)
            return len(inos)
        bound = 0
        for name, is_dir, size_bytes, mtime_ns, version, ids, observed_ns in rows:
            posix = Posix._make(ids)
            found: Found = ObjectMeta(size_bytes, mtime_ns, version, posix)
            if is_dir:
                found = None if posix == NO_POSIX else Directory(posix)
            child, is_new = self._table.bind_seen(ino, name, found, observed_ns, note_check=True)
            if child is None:
                continue
            bound += is_new
            if is_new and is_dir:
                self._fresh[child] = 0
        return bound

    def _finish(self, ino: int, piece: Piece, listed_at_ns: int) -> None:
        if self._known_ns(ino) >= listed_at_ns:
            return
        last = piece.entries[-1][0] if piece.entries else piece.after
        after = last.encode("utf-8", "surrogateescape")
        if ino not in self._fresh and self._sweep(ino, after, None, set(), listed_at_ns):
            self._note_change(ino)
        count = self._fresh.get(ino) or sum(1 for _ in self._table.dirents(ino))
        self._namespace.validators.renew(ino)
        self._table.finish_listing(ino, Listing(listed_at_ns, count))

    def _sweep(
        self, ino: int, after: bytes, upto: bytes | None, seen: set[bytes], listed_at_ns: int
    ) -> bool:
        """Unbind the names after `after`, up to `upto` (None: to the end), that are not in `seen`.
        Return whether there were any."""
        gone = []
        for name, _ in self._table.dirents(ino, after or None):
            if upto is not None and name > upto:
                break
            if name not in seen:
                gone.append(name)
        return any([self._table.unbind_unlisted(ino, name, listed_at_ns) for name in gone])

    def _known_ns(self, ino: int) -> int:
        """Return when the directory was listed as known here (ns); 0 if never, or if that time is
        in the future."""
        listing = self._table.listing(ino)
        if listing is None or listing.listed_at_ns > self._clock.now_ns():
            return 0
        return listing.listed_at_ns

    def _note_change(self, ino: int) -> None:
        if self._table.listing(ino) is not None:
            self._namespace.validators.touch(ino)
