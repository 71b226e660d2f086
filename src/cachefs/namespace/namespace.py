"""The tree that a mount shows: look-ups, attributes and directory reading.

An answer of the origin is valid for a TTL. After that the origin is asked again, but the old answer
is kept: an unchanged version keeps its inode and its cached bytes. The kernel receives only the
rest of a TTL, so that no change stays unseen for longer than one TTL. While the origin is
unreachable, the last known answers are shown (`outage.py`).
"""

import logging
import math
from collections import OrderedDict
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
from cachefs.namespace.clock import Clock
from cachefs.namespace.directory_validators import DirectoryValidators
from cachefs.namespace.inodes import ROOT_INO, InodeTable, join
from cachefs.namespace.listings import Listings
from cachefs.namespace.outage import STALE_TTL_S, Outage, StaleState
from cachefs.namespace.snapshot import DirectorySnapshot
from cachefs.origin.base import Origin
from cachefs.types import Buffer, Found, ObjectMeta, ObjectRef

log = logging.getLogger(__name__)

NS = 1_000_000_000
_NEGATIVES = 100_000
"""The most absent names kept, about 20 MB. The oldest are dropped first."""
_LIST_PAGE_ENTRIES = 1_000
_HEADS_PER_LIST = 8
"""The number of HEADs after which a LIST of one page is worth its price. S3 charges 12.5 times as
much for a LIST as for a HEAD; one page answers up to 1,000 HEADs."""
_HEAD_COUNTS = 100_000
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


class _Asking:
    """One request to the origin that several look-ups may wait for."""

    __slots__ = ("done", "error", "inode")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: CachefsError | None = None
        self.inode: Inode | None = None


