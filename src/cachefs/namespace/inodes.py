"""The persistent inode table: it maps each name to an inode.

Invariants:
- A file inode is one version of one object. Another version at the same name is another inode,
  so size, bytes and cached blocks of two versions can't mix. Owner, group and mode change in place.
- A directory inode is one directory, where the origin can tell directories apart
  (`Directory.place`). If another one gets its path, that one has another inode.
- An inode number is never used twice in the life of a namespace database, because the kernel may
  still cache the bytes of the first file. A number is used only after its reservation is stored
  where the next process finds it.
- Only the newest observation binds a name. An answer is ignored if its request began before the
  look-up or the complete listing that last saw the name (or its absence). So an answer is never
  older than `checked_at_ns`, or the listing's row, says. Timestamps from the future (the clock
  was set back) are ignored.
- A name and its inode name each other. An inode with another name or parent counts as missing.
- A directory's record has the number of its names. Where there are fewer, rows were damaged: its
  listing is forgotten, so that no name seems to be absent.
- A record outlives its name, so that an open file can still read its version. Records without a
  name are *unnamed inodes*, in the table `orphans`. They are deleted at the next start, when no
  kernel refers to them.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cachefs.db import Database, DatabaseSnapshot, Get
from cachefs.errors import CacheDirError, ObjectChangedError
from cachefs.format.inode_record import (
    FORMAT_VERSION,
    KIND_DIR,
    KIND_FILE,
    BadRecordError,
    Dirent,
    Inode,
    Listing,
    OwnTimes,
    dirent_key,
    ino_key,
    ino_of_key,
    name_of_key,
    pack_dirent,
    pack_inode,
    pack_inode_of,
    pack_listing,
    pack_times,
    unpack_dirent,
    unpack_inode,
    unpack_listing,
    unpack_stat,
    unpack_times,
)
from cachefs.namespace.clock import Clock, coarse_ns
from cachefs.namespace.inode_numbers import MOST_INO, InodeNumbers
from cachefs.namespace.own_names import OwnNames
from cachefs.types import NO_POSIX, Directory, Found, ObjectMeta, Posix

log = logging.getLogger(__name__)

ROOT_INO = 1

FirstName = tuple[bytes, bool, int, int, str, tuple[int, int, int], int]
"""Name, whether it is a directory, size in bytes, mtime_ns, version, (uid, gid, mode), and when it
was observed (wall clock, ns)."""

_INO_BYTES = 8
_PURGED_PER_START = 100_000


class NoPathError(ObjectChangedError, LookupError):
    """The inode has no path: a directory above it is no longer in the table, or (in a damaged
    table) the directories form a cycle."""


class InodeTable:
    """The inode table of one mount, owned by its `Namespace`.

    All methods except `bring` are synchronous, and so atomic on the loop thread. A row that can't
    be decoded counts as missing.
    """

    def __init__(
        self,
        db: Database,
        identity: str,
        clock: Clock,
        on_unbound: Callable[[int, bytes], None] = lambda parent, name: None,
        on_changed: Callable[[int], None] = lambda ino: None,
        wal_stem: Path | None = None,
        is_successor: bool = False,
        may_hide: re.Pattern[bytes] | None = None,
    ) -> None:
        """Use `db`; create the root if the database is new.

        `on_unbound(parent, name)` is called whenever a name no longer refers to its inode, and
        `on_changed(ino)` when an inode gets another owner, group or mode. Both must not call back
        into the table. `wal_stem` and `is_successor`: see `Namespace`; `may_hide`: see `Origin`.

        Raises `CacheDirError` if `db` has another format, belongs to another source, or has no
        unused inode numbers (which means damage).
        """
        self._db = db
        self._on_unbound = on_unbound
        self._on_changed = on_changed
        self._clock = clock
        self.may_hide = may_hide
        """Matches names that may exist though no listing shows them; None if there are none."""
        self.own = OwnNames()
        """The names that this mount has changed itself."""
        self.found_count = 0
        """The number of times that a look-up gave a name a new inode."""
        self.unbound_count = 0
        """The number of times that a name lost its inode."""
        self.change_count = 0
        """The number of times that a name was added to a directory or removed from it."""
        self._new_names: dict[int, int] = {}
        """By directory: how many more names it has than its record says."""
        self._checked: set[int] = set()
        """Directories of earlier processes whose names are all there: see `has_all_names`."""
        self._miscounted: set[int] = set()
        """Directories whose records may have a wrong number of names."""
        self.on_unnamed: list[Callable[[int], None]] = []
        """Called with every inode that loses its name. The name may still be in the table then.
        They must not call back into the table."""
        self._is_successor = is_successor
        self._check_meta(identity)
        db.recover("meta", b"journal", wal_stem)
        last_key = db.last_key("inodes")
        try:
            last_ino = ROOT_INO if last_key is None else max(ROOT_INO, ino_of_key(last_key))
        except BadRecordError:
            last_ino = MOST_INO
        self._numbers = InodeNumbers(db, last_ino, clock.now_ns(), is_successor)
        self._dir_paths: dict[int, str] = {ROOT_INO: ""}
        self.get(ROOT_INO)  # makes it, if the database is new
        self._first_ino = self._numbers.next_ino
        """Inodes from this number on were made by this process."""
        db.before_commit = self.put_name_counts
        db.on_bad_row = self._on_bad_row

    def _put_root(self) -> Inode:
        """Make the root, in a new database or after damage, and return it."""
        root = Inode(ROOT_INO, KIND_DIR, ROOT_INO, b"", 0, coarse_ns(self._clock.now_ns()), "")
        self.put(root)
        if self.listing(ROOT_INO) is not None or self._db.is_damaged:
            self._miscounted.add(ROOT_INO)
            self.forget_listing(ROOT_INO)
        return root

    def _check_meta(self, identity: str) -> None:
        for name, wanted, complaint in (
            (b"format", str(FORMAT_VERSION), "the namespace has format {}, this cachefs knows {}"),
            (b"identity", identity, "the namespace belongs to {}, not to {}"),
        ):
            stored = self._db.get("meta", name)
            if stored is None:
                self._db.put("meta", name, wanted.encode("utf-8", "surrogateescape"))
            elif stored.decode("utf-8", "surrogateescape") != wanted:
                text = complaint.format(stored.decode("utf-8", "replace"), wanted)
                raise CacheDirError(f"{text}; use another cache directory")

    # -- reading -------------------------------------------------------------------------------

    def get(self, ino: int) -> Inode | None:
        """Return the inode; None if there is no such row."""
        record = self._db.get("inodes", ino_key(ino))
        try:
            if record is not None:
                return unpack_inode(ino, record)
        except BadRecordError:
            pass
        return self._put_root() if ino == ROOT_INO else None

    def stat(
        self, ino: int, named: tuple[int, bytes] | None = None
    ) -> tuple[int, int, int, int, int, int] | None:
        """Return (kind, size in bytes, mtime_ns, uid, gid, mode). This is cheaper than `get`. If
        `named`, a directory and a name in it, is another inode's name, return None."""
        record = self._db.get("inodes", ino_key(ino))
        try:
            return None if record is None else unpack_stat(record, named)
        except BadRecordError:
            return None

    def child(self, parent: int, name: bytes, ino: int) -> Inode | None:
        """Return the inode `ino`, to which this name refers; None if there is no such row, or if it
        is another name's."""
        inode = self.get(ino)
        if inode is None or inode.parent != parent or inode.name != name:
            return None
        return inode

    def _has(self, ino: int) -> bool:
        return self._db.get("inodes", ino_key(ino)) is not None

    @property
    def is_cold(self) -> bool:
        """See `Residency.is_cold`. If it is true, call `bring` before a look-up."""
        return self._db.residency.is_cold

    async def bring(self, ino: int, name: bytes | None = None) -> None:
        """Read the rows of an inode, and those of a name in it, into memory (in a thread)."""

        def look_up(get: Get) -> None:
            inos = [ino]
            record = None if name is None else get("dirents", dirent_key(ino, name))
            if record is not None:
                inos.append(unpack_dirent(record).ino)
            for number in inos:
                get("inodes", ino_key(number))
                get("listings", ino_key(number))

        await self._db.residency.bring(look_up)

    def dirent(self, parent: int, name: bytes) -> Dirent | None:
        """Return the inode number that the name refers to; None if it refers to nothing."""
        record = self._db.get("dirents", dirent_key(parent, name))
        try:
            return None if record is None else unpack_dirent(record)
        except BadRecordError:
            return None

    def is_hidden(self, name: bytes) -> bool:
        """Return whether the name may exist though no listing shows it."""
        return self.may_hide is not None and self.may_hide.fullmatch(name) is not None

    def dirents(
        self, parent: int, after: bytes | None = None, *, unlisted: bool = False
    ) -> Iterator[tuple[bytes, Dirent]]:
        """Iterate over the directory's names greater than `after`, in order; with `unlisted`, also
        over those that no listing shows. The iterator is invalid after the next await or write."""
        start = None if after is None else dirent_key(parent, after) + b"\0"
        for key, record in self._db.scan("dirents", ino_key(parent), start):
            try:
                dirent = unpack_dirent(record)
            except BadRecordError:
                continue
            if unlisted or dirent.is_listed:
                yield name_of_key(key), dirent

    def listing(self, ino: int) -> Listing | None:
        """Return the directory's last complete listing; None if there was none."""
        record = self._db.get("listings", ino_key(ino))
        try:
            return None if record is None else unpack_listing(record)
        except BadRecordError:
            return None

    def own_times(self, ino: int) -> OwnTimes | None:
        """Return the times that this mount has set for the inode; None if there are none, and all
        are the mtime."""
        record = self._db.get("times", ino_key(ino))
        try:
            return None if record is None else unpack_times(record)
        except BadRecordError:
            return None

    def is_unnamed(self, ino: int) -> bool:
        """Return whether the inode has lost its name."""
        return self._db.get("orphans", ino_key(ino)) is not None

    def path(self, inode: Inode) -> str:
        """Return the path below the mounted prefix, `""` for the root. Raises `NoPathError`."""
        known = self._dir_paths.get(inode.parent)  # most calls are about files in known directories
        if known is not None and not inode.is_dir and self._has(inode.parent):
            return join(known, inode.name)
        below: dict[int, Inode] = {}
        while (path := self._dir_paths.get(inode.ino)) is None:
            below[inode.ino] = inode
            parent = self.get(inode.parent)
            if parent is None or parent.ino in below:
                raise NoPathError(f"inode {inode.ino} is in no directory any more")
            inode = parent
        for inode in reversed(below.values()):
            path = join(path, inode.name)
            if inode.is_dir:
                if len(self._dir_paths) > 100_000:
                    self._dir_paths = {ROOT_INO: ""}
                self._dir_paths[inode.ino] = path
        return path

    # -- writing -------------------------------------------------------------------------------

    def bind(
        self, parent: int, name: bytes, meta: Found, observed_ns: int
    ) -> tuple[int | None, bool]:
        """Bind the name to this object version or directory, which a look-up that began at
        `observed_ns` has found.

        Return the inode number, and whether the name got a new inode. The number is None if a
        listing that began later didn't show the name. Raises `CacheDirError` if the name needs a
        new number and none can be reserved; so do all `bind...` methods.
        """
        hidden = self.is_hidden(name)
        if self._is_newer(self._listed_at_ns(parent), observed_ns):
            current = self.dirent(parent, name)
            if current is not None or not hidden:
                return (None if current is None else current.ino), False
        ino, is_new = self.bind_seen(
            parent, name, meta, observed_ns, note_check=True, listed=not hidden
        )
        self.found_count += is_new
        return ino, is_new

    def _listed_at_ns(self, ino: int) -> int:
        listing = self.listing(ino)
        return 0 if listing is None else listing.listed_at_ns

    def _is_newer(self, known_ns: int, observed_ns: int) -> bool:
        """Return whether information from `known_ns` is newer than the observation. A time stamp
        from the future never is: the clock was set back after it."""
        return known_ns > observed_ns and known_ns <= self._clock.now_ns()

    def bind_first(self, parent: int, rows: Iterable[FirstName]) -> list[int]:
        """Bind names that refer to nothing so far; the caller has just checked this, without an
        await since. Return the new inode numbers, in the order of `rows`."""
        inodes: dict[bytes, bytes] = {}
        dirents: dict[bytes, bytes] = {}
        inos = []
        for name, is_dir, size_bytes, mtime_ns, version, posix, observed_ns in rows:
            ino = self._numbers.allocate()
            inos.append(ino)
            if is_dir:
                record = pack_inode_of(KIND_DIR, parent, name, 0, coarse_ns(observed_ns), "", posix)
            else:
                record = pack_inode_of(
                    KIND_FILE, parent, name, size_bytes, mtime_ns, version, posix
                )
            inodes[ino_key(ino)] = record
            dirents[dirent_key(parent, name)] = pack_dirent(Dirent(ino, observed_ns))
        self._db.put_all("inodes", inodes)
        self._db.put_all("dirents", dirents)
        self._count_names(parent, len(dirents))
        return inos

    def bind_seen(
        self,
        parent: int,
        name: bytes,
        meta: Found,
        observed_ns: int,
        note_check: bool,
        listed: bool = True,
    ) -> tuple[int | None, bool]:
        """Do the same as `bind` for an entry that a listing or another node has seen. The caller
        has checked that no listing of the directory is newer. The inode number is None if this
        mount has removed the name since.

        Without `note_check`, an unchanged entry costs no write: the listing's row, which
        `finish_listing` puts, has the time at which all were checked. With `listed`, a listing
        shows the name; a name that none has shown before counts as new.
        """
        current = self.dirent(parent, name)
        if self.own and self.own.outranks(parent, name, observed_ns):
            return (None if current is None else current.ino), False
        is_shown = current is not None and current.is_listed
        listed |= is_shown
        if current is not None:
            if self._is_newer(current.checked_at_ns, observed_ns):
                if listed != is_shown:
                    self._put_dirent(parent, name, current._replace(is_listed=True))
                return current.ino, listed != is_shown
            inode = self.child(parent, name, current.ino)
            if inode is not None and _is_same(inode, meta):
                self._note_attributes(inode, meta)
                if note_check or listed != is_shown:
                    self._put_dirent(parent, name, Dirent(current.ino, observed_ns, listed))
                return current.ino, listed != is_shown
        ino = self._numbers.allocate()
        if current is not None:
            self._unbound(parent, name, current.ino)
        else:
            self._count_names(parent, 1)
        if isinstance(meta, ObjectMeta):
            record = pack_inode_of(
                KIND_FILE, parent, name, meta.size_bytes, meta.mtime_ns, meta.version, meta.posix
            )
        else:
            posix, place = meta or Directory()
            made_at_ns = coarse_ns(observed_ns)
            record = pack_inode_of(KIND_DIR, parent, name, 0, made_at_ns, place, posix)
        self._db.put("inodes", ino_key(ino), record)
        self._put_dirent(parent, name, Dirent(ino, observed_ns, listed))
        return ino, True

    def note_root(self, found: Found) -> None:
        """Set owner, group and mode of the root, which no listing shows. If the source is another
        directory than the kernel knows, the root stays as it is, and the origin refuses it."""
        root = self.get(ROOT_INO)
        if root is None or isinstance(found, ObjectMeta):
            return
        place = "" if found is None else found.place
        if not (self._is_successor and root.version and place and root.version != place):
            self._note_attributes(root, found)

    def _note_attributes(self, inode: Inode, found: Found) -> None:
        """Note owner, group and mode, and the place of a directory."""
        posix, version = (NO_POSIX if found is None else found.posix), inode.version
        if isinstance(found, Directory) and found.place:
            version = found.place
        if posix == NO_POSIX and self.own.is_writable:
            posix = inode.posix  # the origin does not tell them; what this mount has set stays
        if (inode.posix, inode.version) != (posix, version):
            self.put(replace(inode, posix=posix, version=version))
        if inode.posix != posix:
            self._on_changed(inode.ino)

    def unbind(self, parent: int, name: bytes, observed_ns: int) -> bool:
        """Unbind the name: a look-up that began at `observed_ns` found that it doesn't exist.
        Return whether this removed a binding."""
        current = self.dirent(parent, name)
        is_listed = current is not None and current.is_listed
        if is_listed and self._is_newer(self._listed_at_ns(parent), observed_ns):
            return False
        return self.unbind_unlisted(parent, name, observed_ns)

    def unbind_unlisted(self, parent: int, name: bytes, observed_ns: int) -> bool:
        """Do the same as `unbind` after a listing that began at `observed_ns`."""
        current = self.dirent(parent, name)
        if current is None or self._is_newer(current.checked_at_ns, observed_ns):
            return False
        if self.own and self.own.outranks(parent, name, observed_ns):
            return False
        self._db.delete("dirents", dirent_key(parent, name))
        self._count_names(parent, -1)
        self._unbound(parent, name, current.ino)
        return True

    # -- changes of this mount (own_changes.py) --------------------------------------------------

    def bind_own(self, kind: int, parent: int, name: bytes, made: Directory, now_ns: int) -> Inode:
        """Bind the name to a new file or directory of this mount, and return its inode; a file has
        no place. Raises `CacheDirError` if no inode number can be reserved."""
        number = self._numbers.allocate()
        inode = Inode(number, kind, parent, name, 0, now_ns, made.place, made.posix)
        self.unbind_own(parent, name)
        self.put(inode)
        self._put_dirent(parent, name, Dirent(inode.ino, now_ns))
        self._count_names(parent, 1)
        self.found_count += 1
        return inode

    def bind_moved(self, inode: Inode, now_ns: int) -> None:
        """Bind the inode, which has no name, to its new name. Paths below it change with it."""
        self.put(inode)
        self._db.delete("orphans", ino_key(inode.ino))
        self._put_dirent(inode.parent, inode.name, Dirent(inode.ino, now_ns))
        self._count_names(inode.parent, 1)
        self.found_count += 1
        if inode.is_dir:
            self._dir_paths = {ROOT_INO: ""}

    def unbind_own(self, parent: int, name: bytes, *, is_moved: bool = False) -> int | None:
        """Unbind a name that this mount has removed, and return its inode number; None if it had
        none. The kernel is not told, because it has asked for this. With `is_moved`, the inode gets
        another name."""
        current = self.dirent(parent, name)
        if current is None:
            return None
        self._db.delete("dirents", dirent_key(parent, name))
        self._count_names(parent, -1)
        self.unbound_count += 1
        if not is_moved:
            self._lose_name(parent, name, current.ino)
        return current.ino

    def note_posix(self, ino: int, posix: Posix) -> None:
        """Note owner, group and mode as the origin has them; `NO_POSIX` changes nothing."""
        inode = self.get(ino)
        if inode is not None and posix not in (NO_POSIX, inode.posix):
            self.put(replace(inode, posix=posix))
            self._on_changed(ino)

    def note_checked(self, parent: int, name: bytes, now_ns: int) -> None:
        """Note that the name refers to its inode at `now_ns`, because this mount has stored it."""
        current = self.dirent(parent, name)
        if current is not None:
            self._put_dirent(parent, name, Dirent(current.ino, now_ns, current.is_listed))

    def put(self, inode: Inode) -> None:
        """Write the inode's row."""
        self._db.put("inodes", ino_key(inode.ino), pack_inode(inode))

    def put_own_times(self, ino: int, times: OwnTimes) -> None:
        """Write the times of an inode that this mount has changed."""
        self._db.put("times", ino_key(ino), pack_times(times))

    # -- listings ----------------------------------------------------------------------------------

    def finish_listing(self, ino: int, listing: Listing) -> None:
        """Note that every name which is still bound in the directory was checked at
        `listed_at_ns`."""
        self._db.put("listings", ino_key(ino), pack_listing(listing))
        self._checked.add(ino)
        if ino in self._miscounted:
            self._miscounted.discard(ino)
            found = sum(1 for _ in self.dirents(ino, unlisted=True))
            if found < listing.entry_count:  # a look-up finds them, and a scan does not
                self._db.note_lost_rows()
            self._count_names(ino, found - self._name_count(ino))

    def forget_listing(self, ino: int) -> None:
        """Note that it is not known which names the directory has."""
        self._db.delete("listings", ino_key(ino))

    def touch(self, ino: int, now_ns: int) -> None:
        """Set the directory's mtime to `now_ns`, or 1 ns later than it was if that is greater: it
        always grows."""
        inode = self.get(ino)
        if inode is not None:
            self.put(replace(inode, mtime_ns=max(now_ns, inode.mtime_ns + 1)))

    # -- names that were lost ----------------------------------------------------------------------

    def _count_names(self, parent: int, more: int) -> None:
        self.change_count += 1
        self._new_names[parent] = self._new_names.get(parent, 0) + more

    def put_name_counts(self) -> None:
        """Write the numbers of names that have changed. They must be stored together with the
        names, so call this before a `write_ahead`."""
        if not self._new_names:
            return
        for ino, more in self._new_names.items():
            inode = self.get(ino) if more else None
            if inode is not None:
                self.put(replace(inode, name_count=max(0, inode.name_count + more)))
        self._new_names.clear()

    def must_have(self, ino: int, count: int) -> bool:
        """Return whether `count` is the number of names that the directory must have."""
        return count == self._name_count(ino) and ino not in self._miscounted

    def _name_count(self, ino: int) -> int:
        inode = self.get(ino)
        return 0 if inode is None else inode.name_count + self._new_names.get(ino, 0)

    async def has_all_names(self, ino: int) -> bool:
        """Return whether the names of a listed directory are all there. If not, forget its listing.

        Only damage can lose names. So a directory that this process has made or listed has all of
        them, and others are read once (in a thread).
        """
        if ino >= self._first_ino or ino in self._checked or self.listing(ino) is None:
            return True
        try:
            is_whole = await self._db.residency.read(partial(_has_all_names, ino), True)
        except CacheDirError:
            is_whole = False
        if not is_whole and ino not in self._checked:
            self.note_lost_names(ino)
        self._checked.add(ino)
        return self.listing(ino) is not None

    def note_lost_names(self, ino: int) -> None:
        """Note that some of the directory's names are lost: it must be listed again."""
        self._db.note_lost_row("dirents")
        self._miscounted.add(ino)
        self.forget_listing(ino)

    def _on_bad_row(self, table: str, key: bytes) -> None:
        if table == "dirents" and len(key) >= _INO_BYTES:
            parent = ino_of_key(key[:_INO_BYTES])
            self._miscounted.add(parent)
            self.forget_listing(parent)
        elif table == "meta":
            self._numbers.store_again()

    def _put_dirent(self, parent: int, name: bytes, dirent: Dirent) -> None:
        self._db.put("dirents", dirent_key(parent, name), pack_dirent(dirent))

    @property
    def bad_rows(self) -> int:
        """The number of rows that counted as missing because of damage."""
        return self._db.bad_rows

    @property
    def is_behind(self) -> bool:
        """See `Database.is_behind`."""
        return self._db.is_behind

    @property
    def next_ino(self) -> int:
        """Names that get a new inode from now on get this number or a greater one."""
        return self._numbers.next_ino

    def _unbound(self, parent: int, name: bytes, ino: int) -> None:
        self.unbound_count += 1
        self._lose_name(parent, name, ino)
        self._on_unbound(parent, name)

    def _lose_name(self, parent: int, name: bytes, ino: int) -> None:
        """Note that the inode has no name any more, unless another name is its own."""
        if self.get(ino) is None or self.child(parent, name, ino) is not None:
            self._note_unnamed(ino)
            for tell in self.on_unnamed:
                tell(ino)

    def _note_unnamed(self, ino: int) -> None:
        self._db.put("orphans", ino_key(ino), b"")

    def purge_unnamed(self) -> int:
        """Delete the records that lost their name before the mount began, and all records below.

        Call this only while no kernel refers to an inode of this table. Return the number of
        deleted records. It is at most 100,000 (about a second); the next start deletes the rest.
        """
        doomed = [ino_of_key(key) for key, _ in self._db.scan("orphans", b"") if len(key) == 8]
        purged = 0
        while doomed and purged < _PURGED_PER_START:
            ino = doomed.pop()
            if ino == ROOT_INO:
                continue  # only in a damaged table: the root never loses its name
            key = ino_key(ino)
            children = list(self._db.scan("dirents", key))
            for child_key, record in children:
                with suppress(BadRecordError):
                    doomed.append(unpack_dirent(record).ino)
                self._db.delete("dirents", child_key)
            for table in ("inodes", "listings", "orphans", "times"):
                self._db.delete(table, key)
            purged += 1
        for ino in doomed:
            self._note_unnamed(ino)
        return purged


def _has_all_names(ino: int, rows: DatabaseSnapshot) -> bool:
    """Return whether the directory has as many names as its record says, and a look-up finds each
    of them. Raises `DamagedDatabaseError`."""
    record = rows.get("inodes", ino_key(ino))
    try:
        wanted = 0 if record is None else unpack_inode(ino, record).name_count
    except BadRecordError:
        return False
    names = rows.scan("dirents", ino_key(ino))
    return sum(rows.get("dirents", key) == value for key, value in names) == wanted


def _is_same(inode: Inode, meta: Found) -> bool:
    if not isinstance(meta, ObjectMeta):
        known, place = inode.version, "" if meta is None else meta.place
        return inode.is_dir and (not known or not place or known == place)
    if inode.is_dir:
        return False
    return (inode.version, inode.size_bytes) == (meta.version, meta.size_bytes)


def join(parent: str, name: bytes) -> str:
    """Return the path of a name in the directory with the path `parent`."""
    text = name.decode("utf-8", "surrogateescape")
    return f"{parent}/{text}" if parent else text
