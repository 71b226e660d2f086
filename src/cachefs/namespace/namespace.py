"""The tree that a mount shows: look-ups, attributes and directory reading.

An answer of the origin is valid for a TTL. After that the origin is asked again, but the old answer
is kept: an unchanged version keeps its inode and its cached bytes. The kernel receives only the
rest of a TTL, so that no change stays unseen for longer than one TTL. While the origin is
unreachable, the last known answers are shown (`outage.py`).
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from cachefs.db import Database
from cachefs.errors import (
    CachefsError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginUnavailableError,
)
from cachefs.format.inode_record import Dirent, Inode
from cachefs.format.object_id import object_id
from cachefs.namespace.absent_names import AbsentNames
from cachefs.namespace.clock import Clock
from cachefs.namespace.directories.directory_validators import DirectoryValidators
from cachefs.namespace.directories.listings import Listings
from cachefs.namespace.directories.snapshot import DirectorySnapshot
from cachefs.namespace.inodes import ROOT_INO, InodeTable, join
from cachefs.namespace.list_or_head import ListOrHead
from cachefs.namespace.outage import STALE_TTL_S, Outage
from cachefs.namespace.shared_look_ups import SharedLookUps
from cachefs.origin.base import Origin
from cachefs.origin.on_behalf import expecting
from cachefs.types import Buffer, Found, ObjectMeta, ObjectRef

log = logging.getLogger(__name__)

NS = 1_000_000_000
_FIRST_PAGE_WAIT_S = 0.5
"""How many seconds a look-up waits for a page that may answer it. A HEAD takes some 0.05 s."""


@dataclass(frozen=True, slots=True)
class Ttls:
    """For how many seconds answers of the origin are valid; `inf` means for ever.

    `stale_if_error_s` is for how many more seconds they are shown while the origin is unreachable.
    """

    attr_s: float
    entry_s: float
    negative_s: float
    list_s: float
    stale_if_error_s: float = 0.0


class LookUpPolicy(Protocol):
    """Decides whether a look-up also fetches the file's bytes, and receives them."""

    def would_bring(self) -> bool:
        """Return whether `may_bring` would return True now."""

    def may_bring(self) -> bool:
        """Return whether the next look-up of an unknown name also asks for the bytes."""

    def note_look_up(self, inode: Inode, ref: ObjectRef | None, data: Buffer | None) -> None:
        """Note that an unknown name was looked up and is this file. `ref` and `data` (all bytes of
        the file) are given if the look-up fetched the bytes, too."""


