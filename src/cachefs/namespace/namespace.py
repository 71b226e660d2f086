"""The tree that a mount shows: look-ups, attributes and directory reading.

What the origin said is believed for a TTL and then asked again, never forgotten: an unchanged
version keeps its inode and its cached bytes. The kernel is given only what remains of a TTL, so
that no change stays unseen for longer than one TTL. While the origin can't be asked, what was
known goes on being shown (`outage.py`).
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
from cachefs.namespace.inodes import ROOT_INO, InodeTable, join
from cachefs.namespace.listings import Listings
from cachefs.namespace.outage import STALE_TTL_S, Outage, StaleState
from cachefs.namespace.snapshot import Snapshot
from cachefs.namespace.stamps import Stamps
from cachefs.origin.base import Origin
from cachefs.types import Buffer, Found, ObjectMeta, ObjectRef

log = logging.getLogger(__name__)

NS = 1_000_000_000
_NEGATIVES = 100_000
"""Names remembered to be absent, about 20 MB; the oldest go first."""
_LIST_PAGE_ENTRIES = 1_000
_HEADS_PER_LIST = 8
"""What a LIST of a page may cost in HEADs. S3 charges 12.5 times as much; a page answers up to
1,000 of them."""
_HEAD_COUNTS = 100_000
_PROBE_S = 0.5
"""How long a look-up waits for a page that may answer it: a HEAD takes some 0.05."""


@dataclass(frozen=True, slots=True)
class Ttls:
    """How long answers of the origin are believed, in seconds; `inf` is for ever.

    `stale_if_error_s` is for how much longer they are shown while the origin can't be asked.
    """

    attr_s: float
    entry_s: float
    negative_s: float
    list_s: float
    stale_if_error_s: float = 0.0


class _Asking:
    """One question to the origin that several look-ups may wait for."""

    __slots__ = ("done", "error", "inode")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: CachefsError | None = None
        self.inode: Inode | None = None


class LookUpReads(Protocol):
    """Who decides whether a look-up brings the file's bytes along."""

    def may_bring(self) -> bool:
        """Whether the next look-up of an unknown name asks for the bytes, too."""

    def note_look_up(self, inode: Inode, ref: ObjectRef | None, data: Buffer | None) -> None:
        """A name was asked for and is this inode; `ref` and `data` are a whole file's."""


