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
from collections.abc import AsyncIterator
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
from cachefs.namespace.outage import Outage
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


class _TooLongError(Exception):
    """A probe has cost what it may."""


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
    ) -> None:
        self._table = table
        self._origin = origin
        self._nursery = nursery
        self._clock = clock
        self._list_ttl_ns = list_ttl_ns
        self._outage = outage
        self._stamps = stamps
        self._running: dict[int, Snapshot] = {}
        self._stale: dict[int, Snapshot] = {}
        """Filled from the table during an outage, beside a listing that may be running."""
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
        """The same for one who wants a listing that was begun at `since_ns` or later."""
        ino = directory.ino
        while True:
            running = self._running.get(ino)
            if running is None:
                break
            if running.as_of_ns >= since_ns:
                return running.joined()
            await running.wait_for_end()
        listing = self._table.listing(ino)
        if listing is not None and listing.listed_at_ns >= since_ns:
            kept = self._kept_of(directory, listing)
            return kept or self._begin(directory, listing).joined()
        return self._begin(directory, None).joined()

    def note_change(self, ino: int) -> None:
        """A name has changed outside a listing: what readers were shown is no longer right."""
        if ino in self._running or self._table.listing(ino) is not None:
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
        """List the directory in the background, but give up if it has more than `max_pages`
        pages, unless a reader has joined. The names seen are known then all the same."""
        if directory.ino not in self._running:
            self._begin(directory, None).max_pages = max_pages

    async def end_of_probe(self, ino: int, patience_s: float) -> bool:
        """Wait for a probe of one page, if one is under way. False if there was none."""
        snapshot = self._running.get(ino)
        if snapshot is None or snapshot.max_pages != 1:
            return False
        with trio.move_on_after(patience_s):
            await snapshot.wait_for_end()
        return True

    def _begin(self, directory: Inode, fresh: Listing | None) -> Snapshot:
        as_of_ns = self._clock.now_ns() if fresh is None else fresh.listed_at_ns
        snapshot = self._new_snapshot(as_of_ns)
        self._running[directory.ino] = snapshot
        self._stamps.begin(directory.ino, as_of_ns)
        self._nursery.start_soon(self._run, directory, fresh, snapshot, self._running)
        return snapshot

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
    ) -> None:
        """Fill the snapshot, from the table if the directory is `known`. Until it has ended it
        stands in `under_way`."""
        ino = directory.ino
        try:
            if known is not None:
                await self._fill(ino, snapshot)
            else:
                await self._list_or_show_stale(directory, snapshot)
            snapshot.end()
            self._keep(ino, snapshot)
        except _TooLongError:
            snapshot.end()
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
            if not snapshot.ended:
                snapshot.end(OriginError("the mount is shutting down"))

    async def _list_or_show_stale(self, directory: Inode, snapshot: Snapshot) -> None:
        try:
            await self._list(directory, snapshot)
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

    async def _list(self, directory: Inode, snapshot: Snapshot) -> None:
        ino = directory.ino
        began_ns = snapshot.as_of_ns
        seen: set[bytes] = set()
        changed = False
        found_before = self._table.found_count
        mtime_before_ns = self._mtime_ns(ino)
        unbound_before = self._table.unbound_count
        was_known = self._table.listing(ino) is not None
        knew_names = next(self._table.dirents(ino), None) is not None
        pages = self._origin.list_dir(self._table.path(directory))
        page_count = 0
        if ino == ROOT_INO:
            await self.observe_root()
        try:
            while (page := await self._next_page(ino, pages)) is not None:
                if snapshot.max_pages is not None and page_count >= snapshot.max_pages:
                    raise _TooLongError
                page_count += 1
                for first in range(0, len(page), _BIND_CHUNK):
                    chunk = page[first : first + _BIND_CHUNK]
                    changed |= self._bind_page(ino, chunk, began_ns, snapshot, seen)
                    await trio.lowlevel.checkpoint()
                snapshot.wake()
            # The first listing of a large directory need not look through all of it again.
            if knew_names or self._table.found_count != found_before:
                changed |= await self._sweep(ino, began_ns, seen)
            is_whole = self._mtime_ns(ino) == mtime_before_ns
            self._stamps.renew(ino)
            self._table.finish_listing(ino, Listing(began_ns, len(seen)))
        finally:
            # What a failed listing has found is shown, too. Names that the first complete listing
            # adds are no change: nobody was shown a whole directory before.
            if changed and (was_known or self._table.unbound_count != unbound_before):
                self._stamps.touch(ino)
        if is_whole:
            snapshot.mtime_ns = self._mtime_ns(ino)

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

    def _bind_page(
        self, ino: int, page: list[Entry], began_ns: int, snapshot: Snapshot, seen: set[bytes]
    ) -> bool:
        changed = False
        for text, meta in page:
            name = text.encode("utf-8", "surrogateescape")
            child, is_new = self._table.bind_listed(ino, name, meta, began_ns)
            changed |= is_new
            seen.add(name)
            snapshot.append(name, child)
        return changed

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