class LookUpPolicy(Protocol):
    """Decides whether a look-up also fetches the file's bytes, and receives them."""

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
        self._clock = clock or Clock()
        self.table = InodeTable(
            db, origin.identity, self._clock, on_unbound, on_changed, wal_stem, is_successor
        )
        self._origin = origin
        self._nursery = nursery
        self._ttls = ttls
        self._outage = Outage(origin, nursery, self._clock, ttls.stale_if_error_s)
        list_ttl_ns = ttls.list_s * NS
        self.validators = DirectoryValidators(
            self.table, self._clock, list_ttl_ns, self._outage, on_changed
        )
        self._listings = Listings(
            self.table,
            origin,
            nursery,
            self._clock,
            list_ttl_ns,
            self._outage,
            self.validators,
            give_way,
            self._note_new,
        )
        self.give_way = give_way
        self._look_up_policy = look_up_policy
        self._asking: dict[tuple[int, bytes], _Asking] = {}
        self._negatives: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._told_absent: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """Names that the kernel caches as absent, for a TTL; `_note_new` invalidates them."""
        self._on_unbound = on_unbound
        self._heads_since_listing: dict[int, int] = {}

    @property
    def ttls(self) -> Ttls:
        """How long answers are valid. It can be changed, but answers that the kernel has received
        keep the TTL that they came with."""
        return self._ttls

    @ttls.setter
    def ttls(self, ttls: Ttls) -> None:
        self._ttls = ttls
        self._outage.set_stale_if_error(ttls.stale_if_error_s)
        self.validators.list_ttl_ns = ttls.list_s * NS
        self._listings.set_ttl(ttls.list_s * NS)

    # -- attributes ----------------------------------------------------------------------------

    async def observe_root(self) -> None:
        """Get owner and mode of the root, before the mount serves requests. Raises
        `OriginError`."""
        await self._listings.observe_root()

    def now_ns(self) -> int:
        """Return the time, in ns, of the clock that all time stamps here come from."""
        return self._clock.now_ns()

    @property
    def clock(self) -> Clock:
        return self._clock

    def outlive(self) -> None:
        """Prepare for a kernel that outlives this process (the relay path) and caches whole
        directories. From now on the next process gets all changes made before a `write_ahead`. Call
        this when the rows from the start are committed."""
        self.validators.are_shown = True
        self._db.begin_write_ahead_log()

    def write_ahead(self) -> None:
        """Call this before the kernel receives names and attributes: see `Database.write_ahead`."""
        self._db.write_ahead()

    def begin_outage(self, error: OriginUnavailableError) -> None:
        """Begin an outage with this error, as the origin is already unreachable: requests then
        don't wait for their own error."""
        self._outage.begin(error)

    def inode(self, ino: int) -> Inode:
        """Return the inode. Raises `ObjectChangedError` (ESTALE) if its record is gone."""
        inode = self.table.get(ino)
        if inode is None:
            raise ObjectChangedError(f"inode {ino} no longer exists")
        return inode

    @property
    def attr_ttl_s(self) -> float:
        return self._ttls.attr_s

    def directory_mtime(self, ino: int, mtime_ns: int) -> tuple[int, float]:
        """Return the mtime, in ns, to show for a directory with the given one (see
        `directory_validators.py`),
        and for how many seconds the kernel may cache its attributes."""
        shown_ns, for_ns = self.validators.of(ino, mtime_ns)
        return shown_ns, min(self._ttls.attr_s, for_ns / NS)

    @property
    def stale_state(self) -> StaleState:
        """Whether, and since when, stale answers are given because the origin is unreachable."""
        return self._outage.state

    def object_ref(self, inode: Inode) -> ObjectRef:
        """Return what the cache needs to read this file version. Raises `NoPathError`."""
        path = self.table.path(inode)
        meta = ObjectMeta(inode.size_bytes, inode.mtime_ns, inode.version)
        return ObjectRef(object_id(self._origin.identity, path, inode.version), path, meta)

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
        known = self._known(parent, name)
        if known is None and self._outage.is_on:
            known = self._stale(parent, name)
        if known is None and await self._listings.wait_for_first_page(parent, _FIRST_PAGE_WAIT_S):
            known = self._known(parent, name)
        if known is not None:
            return known
        try:
            inode = await self._ask(parent, name)
        except OriginUnavailableError:
            known = self._known(parent, name) or self._stale(parent, name)
            if known is None:
                raise
            return known
        # If a listing has bound the name to another inode since, the kernel must not cache this.
        dirent = self.table.dirent(parent, name)
        if dirent is None or dirent.ino != inode.ino:
            return inode, 0.0
        return inode, self.entry_ttl_s(parent, name)

    async def lookup_since(self, parent: int, name: bytes, since_ns: int) -> Inode:
        """Return the inode of a name, from an answer of the origin at `since_ns` or later.

        Raises the same errors as `lookup`. In an outage it raises `OriginUnavailableError` even if
        an older answer is known.
        """
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            listing = self.table.listing(parent)
            listed_at_ns = 0 if listing is None else listing.listed_at_ns
            if max(dirent.checked_at_ns, listed_at_ns) >= since_ns:
                return self.inode(dirent.ino)
        return await self._ask(parent, name)

    def _known(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        """Return the answer if a fresh one is known. Raises `NotFoundError` if the name is known
        to be absent."""
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            remaining_ns = self._dirent_remaining_ns(parent, dirent)
            if remaining_ns <= 0:
                return None
            inode = self.table.get(dirent.ino)
            return None if inode is None else (inode, remaining_ns / NS)
        if (self._absence_remaining_ns(parent, name) or 0) > 0:
            raise NotFoundError("no such file or directory")
        return None

    def _stale(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        """Return the answer for an outage, if one is known that may still be shown.

        Raises `NotFoundError` if the name is known to be absent: look-ups must agree with the
        stale listing, which is shown, too.
        """
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            inode = self.table.get(dirent.ino)
            if inode is None or not self._outage.may_show(
                self._dirent_remaining_ns(parent, dirent)
            ):
                return None
            self._outage.note_shown()
            return inode, self._stale_ttl_s(self._ttls.entry_s)
        remaining_ns = self._absence_remaining_ns(parent, name)
        if remaining_ns is None or not self._outage.may_show(remaining_ns):
            return None
        self._outage.note_shown()
        raise NotFoundError("no such file or directory")

    def _stale_ttl_s(self, ttl_s: float) -> float:
        return min(STALE_TTL_S, ttl_s)

    def _dirent_remaining_ns(self, parent: int, dirent: Dirent) -> float:
        """Return the ns until the dirent expires; negative if it has expired."""
        remaining_ns = self._clock.remaining_ns(dirent.checked_at_ns, self._ttls.entry_s * NS)
        if remaining_ns > 0:
            return remaining_ns
        listing = self.table.listing(parent)
        if listing is None:
            return remaining_ns
        listed_ns = self._clock.remaining_ns(listing.listed_at_ns, self._ttls.entry_s * NS)
        return max(remaining_ns, listed_ns)

    def _absence_remaining_ns(self, parent: int, name: bytes) -> float | None:
        """Return the ns until a name's absence expires; negative if it has expired. None if no
        look-up or listing has found it absent, as far as is known."""
        since_ns = self._negatives.get((parent, name))
        listed_ns = self._listings.remaining_ns(parent)
        if since_ns is None and listed_ns is None:
            return None
        remaining_ns = -math.inf
        if since_ns is not None:
            remaining_ns = self._clock.remaining_ns(since_ns, self._ttls.negative_s * NS)
        if listed_ns is not None:
            remaining_ns = max(remaining_ns, min(listed_ns, self._ttls.negative_s * NS))
        return remaining_ns

    def absent_at_ns(self, parent: int, name: bytes) -> int:
        """Return when a look-up last found that there is no such name (ns); 0 if none did."""
        return self._negatives.get((parent, name), 0)

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
        remaining_ns = self._clock.remaining_ns(snapshot.as_of_ns, self._ttls.entry_s * NS)
        return self._shown_s(remaining_ns, self._ttls.entry_s)

    def _shown_s(self, remaining_ns: float, ttl_s: float) -> float:
        if remaining_ns > 0:
            return remaining_ns / NS
        if self._outage.is_on and self._outage.may_show(remaining_ns):
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
        remaining_ns = self._absence_remaining_ns(parent, name)
        if remaining_ns is None:
            return 0.0
        self._told_absent[parent, name] = None
        if len(self._told_absent) > _NEGATIVES:
            self._told_absent.popitem(last=False)
        return self._shown_s(remaining_ns, self._ttls.negative_s)

    def _note_new(self, parent: int, name: bytes) -> None:
        """Note that a listing shows a new name: if the kernel caches it as absent, invalidate
        that."""
        if (parent, name) in self._told_absent:
            del self._told_absent[parent, name]
            self._on_unbound(parent, name)

    async def _ask(self, parent: int, name: bytes) -> Inode:
        """Ask the origin for a name. Concurrent look-ups share one request, which continues even
        if some of them are cancelled."""
        key = (parent, name)
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = _Asking()
            self._nursery.start_soon(self._run_asking, key, asking)
        await asking.done.wait()
        if asking.error is not None:
            raise type(asking.error)(str(asking.error))
        assert asking.inode is not None
        return asking.inode

    async def _run_asking(self, key: tuple[int, bytes], asking: _Asking) -> None:
        try:
            asking.inode = await self._observe(*key)
        except CachefsError as error:
            asking.error = error
        except Exception:
            # A bug here gives an error to the waiting look-ups, but must not end the mount.
            log.exception("bug while looking up %r in inode %d", key[1], key[0])
        finally:
            # However this ended, no look-up may wait for ever.
            if asking.inode is None and asking.error is None:
                asking.error = CachefsError("the look-up was broken off")
            del self._asking[key]
            asking.done.set()

    async def _observe(self, parent: int, name: bytes) -> Inode:
        directory = self.inode(parent)
        if not directory.is_dir:
            raise NotADirError("not a directory")
        self._list_if_cheaper(directory)
        observed_ns = self._clock.now_ns()
        # A known name is looked up again because its TTL has ended. Its bytes are mostly cached.
        is_unknown = self.table.dirent(parent, name) is None
        try:
            with self._outage.asking():
                meta, data = await self._ask_origin(directory, name, is_unknown)
        except NotFoundError:
            self._note_absent(parent, name, observed_ns)
            self._list_if_absent(directory)
            raise
        ino, changed = self.table.bind(parent, name, meta, observed_ns)
        if ino is None:
            raise NotFoundError("no such file or directory")
        self._negatives.pop((parent, name), None)
        if changed:
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
        if self.table.unbind(parent, name, observed_ns):
            self._listings.note_change(parent)
        self._listings.note_absence(parent)
        self._negatives[(parent, name)] = observed_ns
        if len(self._negatives) > _NEGATIVES:
            self._negatives.popitem(last=False)

    def _list_if_cheaper(self, directory: Inode) -> None:
        """List the directory if HEADs of single names have cost as much as a listing of it.

        The length of a new directory's listing is unknown: after 8 look-ups one page is listed,
        after 32 three more, and so on. So a reader of whole directories soon needs no HEADs, and a
        reader of a few files in huge directories pays for about one LIST more per 8 HEADs.
        """
        if self._origin.lists_by_stat:
            return
        ino = directory.ino
        if len(self._heads_since_listing) > _HEAD_COUNTS:
            self._heads_since_listing.clear()
        asked = self._heads_since_listing[ino] = self._heads_since_listing.get(ino, 0) + 1
        listing = self.table.listing(ino)
        if listing is not None:
            if asked > 1 + listing.entry_count // _LIST_PAGE_ENTRIES:
                del self._heads_since_listing[ino]
                self._listings.refresh(directory)
        elif asked % _HEADS_PER_LIST == 0 and _is_power_of_four(asked // _HEADS_PER_LIST):
            self._listings.list_bounded(directory, asked // _HEADS_PER_LIST)

    def _list_if_absent(self, directory: Inode) -> None:
        """List one page of the directory after the first absent name in it.

        To find that a name is absent costs a LIST, too. A reader often looks for several absent
        names (Python tries each suffix that a module may have), and one page is mostly the whole
        directory.
        """
        ino = directory.ino
        asked = self._heads_since_listing.get(ino, 0)
        if self._origin.lists_by_stat or asked >= _HEADS_PER_LIST:
            return
        if self.table.listing(ino) is None:
            self._heads_since_listing[ino] = _HEADS_PER_LIST
            self._listings.list_bounded(directory, 1)

    # -- directories ---------------------------------------------------------------------------

    def open_directory(self, ino: int) -> DirectorySnapshot:
        """Return the entries of the directory for a reader that begins now. Raises
        `NotADirError` or `ObjectChangedError`."""
        return self._listings.open(self._directory(ino))

    async def listed_since(self, ino: int, since_ns: int) -> DirectorySnapshot:
        """Return all entries of the directory, listed at `since_ns` or later.

        Raises the listing's error. In an outage it raises `OriginUnavailableError` even if an
        older listing is known.
        """
        snapshot = await self._listings.open_since(self._directory(ino), since_ns)
        await snapshot.wait_for_end()
        if snapshot.error is None and snapshot.as_of_ns < since_ns:
            raise OriginUnavailableError("the origin does not answer")
        await snapshot.has(len(snapshot))  # raises the error of a failed listing
        return snapshot

    def resume_directory(self, ino: int, generation: int) -> DirectorySnapshot:
        """Return the snapshot with which a reader began: see `Listings.resume`."""
        return self._listings.resume(self._directory(ino), generation)

    def _directory(self, ino: int) -> Inode:
        inode = self.inode(ino)
        if not inode.is_dir:
            raise NotADirError("not a directory")
        return inode

    async def note_object_changed(self, inode: Inode) -> None:
        """Look the file up again after a read found that the origin has another version.

        The caller awaits this before the reader gets its error. The reader's next open then gets
        the new version, without waiting for a TTL.
        """
        dirent = self.table.dirent(inode.parent, inode.name)
        if dirent is not None and dirent.ino == inode.ino:
            with suppress(CachefsError):
                await self._ask(inode.parent, inode.name)


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


__all__ = ["ROOT_INO", "Namespace", "Ttls"]