class Namespace:
    """See the module docstring. Runs on the loop thread; only methods marked async await."""

    def __init__(
        self,
        db: Database,
        origin: Origin,
        nursery: trio.Nursery,
        ttls: Ttls,
        clock: Clock | None = None,
        on_unbound: Callable[[int, bytes], None] = lambda parent, name: None,
        on_changed: Callable[[int], None] = lambda ino: None,
        journal: Path | None = None,
        give_way: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        reads: LookUpReads | None = None,
        is_successor: bool = False,
    ) -> None:
        """`on_unbound(parent, name)` is told whenever a name stops standing for its inode, and
        `on_changed(ino)` when an inode has another owner, group or mode, so that the kernel can
        be told; they must not call back. `journal` is where what was told to the kernel is kept
        (see `outlive`), less an ending; by default beside the database. A tmpfs is best.
        `give_way` is awaited between two pieces of work for which no request of the kernel waits.
        `reads` decides whether look-ups bring the bytes of files along. `is_successor`: the kernel
        knows inode numbers that another process has given out.

        Raises `CacheDirError` when the database is of another format or another source."""
        self._db = db
        self._clock = clock or Clock()
        self.table = InodeTable(
            db, origin.identity, self._clock, on_unbound, on_changed, journal, is_successor
        )
        self._origin = origin
        self._nursery = nursery
        self._ttls = ttls
        self._outage = Outage(origin, nursery, self._clock, ttls.stale_if_error_s)
        list_ttl_ns = ttls.list_s * NS
        self.stamps = Stamps(self.table, self._clock, list_ttl_ns, self._outage, on_changed)
        self._listings = Listings(
            self.table,
            origin,
            nursery,
            self._clock,
            list_ttl_ns,
            self._outage,
            self.stamps,
            give_way,
            self._note_new,
        )
        self.give_way = give_way
        self._reads = reads
        self._asking: dict[tuple[int, bytes], _Asking] = {}
        self._negatives: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._told_absent: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """Names of which the kernel was told that they do not exist; it believes that for a TTL."""
        self._on_unbound = on_unbound
        self._heads_since_listing: dict[int, int] = {}

    @property
    def ttls(self) -> Ttls:
        """How long answers are believed; can be changed. What the kernel was told before holds for
        as long as it was told."""
        return self._ttls

    @ttls.setter
    def ttls(self, ttls: Ttls) -> None:
        self._ttls = ttls
        self._outage.set_patience(ttls.stale_if_error_s)
        self.stamps.list_ttl_ns = ttls.list_s * NS
        self._listings.set_ttl(ttls.list_s * NS)

    # -- attributes ----------------------------------------------------------------------------

    async def observe_root(self) -> None:
        """Learn who owns the root, before anybody is let in. Raises `OriginError`."""
        await self._listings.observe_root()

    def now_ns(self) -> int:
        """The clock by which everything here is dated."""
        return self._clock.now_ns()

    @property
    def clock(self) -> Clock:
        return self._clock

    def outlive(self) -> None:
        """The kernel will outlive this process: it keeps whole directories, and what it has been
        told after `settle` is known to the next process. To be called when what was found at the
        start has been committed."""
        self.stamps.are_shown = True
        self._db.begin_journal()

    def settle(self) -> None:
        """To be called before the kernel is told of names and attributes."""
        self._db.settle()

    def begin_outage(self, error: OriginUnavailableError) -> None:
        """The origin is away already, with this: nobody need wait to find out."""
        self._outage.begin(error)

    def inode(self, ino: int) -> Inode:
        """Raises `ObjectChangedError` for a number whose record is gone (ESTALE)."""
        inode = self.table.get(ino)
        if inode is None:
            raise ObjectChangedError(f"inode {ino} no longer exists")
        return inode

    @property
    def attr_ttl_s(self) -> float:
        return self._ttls.attr_s

    def directory_mtime(self, ino: int, mtime_ns: int) -> tuple[int, float]:
        """What a directory of this mtime is shown with (see `stamps.py`), and for how many seconds
        its attributes may be believed."""
        shown_ns, for_ns = self.stamps.of(ino, mtime_ns)
        return shown_ns, min(self._ttls.attr_s, for_ns / NS)

    @property
    def stale_state(self) -> StaleState:
        """Whether, and since when, stale answers are given for want of an origin."""
        return self._outage.state

    def object_ref(self, inode: Inode) -> ObjectRef:
        """What the cache needs to read this file version."""
        path = self.table.path(inode)
        meta = ObjectMeta(inode.size_bytes, inode.mtime_ns, inode.version)
        return ObjectRef(object_id(self._origin.identity, path, inode.version), path, meta)

    def source_url(self, inode: Inode) -> str:
        path = self.table.path(inode)
        return f"{self._origin.url.rstrip('/')}/{path}" if path else self._origin.url

    def unshown_in(self, directory: Inode) -> int:
        """Keys of a directory that can't be shown as names, if it was listed since the start."""
        return self._origin.counters.unshown.get(self.table.path(directory), 0)

    # -- look-ups ------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> tuple[Inode, float]:
        """The inode of a name and for how many seconds the kernel may believe it.

        Raises `NotFoundError` (see `negative_ttl_s`) or what the origin raised.
        """
        if self.table.is_cold:
            await self.table.bring(parent, name)
        known = self._known(parent, name)
        if known is None and self._outage.is_on:
            known = self._stale(parent, name)
        if known is None and await self._listings.end_of_probe(parent, _PROBE_S):
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
        # A listing may have bound the name anew since: then nobody may believe this for long.
        dirent = self.table.dirent(parent, name)
        if dirent is None or dirent.ino != inode.ino:
            return inode, 0.0
        return inode, self.entry_ttl_s(parent, name)

    async def lookup_since(self, parent: int, name: bytes, since_ns: int) -> Inode:
        """The inode of a name as the origin has said at `since_ns` or later. Raises as `lookup`;
        `OriginUnavailableError` in an outage, whatever is known."""
        dirent = self.table.dirent(parent, name)
        if dirent is not None:
            listing = self.table.listing(parent)
            listed_at_ns = 0 if listing is None else listing.listed_at_ns
            if max(dirent.checked_at_ns, listed_at_ns) >= since_ns:
                return self.inode(dirent.ino)
        return await self._ask(parent, name)

    def _known(self, parent: int, name: bytes) -> tuple[Inode, float] | None:
        """The answer, if what is known is fresh. Raises `NotFoundError` for known absence."""
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
        """The answer for an outage, if something is known that may still be shown. Raises
        `NotFoundError` for known absence: a stale listing is shown, and must not be belied."""
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
        """Less than 0 for how long it has expired."""
        remaining_ns = self._clock.remaining_ns(dirent.checked_at_ns, self._ttls.entry_s * NS)
        if remaining_ns > 0:
            return remaining_ns
        listing = self.table.listing(parent)
        if listing is None:
            return remaining_ns
        listed_ns = self._clock.remaining_ns(listing.listed_at_ns, self._ttls.entry_s * NS)
        return max(remaining_ns, listed_ns)

    def _absence_remaining_ns(self, parent: int, name: bytes) -> float | None:
        """The same for a name that stands for nothing; None if it may never have been asked."""
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
        """When a look-up last found that there is no such name; 0 if none did."""
        return self._negatives.get((parent, name), 0)

    def entry_ttl_s(self, parent: int, name: bytes) -> float:
        """For how many seconds more the name stands for its inode; 0 if that must be asked."""
        dirent = self.table.dirent(parent, name)
        if dirent is None:
            return 0.0
        return max(0.0, self._dirent_remaining_ns(parent, dirent) / NS)

    def snapshot_ttl_s(self, snapshot: Snapshot) -> float:
        """For how many seconds more the kernel may believe the names that a snapshot gives by
        `listed_ino`."""
        remaining_ns = self._clock.remaining_ns(snapshot.as_of_ns, self._ttls.entry_s * NS)
        return self._shown_s(remaining_ns, self._ttls.entry_s)

    def _shown_s(self, remaining_ns: float, ttl_s: float) -> float:
        if remaining_ns > 0:
            return remaining_ns / NS
        if self._outage.is_on and self._outage.may_show(remaining_ns):
            return self._stale_ttl_s(ttl_s)
        return 0.0

    def listed_ino(self, parent: int, name: bytes, ino: int, snapshot: Snapshot) -> int | None:
        """What the name of a snapshot's entry stands for now; None if for nothing any more.

        The kernel believes directory entries as it believes look-ups, so it must never be given
        an inode that has been replaced since the snapshot was taken.
        """
        if snapshot.unbound_count == self.table.unbound_count:
            return ino
        dirent = self.table.dirent(parent, name)
        return None if dirent is None else dirent.ino

    def negative_ttl_s(self, parent: int, name: bytes) -> float:
        """For how many seconds more the name is taken not to exist; 0 if it may exist."""
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
        """A listing shows the name for the first time: the kernel must not believe any longer that
        it does not exist."""
        if (parent, name) in self._told_absent:
            del self._told_absent[parent, name]
            self._on_unbound(parent, name)

    async def _ask(self, parent: int, name: bytes) -> Inode:
        """Ask the origin, once for all who want to know, and whoever of them gives up."""
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
            # A bug here costs those who ask an error, not everybody the mount.
            log.exception("bug while looking up %r in inode %d", key[1], key[0])
        finally:
            # Whatever ended this, nobody may wait for ever.
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
        # A known name is asked for again when its TTL has ended: its bytes are here already.
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
        if self._reads is not None and is_unknown and not inode.is_dir:
            is_it = isinstance(meta, ObjectMeta) and meta.version == inode.version
            ref = self.object_ref(inode) if data is not None and is_it else None
            self._reads.note_look_up(inode, ref, data)
        return inode

    async def _ask_origin(
        self, directory: Inode, name: bytes, is_unknown: bool
    ) -> tuple[Found, Buffer | None]:
        """What a name stands for, and a small file's bytes if the look-up brings them along."""
        path = join(self.table.path(directory), name)
        log.debug("%r: the origin is asked what it is", path)
        if is_unknown and self._reads is not None and self._reads.may_bring():
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
        """Names are asked one by one as they are needed; once a directory has cost as much in
        that way as listing it, list it.

        How long a new directory's listing is, nobody knows: after 8 look-ups one page is tried,
        after 32 three more, and so on. So those who read whole directories by name soon need no
        HEADs, and those who pick a few files out of huge ones pay about an eighth in LISTs on top.
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
            self._listings.probe(directory, asked // _HEADS_PER_LIST)

    def _list_if_absent(self, directory: Inode) -> None:
        """Finding that a name is absent costs a LIST, too. Whoever looks for one such name often
        goes on to others (Python, for each suffix that a module may have): after the first one in
        a directory a page is tried, which mostly is all of it."""
        ino = directory.ino
        asked = self._heads_since_listing.get(ino, 0)
        if self._origin.lists_by_stat or asked >= _HEADS_PER_LIST:
            return
        if self.table.listing(ino) is None:
            self._heads_since_listing[ino] = _HEADS_PER_LIST
            self._listings.probe(directory, 1)

    # -- directories ---------------------------------------------------------------------------

    def open_directory(self, ino: int) -> Snapshot:
        """The entries of the directory as a reader who begins now sees them."""
        return self._listings.open(self._directory(ino))

    async def listed_since(self, ino: int, since_ns: int) -> Snapshot:
        """All entries of the directory, listed at `since_ns` or later. Raises what the listing
        failed with; `OriginUnavailableError` in an outage, whatever is known."""
        snapshot = await self._listings.open_since(self._directory(ino), since_ns)
        await snapshot.wait_for_end()
        if snapshot.error is None and snapshot.as_of_ns < since_ns:
            raise OriginUnavailableError("the origin does not answer")
        await snapshot.has(len(snapshot))  # raises what ended it
        return snapshot

    def resume_directory(self, ino: int, generation: int) -> Snapshot:
        """The snapshot that this reader began with."""
        return self._listings.resume(self._directory(ino), generation)

    def _directory(self, ino: int) -> Inode:
        inode = self.inode(ino)
        if not inode.is_dir:
            raise NotADirError("not a directory")
        return inode

    async def note_object_changed(self, inode: Inode) -> None:
        """A read found that the origin has another version now: find out which before the
        reader hears of it, so that its next open gets that one and doesn't wait for a TTL."""
        dirent = self.table.dirent(inode.parent, inode.name)
        if dirent is not None and dirent.ino == inode.ino:
            with suppress(CachefsError):
                await self._ask(inode.parent, inode.name)


def _is_power_of_four(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


__all__ = ["ROOT_INO", "Namespace", "Ttls"]
