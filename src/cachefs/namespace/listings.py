"""Directory listings: one at a time per directory, streamed to readers, kept for a TTL.

A listing fills a `Snapshot` page by page while it binds names in the inode table. When it has
ended well, names that it didn't show are unbound and its row in the table says that the
directory is complete; from then on, until the TTL ends, absent names need no request.

During an outage of the origin a directory that was ever listed completely is shown as it is
known; a listing that fails goes on with the names that are known and have not come.
"""

import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice

import trio

from cachefs.errors import (
    CachefsError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.format.inode_record import Inode, Listing
from cachefs.namespace.clock import Clock
from cachefs.namespace.inodes import ROOT_INO, InodeTable
from cachefs.namespace.outage import NS, Outage
from cachefs.namespace.snapshot import Snapshot
from cachefs.namespace.stamps import Stamps
from cachefs.origin.base import Origin
from cachefs.types import Entry

log = logging.getLogger(__name__)

_KEPT_NAMES = 500_000
"""Names kept in finished snapshots, about 25 MB; the least recently read go first."""
_KEPT_OF_ONE = 8
"""Snapshots kept of one directory, for readers who are in the middle of an older one."""
_SNAPSHOT_COST = 16
"""What an empty snapshot counts for, in names."""
_FILL_CHUNK = 2_000
"""Entries read from the table between two checkpoints: about 2 ms."""


_GENERATION_BITS = 30
"""The position in a directory has 31 bits for it: the kernel takes positions to be signed."""

_BIND_CHUNK = 50
"""Entries of a page taken in without letting the loop run: some 1 ms."""
_SWEEP_CHUNK = 500
"""Names looked through after a listing without letting the loop run: some 1 ms."""


_PAUSED = 16
"""Probes kept that may go on."""
_PAUSED_NS = 30 * NS
"""For how long one may: what it has seen is as old as its beginning."""


class _TooLongError(Exception):
    """A probe has cost what it may for now."""


@dataclass(slots=True)
class _FromOrigin:
    """A listing from the origin as far as it has come, and what the table said as it began."""

    snapshot: Snapshot
    pages: AsyncIterator[list[Entry]]
    was_known: bool
    knew_names: bool
    found_before: int
    unbound_before: int
    mtime_before_ns: int
    seen: set[bytes] = field(default_factory=set)
    page_count: int = 0
    page: list[Entry] | None = None
    """The next one, if it has come already."""
    changed: bool = False


class Listings:
    """Every snapshot of the mount, running and finished."""

    def __init__(
        self,
        table: InodeTable,
        origin: Origin,
        nursery: trio.Nursery,
        clock: Clock,
        list_ttl_ns: float,
        outage: Outage,
        stamps: Stamps,
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        """`give_way` is awaited between two pieces of work for which no request waits."""
        self._table = table
        self._origin = origin
        self._nursery = nursery
        self._clock = clock
        self._list_ttl_ns = list_ttl_ns
        self._outage = outage
        self._stamps = stamps
        self._give_way = give_way
        self._running: dict[int, Snapshot] = {}
        self._stale: dict[int, Snapshot] = {}
        """Filled from the table during an outage, beside a listing that may be running."""
        self._paused: OrderedDict[int, _FromOrigin] = OrderedDict()
        """Probes that gave up, and go on from there if more is wanted soon."""
        self._kept: OrderedDict[tuple[int, int], Snapshot] = OrderedDict()
        self._generations: dict[int, list[int]] = {}
        """Of the kept snapshots of each directory, the newest last."""
        self._kept_names = 0
        # A reader may go on with a position that he got from the daemon before this one.
        self._next_generation = random.getrandbits(_GENERATION_BITS)

    def remaining_ns(self, ino: int) -> float | None:
        """How much longer the directory's complete listing is fresh; <= 0 if it has expired, None
        if there was none."""
        listing = self._table.listing(ino)
        if listing is None:
            return None
        return self._clock.remaining_ns(listing.listed_at_ns, self._list_ttl_ns)

    def open(self, directory: Inode) -> Snapshot:
        """The snapshot for a reader who begins now: running, kept or newly begun."""
        ino = directory.ino
        listing = self._table.listing(ino)
        if listing is not None and self._outage.is_on and self._may_show(ino, listing):
            return self._kept_of(directory, listing) or self._begin_stale(directory, listing)
        if ino in self._running:
            return self._running[ino].joined()
        fresh = (self.remaining_ns(ino) or 0) > 0
        if listing is not None and fresh:
            kept = self._kept_of(directory, listing)
            if kept is not None:
                return kept
        return self._begin(directory, listing if fresh else None).joined()

    async def open_since(self, directory: Inode, since_ns: int) -> Snapshot:
        """The same for a job that wants a listing which was begun at `since_ns` or later."""
        ino = directory.ino
        while True:
            running = self._running.get(ino)
            if running is None:
                break
            if running.as_of_ns >= since_ns:
                return running.joined_by_job()
            await self._has_left(ino, running)
        listing = self._table.listing(ino)
        if listing is not None and listing.listed_at_ns >= since_ns:
            kept = self._kept_of(directory, listing)
            return kept or self._begin(directory, listing).joined_by_job()
        return self._begin(directory, None, since_ns).joined_by_job()

    def note_change(self, ino: int) -> None:
        """A name has changed outside a listing: what readers were shown is no longer right."""
        under_way = ino in self._running or ino in self._paused
        if under_way or self._table.listing(ino) is not None:
            self._stamps.touch(ino)

    def _may_show(self, ino: int, listing: Listing) -> bool:
        """Whether it stands in for one that can't be had, and notes it if it is stale."""
        remaining_ns = self._clock.remaining_ns(listing.listed_at_ns, self._list_ttl_ns)
        if remaining_ns > 0:
            return True
        if not self._outage.may_show(remaining_ns):
            return False
        self._outage.note_shown()
        self._stamps.forget(ino)
        return True

    def _kept_of(self, directory: Inode, listing: Listing) -> Snapshot | None:
        """The finished snapshot of this listing, if no look-up has found another name since."""
        generations = self._generations.get(directory.ino, [0])
        key = (directory.ino, generations[-1])
        kept = self._kept.get(key)
        if kept is None or kept.as_of_ns != listing.listed_at_ns:
            return None
        if kept.mtime_ns != directory.mtime_ns:
            return None
        self._kept.move_to_end(key)
        return kept

    def resume(self, directory: Inode, generation: int) -> Snapshot:
        """The snapshot that a reader began with, by its generation. If that is gone (dozens of
        larger directories were read since) the current one continues at the same position."""
        for under_way in (self._running, self._stale):
            snapshot = under_way.get(directory.ino)
            if snapshot is not None and snapshot.generation == generation:
                return snapshot
        kept = self._kept.get((directory.ino, generation))
        if kept is None:
            # He may miss a name. The kernel, which keeps what he reads, shall not keep this.
            self._stamps.not_to_be_kept(directory.ino)
            return self.open(self._table.get(directory.ino) or directory)
        self._kept.move_to_end((directory.ino, generation))
        return kept

    def refresh(self, directory: Inode) -> None:
        """List the directory again in the background, unless that is under way."""
        if directory.ino not in self._running:
            self._begin(directory, None)

    def probe(self, directory: Inode, max_pages: int) -> None:
        """List the directory in the background, but pause after `max_pages` pages, those of an
        earlier probe included, unless a reader has joined. The names seen are known then all the
        same."""
        if directory.ino not in self._running:
            self._begin(directory, None).max_pages = max_pages

    async def end_of_probe(self, ino: int, patience_s: float) -> bool:
        """Wait for a probe of one page, if one is under way. False if there was none."""
        snapshot = self._running.get(ino)
        if snapshot is None or snapshot.max_pages != 1:
            return False
        snapshot.is_awaited = True
        with trio.move_on_after(patience_s):
            await self._has_left(ino, snapshot)
        return True

    async def _has_left(self, ino: int, snapshot: Snapshot) -> None:
        """Wait until it is no longer running: it has ended, or it is a probe that has paused."""
        while self._running.get(ino) is snapshot:
            await snapshot.progress()

    def _begin(self, directory: Inode, fresh: Listing | None, since_ns: int = 0) -> Snapshot:
        """From what the table knows if that is `fresh`; else from the origin, and not from what a
        probe has found before `since_ns`."""
        ino = directory.ino
        paused = self._paused.pop(ino, None)
        if fresh is None and paused is not None and self._may_go_on(paused, since_ns):
            snapshot = paused.snapshot
        else:
            paused = None
            as_of_ns = self._clock.now_ns() if fresh is None else fresh.listed_at_ns
            snapshot = self._new_snapshot(as_of_ns)
        self._running[ino] = snapshot
        self._stamps.begin(ino, snapshot.as_of_ns)
        self._nursery.start_soon(self._run, directory, fresh, snapshot, self._running, paused)
        return snapshot

    def _may_go_on(self, paused: _FromOrigin, since_ns: int) -> bool:
        as_of_ns = paused.snapshot.as_of_ns
        for_ns = min(_PAUSED_NS, self._list_ttl_ns)
        return as_of_ns >= since_ns and self._clock.remaining_ns(as_of_ns, for_ns) > 0

    def _begin_stale(self, directory: Inode, listing: Listing) -> Snapshot:
        if directory.ino not in self._stale:
            snapshot = self._new_snapshot(listing.listed_at_ns)
            self._stale[directory.ino] = snapshot
            self._nursery.start_soon(self._run, directory, listing, snapshot, self._stale)
        return self._stale[directory.ino]

    def _new_snapshot(self, as_of_ns: int) -> Snapshot:
        snapshot = Snapshot(self._next_generation, as_of_ns, self._table.unbound_count)
        self._next_generation = (self._next_generation + 1) % (1 << _GENERATION_BITS)
        return snapshot

    async def _run(
        self,
        directory: Inode,
        known: Listing | None,
        snapshot: Snapshot,
        under_way: dict[int, Snapshot],
        paused: _FromOrigin | None = None,
    ) -> None:
        """Fill the snapshot, from the table if the directory is `known`, or go on with a probe.
        Until it has ended it stands in `under_way`."""
        ino = directory.ino
        try:
            if known is not None:
                await self._fill(ino, snapshot)
            else:
                await self._list_or_show_stale(directory, snapshot, paused)
            snapshot.end()
            self._keep(ino, snapshot)
        except _TooLongError:
            pass
        except CachefsError as error:
            snapshot.end(error)
        except Exception:
            # A bug here costs this directory's readers an error, not everybody the mount.
            log.exception("bug while listing inode %d", ino)
            snapshot.end(OriginError("internal error; see the log"))
        finally:
            del under_way[ino]
            if under_way is self._running:
                self._stamps.end(ino)
            if ino in self._paused:
                snapshot.wake()
            elif not snapshot.ended:
                snapshot.end(OriginError("the mount is shutting down"))

    async def _list_or_show_stale(
        self, directory: Inode, snapshot: Snapshot, paused: _FromOrigin | None
    ) -> None:
        try:
            await self._list(directory.ino, paused or self._from_origin(directory, snapshot))
        except OriginUnavailableError:
            listing = self._table.listing(directory.ino)
            if listing is None or not snapshot.has_readers:
                raise
            if not self._may_show(directory.ino, listing):
                raise
            self._stamps.not_to_be_kept(directory.ino)
            snapshot.as_of_ns = listing.listed_at_ns
            await self._fill(directory.ino, snapshot)

    async def _fill(self, ino: int, snapshot: Snapshot) -> None:
        """From the table, in name order: positions in it are names, so changes between two
        chunks neither repeat nor skip an entry. What the snapshot has already is left out."""
        snapshot.mtime_ns = None if len(snapshot) else self._mtime_ns(ino)
        had = {snapshot.entry(position)[0] for position in range(len(snapshot))}
        after: bytes | None = None
        while True:
            count = 0
            for name, dirent in self._table.dirents(ino, after):
                if name not in had:
                    snapshot.append(name, dirent.ino)
                after = name
                count += 1
                if count == _FILL_CHUNK:
                    break
            if count < _FILL_CHUNK:
                return
            snapshot.wake()
            await trio.lowlevel.checkpoint()

    def _from_origin(self, directory: Inode, snapshot: Snapshot) -> _FromOrigin:
        table, ino = self._table, directory.ino
        return _FromOrigin(
            snapshot,
            self._origin.list_dir(table.path(directory)),
            was_known=table.listing(ino) is not None,
            knew_names=next(table.dirents(ino), None) is not None,
            found_before=table.found_count,
            unbound_before=table.unbound_count,
            mtime_before_ns=self._mtime_ns(ino),
        )

    async def _list(self, ino: int, listing: _FromOrigin) -> None:
        snapshot = listing.snapshot
        if ino == ROOT_INO and not listing.page_count:
            await self.observe_root()
        try:
            await self._take_pages(ino, listing)
            # The first listing of a large directory need not look through all of it again.
            if listing.knew_names or self._table.found_count != listing.found_before:
                listing.changed |= await self._sweep(ino, snapshot.as_of_ns, listing.seen)
            is_whole = self._mtime_ns(ino) == listing.mtime_before_ns
            self._stamps.renew(ino)
            self._table.finish_listing(ino, Listing(snapshot.as_of_ns, len(listing.seen)))
        finally:
            # What a failed listing has found is shown, too. Names that the first complete listing
            # adds are no change: nobody was shown a whole directory before.
            was_shown = listing.was_known or self._table.unbound_count != listing.unbound_before
            if listing.changed and was_shown:
                self._stamps.touch(ino)
        if is_whole:
            snapshot.mtime_ns = self._mtime_ns(ino)

    async def _take_pages(self, ino: int, listing: _FromOrigin) -> None:
        """Raises `_TooLongError` for a probe that shall pause; it has been noted then."""
        snapshot = listing.snapshot
        while True:
            page = listing.page or await self._next_page(ino, listing.pages)
            if page is None:
                return
            most = snapshot.max_pages  # a reader may have joined while the page came
            listing.page = page
            if most is not None and listing.page_count >= most:
                self._pause(ino, listing)
                raise _TooLongError
            for first in range(0, len(page), _BIND_CHUNK):
                self._bind(ino, page[first : first + _BIND_CHUNK], listing)
                await (trio.lowlevel.checkpoint if snapshot.is_awaited else self._give_way)()
            listing.page = None
            listing.page_count += 1
            snapshot.wake()

    def _pause(self, ino: int, listing: _FromOrigin) -> None:
        self._paused[ino] = listing
        if len(self._paused) > _PAUSED:
            self._paused.popitem(last=False)

    def _mtime_ns(self, ino: int) -> int:
        stat = self._table.stat(ino)
        return 0 if stat is None else stat[2]

    async def observe_root(self) -> None:
        """Ask for the owner and the mode of the root, which no listing tells, if there are such.
        Raises `OriginError`."""
        if self._origin.tells_owners:
            with self._outage.asking():
                self._table.note_root(await self._origin.stat(""))

    async def _next_page(self, ino: int, pages: AsyncIterator[list[Entry]]) -> list[Entry] | None:
        with self._outage.asking():
            try:
                return await anext(pages, None)
            except NotFoundError:
                if ino != ROOT_INO:
                    raise
                return None

    def _bind(self, ino: int, entries: list[Entry], listing: _FromOrigin) -> None:
        snapshot = listing.snapshot
        for text, meta in entries:
            name = text.encode("utf-8", "surrogateescape")
            child, is_new = self._table.bind_listed(ino, name, meta, snapshot.as_of_ns)
            listing.changed |= is_new
            listing.seen.add(name)
            snapshot.append(name, child)

    async def _sweep(self, ino: int, began_ns: int, seen: set[bytes]) -> bool:
        """Unbind what the listing didn't show, but for names that a look-up has found since it
        began, also between two pieces. Not cancelled half-way: the caller notes what has changed.
        """
        changed = False
        after: bytes | None = None
        while True:
            names = [name for name, _ in islice(self._table.dirents(ino, after), _SWEEP_CHUNK)]
            for name in names:
                if name not in seen:
                    changed |= self._table.unbind_unlisted(ino, name, began_ns)
            if len(names) < _SWEEP_CHUNK:
                return changed
            after = names[-1]
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _keep(self, ino: int, snapshot: Snapshot) -> None:
        self._kept[(ino, snapshot.generation)] = snapshot
        self._kept_names += len(snapshot) + _SNAPSHOT_COST
        generations = self._generations.setdefault(ino, [])
        generations.append(snapshot.generation)
        if len(generations) > _KEPT_OF_ONE:
            self._drop(ino, generations[0])
        while self._kept_names > _KEPT_NAMES and len(self._kept) > 1:
            self._drop(*next(iter(self._kept)))

    def _drop(self, ino: int, generation: int) -> None:
        self._kept_names -= len(self._kept.pop((ino, generation))) + _SNAPSHOT_COST
        generations = self._generations[ino]
        generations.remove(generation)
        if not generations:
            del self._generations[ino]