class Namespace:
    """The names of one mount; see the module docstring. It runs on the loop thread. Methods that
    aren't async are atomic."""

    def __init__(
        self,
        db: Database,
        origin: Origin,
        nursery: trio.Nursery,
        ttls: Ttls,
        clock: Clock | None = None,
        on_unbound: Callable[[int, bytes], None] = lambda parent, name: None,
        on_changed: Callable[[int], None] = lambda ino: None,
        wal_stem: Path | None = None,
        give_way: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        look_up_policy: LookUpPolicy | None = None,
        is_successor: bool = False,
    ) -> None:
        """Set up the names in `db`.

        `on_unbound(parent, name)` is called whenever a name no longer refers to its inode, and
        `on_changed(ino)` when the kernel must ask for an inode's attributes again. They inform the
        kernel, and must not call back. `wal_stem` is the path, without endings, of the write-ahead
        log of answers to the kernel (see `outlive`); by default it is beside the database. A tmpfs
        is best. `give_way` is awaited between two pieces of work for which no request of the kernel
        waits. `look_up_policy` decides whether look-ups also fetch files' bytes. `is_successor`
        means that the kernel has inode numbers from an earlier process.

        Raises `CacheDirError` if the database has another format or belongs to another source."""
        self._db = db
        self.clock = clock or Clock()
        """All times of the namespace come from this clock."""
        self.table = InodeTable(
            db,
            origin.identity,
            self.clock,
            on_unbound,
            on_changed,
            wal_stem,
            is_successor,
            origin.may_hide,
        )
        self._origin = origin
        self._ttls = ttls
        self.outage = Outage(origin, nursery, self.clock, ttls.stale_if_error_s)
        """The present outage of the origin, and whether stale answers are given because of it."""
        list_ttl_ns = ttls.list_s * NS
        self.validators = DirectoryValidators(
            self.table, self.clock, list_ttl_ns, self.outage, on_changed
        )
        self.absent = AbsentNames(self.clock, ttls.negative_s * NS, on_unbound)
        self._listings = Listings(
            self.table,
            origin,
            nursery,
            self.clock,
            list_ttl_ns,
            self.outage,
            self.validators,
            give_way,
            self.absent.note_new,
            self._note_moved,
        )
        self.give_way = give_way
        self._look_up_policy = look_up_policy
        self._nursery = nursery
        self._look_ups = SharedLookUps(nursery, self._observe)
        self._list_or_head = ListOrHead(self.table, origin, self._listings)

    @property
    def ttls(self) -> Ttls:
        """How long answers are valid. It can be changed, but answers that the kernel has received
        keep the TTL that they came with."""
        return self._ttls

    @ttls.setter
    def ttls(self, ttls: Ttls) -> None:
        self._ttls = ttls
        self.outage.set_stale_if_error(ttls.stale_if_error_s)
        self.absent.ttl_ns = ttls.negative_s * NS
        self.validators.list_ttl_ns = ttls.list_s * NS
        self._listings.set_ttl(ttls.list_s * NS)

    # -- attributes ----------------------------------------------------------------------------

    async def observe_root(self) -> None:
        """Get owner and mode of the root, before the mount serves requests. Raises
        `OriginError`."""
        await self._listings.observe_root()

    def outlive(self) -> None:
        """Prepare for a kernel that outlives this process (the relay path) and caches whole
        directories. Does also what `keep_log` does."""
        self.validators.are_shown = True
        self.keep_log()

    def keep_log(self) -> None:
        """From now on the next process gets all changes made before a `write_ahead`. A writable
        mount needs it, too: the spool's files refer to inodes. Call this when the rows from the
        start are committed."""
        self._db.begin_write_ahead_log()

    def write_ahead(self) -> None:
        """Call this before the kernel receives names and attributes: see `Database.write_ahead`."""
        self.table.put_name_counts()
        self._db.write_ahead()

    def inode(self, ino: int) -> Inode:
        """Return the inode. Raises `ObjectChangedError` (ESTALE) if its record is gone."""
        inode = self.table.get(ino)
        if inode is None:
            raise ObjectChangedError(f"inode {ino} no longer exists")
        return inode

    def directory_mtime(self, ino: int, mtime_ns: int) -> tuple[int, float]:
        """Return the mtime, in ns, to show for a directory with the given one (see
        `directory_validators.py`),
        and for how many seconds the kernel may cache its attributes."""
        shown_ns, for_ns = self.validators.of(ino, mtime_ns)
        return shown_ns, min(self._ttls.attr_s, for_ns / NS)

    def object_ref(self, inode: Inode) -> ObjectRef:
        """Return what the cache needs to read this file version. Raises `NoPathError`."""
        meta = ObjectMeta(inode.size_bytes, inode.mtime_ns, inode.version)
        return self.ref_at(self.table.path(inode), meta)

    def ref_at(self, path: str, meta: ObjectMeta) -> ObjectRef:
        """Return what the cache needs to read the version `meta` of the object at `path`."""
        return ObjectRef(object_id(self._origin.identity, path, meta.version), path, meta)

    def source_url(self, inode: Inode) -> str:
        """Return the URL of the object or directory at the origin. Raises `NoPathError`."""
        path = self.table.path(inode)
        return f"{self._origin.url.rstrip('/')}/{path}" if path else self._origin.url

    def unshown_in(self, directory: Inode) -> int:
        """Return how many keys of the directory can't be shown as names, as the last listing since
        the start counted them; 0 if there was none."""
        return self._origin.counters.unshown_in_dir.get(self.table.path(directory), 0)

    # -- look-ups ------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> tuple[Inode, float]:
        """Return the inode of a name, and for how many seconds the kernel may cache it.

        Raises `NotFoundError` (see `negative_ttl_s`), or the origin's error.
        """
        if self.table.is_cold:
            await self.table.bring(parent, name)
        try:
            known = self._known(parent, name)
            if known is None and self.outage.is_on:
                known = self._stale(parent, name)
        except NotFoundError:
            if await self.table.has_all_names(parent):
                raise
            known = None  # damage may have lost it
        if known is None and await self._first_page(parent):
            known = self._known(parent, name)
        if known is not None:
            return known
        try:
            inode = await self._look_ups.ask(parent, name)
        except OriginUnavailableError:
            known = await self._known_in_outage(parent, name)
            if known is None:
                raise
            return known
        # If a listing has bound the name to another inode since, the kernel must not cache this.
        dirent = self.table.dirent(parent, name)
        if dirent is None or dirent.ino != inode.ino:
            return inode, 0.0
        return inode, self.entry_ttl_s(parent, name)

    async def _known_in_outage(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        try:
            return self._known(parent, name) or self._stale(parent, name)
        except NotFoundError:
            if await self.table.has_all_names(parent):
                raise
            return None

    async def _first_page(self, parent: int) -> bool:
        """Wait for the page that answers many look-ups of single names, if one is on its way.

        A look-up that fetches the file does not wait for a LIST: with its answer it would still
        have to fetch the file.
        """
        policy = self._look_up_policy
        only_prefetched = policy is not None and policy.would_bring()
        wait = self._listings.wait_for_first_page
        return await wait(parent, _FIRST_PAGE_WAIT_S, only_prefetched)

    async def find_lost(self, parent: int, name: bytes) -> None:
        """Ask the origin for a name whose inode was lost, so that it gets another one. Does nothing
        if the name does not exist. Raises the origin's error."""
        with suppress(NotFoundError):
            await self._look_ups.ask(parent, name)

    async def lookup_since(self, parent: int, name: bytes, since_ns: int) -> Inode:
        """Return the inode of a name, from an answer of the origin at `since_ns` or later.

        Raises the same errors as `lookup`. In an outage it raises `OriginUnavailableError` even if
        an older answer is known.
        """
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            listing = self.table.listing(parent)
            is_listed = listing is not None and dirent.is_listed
            listed_at_ns = listing.listed_at_ns if listing and is_listed else 0
            if max(dirent.checked_at_ns, listed_at_ns) >= since_ns:
                inode = self.table.child(parent, name, dirent.ino)
                if inode is not None:
                    return inode
        return await self._look_ups.ask(parent, name)

    def _known(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        """Return the answer if a fresh one is known. Raises `NotFoundError` if the name is known
        to be absent."""
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            remaining_ns = self._dirent_remaining_ns(parent, dirent)
            if self.table.own.holds(parent, name):
                remaining_ns = self._ttls.entry_s * NS
            if remaining_ns <= 0:
                return None
            inode = self.table.child(parent, name, dirent.ino)
            return None if inode is None else (inode, remaining_ns / NS)
        if (self._absent_ns(parent, name) or 0) > 0:
            raise NotFoundError("no such file or directory")
        return None

    def _stale(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        """Return the answer for an outage, if one is known that may still be shown.

        Raises `NotFoundError` if the name is known to be absent: look-ups must agree with the
        stale listing, which is shown, too.
        """
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            inode = self.table.child(parent, name, dirent.ino)
            if inode is None or not self.outage.may_show(self._dirent_remaining_ns(parent, dirent)):
                return None
            self.outage.note_shown()
            return inode, self._stale_ttl_s(self._ttls.entry_s)
        remaining_ns = self._absent_ns(parent, name)
        if remaining_ns is None or not self.outage.may_show(remaining_ns):
            return None
        self.outage.note_shown()
        raise NotFoundError("no such file or directory")

    def _absent_ns(self, parent: int, name: bytes) -> float | None:
        """Do `AbsentNames.remaining_ns`. A listing says nothing of a name that it may not show."""
        is_hidden = self.table.is_hidden(name)
        listed_ns = None if is_hidden else self._listings.remaining_ns(parent)
        return self.absent.remaining_ns(parent, name, listed_ns)

    def _stale_ttl_s(self, ttl_s: float) -> float:
        return min(STALE_TTL_S, ttl_s)

    def _dirent_remaining_ns(self, parent: int, dirent: Dirent) -> float:
        """Return the ns until the dirent expires; negative if it has expired."""
        remaining_ns = self.clock.remaining_ns(dirent.checked_at_ns, self._ttls.entry_s * NS)
        if remaining_ns > 0 or not dirent.is_listed:
            return remaining_ns
        listing = self.table.listing(parent)
        if listing is None:
            return remaining_ns
        listed_ns = self.clock.remaining_ns(listing.listed_at_ns, self._ttls.entry_s * NS)
        return max(remaining_ns, listed_ns)

    def entry_ttl_s(self, parent: int, name: bytes) -> float:
        """Return for how many more seconds the name's inode is valid; 0 if the origin must be
        asked."""
        dirent = self.table.dirent(parent, name)
        if dirent is None:
            return 0.0
        return max(0.0, self._dirent_remaining_ns(parent, dirent) / NS)

    def snapshot_ttl_s(self, snapshot: DirectorySnapshot) -> float:
        """Return for how many more seconds the kernel may cache the names of a snapshot with the
        inodes from `listed_ino`."""
        remaining_ns = self.clock.remaining_ns(snapshot.as_of_ns, self._ttls.entry_s * NS)
        return self._shown_s(remaining_ns, self._ttls.entry_s)

    def _shown_s(self, remaining_ns: float, ttl_s: float) -> float:
        if remaining_ns > 0:
            return remaining_ns / NS
        if self.outage.is_on and self.outage.may_show(remaining_ns):
            return self._stale_ttl_s(ttl_s)
        return 0.0

    def listed_ino(
        self, parent: int, name: bytes, ino: int, snapshot: DirectorySnapshot
    ) -> int | None:
        """Return the inode that the name of a snapshot's entry refers to now; None if to nothing.

        The kernel caches directory entries like look-ups, so it must never receive an inode that
        was replaced after the snapshot was taken.
        """
        if snapshot.unbound_count == self.table.unbound_count:
            return ino
        dirent = self.table.dirent(parent, name)
        return None if dirent is None else dirent.ino

    def negative_ttl_s(self, parent: int, name: bytes) -> float:
        """Return for how many more seconds the kernel may cache that the name doesn't exist; 0 if
        it may exist. The caller passes this to the kernel, so the name is noted as cached there."""
        if self.table.dirent(parent, name) is not None:
            return 0.0
        remaining_ns = self._absent_ns(parent, name)
        if remaining_ns is None:
            return 0.0
        self.absent.note_cached(parent, name)
        return self._shown_s(remaining_ns, self._ttls.negative_s)

    async def _observe(self, parent: int, name: bytes) -> Inode:
        directory = self.inode(parent)
        if not directory.is_dir:
            raise NotADirError("not a directory")
        self._list_or_head.note_head(directory)
        observed_ns = self.clock.now_ns()
        # A known name is looked up again because its TTL has ended. Its bytes are mostly cached.
        is_unknown = self.table.dirent(parent, name) is None
        try:
            with self.outage.asking(), expecting(self.places(directory)):
                meta, data = await self._ask_origin(directory, name, is_unknown)
        except NotFoundError:
            self._note_absent(parent, name, observed_ns)
            self._list_or_head.note_absent(directory)
            raise
        except ObjectChangedError:
            await self.note_object_changed(directory)
            raise
        ino, changed = self.table.bind(parent, name, meta, observed_ns)
        if ino is None:
            raise NotFoundError("no such file or directory")
        self.absent.drop(parent, name)
        dirent = self.table.dirent(parent, name)
        if changed and (dirent is None or dirent.is_listed):
            self._listings.note_change(parent)
        inode = self.inode(ino)
        if self._look_up_policy is not None and is_unknown and not inode.is_dir:
            is_it = isinstance(meta, ObjectMeta) and meta.version == inode.version
            ref = self.object_ref(inode) if data is not None and is_it else None
            self._look_up_policy.note_look_up(inode, ref, data)
        return inode

    async def _ask_origin(
        self, directory: Inode, name: bytes, is_unknown: bool
    ) -> tuple[Found, Buffer | None]:
        """Return what the name is, and the bytes of a small file if the look-up fetched them."""
        path = join(self.table.path(directory), name)
        log.debug("%r: the origin is asked what it is", path)
        if is_unknown and self._look_up_policy is not None and self._look_up_policy.may_bring():
            return await self._origin.stat_and_read(path)
        return await self._origin.stat(path), None

    def _note_absent(self, parent: int, name: bytes, observed_ns: int) -> None:
        dirent = self.table.dirent(parent, name)
        if self.table.unbind(parent, name, observed_ns) and (dirent is None or dirent.is_listed):
            self._listings.note_change(parent)
        self._listings.note_absence(parent)
        self.absent.note(parent, name, observed_ns)

    # -- directories ---------------------------------------------------------------------------

    def places(self, *directories: Inode) -> dict[str, str]:
        """Return the places of directories by path: what the kernel was told of. The others are
        left out: nothing is known of them. Raises `NoPathError`."""
        return {self.table.path(each): each.version for each in directories if each.version}

    def _note_moved(self, ino: int) -> None:
        """Note that the origin has another directory at the path of this one."""
        directory = self.table.get(ino)
        if directory is not None:
            self._nursery.start_soon(self.note_object_changed, directory)

    def open_directory(self, ino: int) -> DirectorySnapshot:
        """Return the entries of the directory for a reader that begins now. Raises
        `NotADirError` or `ObjectChangedError`."""
        return self._listings.open(self._directory(ino))

    async def listed_since(self, ino: int, since_ns: int) -> DirectorySnapshot:
        """Return all entries of the directory, listed at `since_ns` or later.

        Raises the listing's error. In an outage it raises `OriginUnavailableError` even if an
        older listing is known.
        """
        snapshot = await self.list_since(ino, since_ns)
        await snapshot.wait_for_end()
        if snapshot.error is None:
            self.check_listed_since(snapshot, since_ns)
        await snapshot.has(len(snapshot))  # raises the error of a failed listing
        return snapshot

    async def list_since(self, ino: int, since_ns: int) -> DirectorySnapshot:
        """Return the same as `listed_since`, perhaps while entries still arrive. After it has ended
        without an error, call `check_listed_since`."""
        return await self._listings.open_since(self._directory(ino), since_ns)

    def check_listed_since(self, snapshot: DirectorySnapshot, since_ns: int) -> None:
        """Raise `OriginUnavailableError` if, in an outage, the listing is older than `since_ns`."""
        if snapshot.as_of_ns < since_ns:
            raise OriginUnavailableError(self.outage.reason or "the origin does not answer")

    def resume_directory(self, ino: int, generation: int) -> DirectorySnapshot:
        """Return the snapshot with which a reader began: see `Listings.resume`."""
        return self._listings.resume(self._directory(ino), generation)

    def _directory(self, ino: int) -> Inode:
        inode = self.inode(ino)
        if not inode.is_dir:
            raise NotADirError("not a directory")
        return inode

    async def note_object_changed(self, inode: Inode) -> None:
        """Look a file or directory up again after the origin was found to have another one at its
        path.

        The caller awaits this before the reader gets its error. The reader's next open then gets
        the new one, without waiting for a TTL.
        """
        dirent = self.table.dirent(inode.parent, inode.name)
        if dirent is not None and dirent.ino == inode.ino:
            with suppress(CachefsError):
                await self._look_ups.ask(inode.parent, inode.name)


__all__ = ["ROOT_INO", "Namespace", "Ttls"]
