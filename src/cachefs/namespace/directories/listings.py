"""Directory listings: one at a time per directory, streamed to readers, and kept for a TTL.

A listing fills a `DirectorySnapshot` page by page while it binds names in the inode table. When it
succeeds, names that it didn't show are unbound, and its row in the table notes that the directory
is complete. From then on, until the TTL ends, look-ups of absent names need no request.

During an outage of the origin, a directory that was ever listed completely is shown from the table.
A listing that fails in an outage continues with the known names that it has not shown yet.
"""

import logging
import random
from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import (
    CachefsError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.format.inode_record import Inode, Listing
from cachefs.namespace.clock import Clock
from cachefs.namespace.directories.directory_validators import DirectoryValidators
from cachefs.namespace.directories.lister import Lister, ListingProgress
from cachefs.namespace.directories.paused_listings import PausedListings
from cachefs.namespace.directories.prefetched_listings import PrefetchedListing, PrefetchedListings
from cachefs.namespace.directories.snapshot import DirectorySnapshot, KeptSnapshots
from cachefs.namespace.inodes import InodeTable
from cachefs.namespace.outage import NS, Outage
from cachefs.origin.base import Origin

log = logging.getLogger(__name__)

_GENERATION_BITS = 30
"""Bits of a generation. A position in a directory has 31 bits for it, because the kernel treats
positions as signed."""
_PREFETCHED_NS = 60 * NS
"""How long a directory may be listed from what a listing above it has shown. Such a listing counts
as begun when the one above began, and its TTL runs from then."""


class Listings:
    """All snapshots of a mount, running and finished; owned by its `Namespace`.

    At most one listing of a directory runs at a time. Except where a method is async, its changes
    are atomic on the loop thread.
    """

    def __init__(
        self,
        table: InodeTable,
        origin: Origin,
        nursery: trio.Nursery,
        clock: Clock,
        list_ttl_ns: float,
        outage: Outage,
        validators: DirectoryValidators,
        give_way: Callable[[], Awaitable[None]],
        on_new: Callable[[int, bytes], None] = lambda parent, name: None,
        on_moved: Callable[[int], None] = lambda ino: None,
    ) -> None:
        """`give_way` and `on_new`: see `Lister`. `on_moved(ino)` is called when the origin is found
        to have another directory at the path of this one."""
        self._on_moved = on_moved
        self._table = table
        self._nursery = nursery
        self._clock = clock
        self._list_ttl_ns = list_ttl_ns
        self._outage = outage
        self._validators = validators
        self._lister = Lister(table, origin, outage, validators, give_way, on_new)
        self._running: dict[int, DirectorySnapshot] = {}
        self._stale: dict[int, DirectorySnapshot] = {}
        """Snapshots that are being filled from the table during an outage. A listing of the same
        directory may run at the same time."""
        self._paused = PausedListings(clock, list_ttl_ns)
        self._prefetched = PrefetchedListings(clock, min(_PREFETCHED_NS, list_ttl_ns))
        self._kept = KeptSnapshots()
        # Random, as a reader may continue at a position that it got from the previous daemon.
        self._next_generation = random.getrandbits(_GENERATION_BITS)

    def set_ttl(self, list_ttl_ns: float) -> None:
        """Change the TTL, also of what is kept."""
        self._list_ttl_ns = list_ttl_ns
        self._prefetched.for_ns = min(_PREFETCHED_NS, list_ttl_ns)
        self._paused.list_ttl_ns = list_ttl_ns

    def remaining_ns(self, ino: int) -> float | None:
        """Return the nanoseconds until the directory's complete listing expires: <= 0 if it has
        expired, None if there was none."""
        listing = self._table.listing(ino)
        if listing is None:
            return None
        return self._clock.remaining_ns(listing.listed_at_ns, self._list_ttl_ns)

    def open(self, directory: Inode) -> DirectorySnapshot:
        """Return the snapshot for a reader that begins now: running, kept or newly begun."""
        ino = directory.ino
        listing = self._table.listing(ino)
        if listing is not None and self._outage.is_on and self._may_show(ino, listing):
            return self._kept.current(directory, listing) or self._begin_stale(directory, listing)
        running = self._running.get(ino)
        if running is not None and not self._is_left(running):
            return running.joined()
        fresh = (self.remaining_ns(ino) or 0) > 0
        if listing is not None and fresh:
            kept = self._kept.current(directory, listing)
            if kept is not None:
                return kept
        return self._begin(directory, listing if fresh else None).joined()

    def _is_left(self, running: DirectorySnapshot) -> bool:
        """Whether a running listing has been left by its readers, and is too old for new ones."""
        left_ns = self._clock.remaining_ns(running.as_of_ns, self._list_ttl_ns)
        return running.is_held and left_ns <= 0

    async def open_since(self, directory: Inode, since_ns: int) -> DirectorySnapshot:
        """Do the same as `open` for a job that needs a listing which began at `since_ns` or later.
        Waits for an older listing that is running."""
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
            kept = self._kept.current(directory, listing)
            return kept or self._begin(directory, listing).joined_by_job()
        return self._begin(directory, None, since_ns).joined_by_job()

    def note_change(self, ino: int) -> None:
        """Note that a look-up has changed a name: the names that readers were shown are no longer
        correct. While the first listing runs, the name may be new to this mount only."""
        if self._table.listing(ino) is not None:
            self._validators.touch(ino)
        elif ino in self._running or ino in self._paused:
            self._validators.bump(ino)

    def note_absence(self, ino: int) -> None:
        """Note that a look-up found a name absent. A bounded listing or a listing above may have
        seen the name before, so their results are dropped."""
        self._paused.drop(ino)
        directory = self._table.get(ino) if self._prefetched else None
        if directory is not None:
            self._prefetched.drop(self._table.path(directory))

    def _may_show(self, ino: int, listing: Listing) -> bool:
        """Return whether this listing may be shown during an outage. If it is stale, note that it
        is shown."""
        remaining_ns = self._clock.remaining_ns(listing.listed_at_ns, self._list_ttl_ns)
        if remaining_ns > 0:
            return True
        if not self._outage.may_show(remaining_ns):
            return False
        self._outage.note_shown()
        self._validators.invalidate(ino)
        return True

    def resume(self, directory: Inode, generation: int) -> DirectorySnapshot:
        """Return the snapshot with this generation, with which a reader began. If it is no longer
        kept (dozens of larger directories were read since), return the current one: the reader
        continues in it at the same position."""
        for under_way in (self._running, self._stale):
            snapshot = under_way.get(directory.ino)
            if snapshot is not None and snapshot.generation == generation:
                return snapshot
        kept = self._kept.get(directory.ino, generation)
        if kept is not None:
            return kept
        # This reader may miss a name, so the kernel must not cache the result.
        self._validators.not_to_be_kept(directory.ino)
        return self.open(self._table.get(directory.ino) or directory)

    def refresh(self, directory: Inode) -> None:
        """List the directory again in the background, unless a listing is running."""
        if directory.ino not in self._running:
            self._begin(directory, None)

    def list_bounded(self, directory: Inode, max_pages: int) -> None:
        """List the directory in the background, but pause after `max_pages` pages unless a reader
        has joined. Pages of an earlier bounded listing count. The names on these pages are
        bound."""
        if directory.ino not in self._running:
            self._begin(directory, None).max_pages = max_pages

    async def observe_root(self) -> None:
        """See `Lister.observe_root`."""
        await self._lister.observe_root()

    async def wait_for_first_page(
        self, ino: int, most_s: float, only_prefetched: bool = False
    ) -> bool:
        """Wait at most `most_s` for a bounded listing of one page, if one is running, unless
        `only_prefetched`. If the listing is prefetched, begin one, and wait for it. Return False
        if there is none."""
        begun = False
        if self._prefetched and ino not in self._running:
            directory = self._table.get(ino)
            if directory is not None and self._prefetched.knows(self._table.path(directory)):
                self.list_bounded(directory, 1)
                begun = True
        snapshot = self._running.get(ino)
        if snapshot is None or snapshot.max_pages != 1 or (only_prefetched and not begun):
            return False
        snapshot.is_awaited = True
        with trio.move_on_after(most_s):
            await self._has_left(ino, snapshot)
        return True

    async def _has_left(self, ino: int, snapshot: DirectorySnapshot) -> None:
        """Wait until the snapshot is no longer running: it has ended or paused."""
        while self._running.get(ino) is snapshot:
            await snapshot.progress()

    def _begin(
        self, directory: Inode, fresh: Listing | None, since_ns: int = 0
    ) -> DirectorySnapshot:
        """Begin a snapshot: from the table if a `fresh` listing is given, else from the origin.

        From the origin it may continue a paused listing or use a prefetched listing, if these began
        at `since_ns` or later.
        """
        ino = directory.ino
        progress = self._paused.take(ino, since_ns)
        if fresh is not None:
            progress, snapshot = None, self._new_snapshot(fresh.listed_at_ns)
        elif progress is not None:
            snapshot = progress.snapshot
        else:
            seen = self._seen(directory, since_ns)
            snapshot = self._new_snapshot(seen.as_of_ns if seen else self._clock.now_ns())
            progress = self._lister.begin(directory, snapshot, seen)
        self._running[ino] = snapshot
        self._validators.begin(ino, snapshot.as_of_ns)
        self._nursery.start_soon(self._run, ino, snapshot, self._running, progress)
        return snapshot

    def _seen(self, directory: Inode, since_ns: int) -> PrefetchedListing | None:
        """Take the prefetched entries of the directory, unless it was listed itself since then."""
        listing = self._table.listing(directory.ino)
        if listing is not None:
            since_ns = max(since_ns, listing.listed_at_ns + 1)
        return self._prefetched.take(self._table.path(directory), since_ns)

    def _begin_stale(self, directory: Inode, listing: Listing) -> DirectorySnapshot:
        if directory.ino not in self._stale:
            snapshot = self._new_snapshot(listing.listed_at_ns)
            self._stale[directory.ino] = snapshot
            self._nursery.start_soon(self._run, directory.ino, snapshot, self._stale, None)
        return self._stale[directory.ino]

    def _new_snapshot(self, as_of_ns: int) -> DirectorySnapshot:
        snapshot = DirectorySnapshot(self._next_generation, as_of_ns, self._table.unbound_count)
        self._next_generation = (self._next_generation + 1) % (1 << _GENERATION_BITS)
        return snapshot

    async def _run(
        self,
        ino: int,
        snapshot: DirectorySnapshot,
        under_way: dict[int, DirectorySnapshot],
        progress: ListingProgress | None,
    ) -> None:
        """Fill the snapshot, from the origin if `progress` is given, else from the table. When this
        ends or pauses, it removes the snapshot from `under_way`."""
        has_paused = False
        try:
            if progress is None and not await self._lister.fill(ino, snapshot):
                progress = self._find_lost_names(ino, snapshot)
            if progress is not None:
                has_paused = not await self._list_or_show_stale(ino, progress)
            if not has_paused:
                snapshot.end()
                self._kept.add(ino, snapshot)
        except CachefsError as error:
            snapshot.end(error)
            if isinstance(error, ObjectChangedError):
                self._on_moved(ino)
        except Exception:
            # A bug here gives an error to this directory's readers, but must not end the mount.
            log.exception("bug while listing inode %d", ino)
            snapshot.end(OriginError("internal error; see the log"))
        finally:
            if progress is not None:
                self._prefetched.add(progress.below, snapshot.as_of_ns)
            if under_way.get(ino) is snapshot:
                del under_way[ino]
                if under_way is self._running:
                    self._validators.end(ino)
            if has_paused and progress is not None:
                self._paused.add(ino, progress)
                snapshot.wake()
            elif not snapshot.ended:
                snapshot.end(OriginError("the mount is shutting down"))

    def _find_lost_names(self, ino: int, snapshot: DirectorySnapshot) -> ListingProgress:
        """Return a listing that appends the names which the table has lost. Raises
        `ObjectChangedError` if the directory is lost, too."""
        directory = self._table.get(ino)
        if directory is None:
            raise ObjectChangedError(f"inode {ino} no longer exists")
        self._table.note_lost_names(ino)
        snapshot.as_of_ns, snapshot.mtime_ns = self._clock.now_ns(), None
        progress = self._lister.begin(directory, snapshot)
        entries = (snapshot.entry(position) for position in range(len(snapshot)))
        progress.shown = frozenset(name for name, _ in entries)
        return progress

    async def _list_or_show_stale(self, ino: int, progress: ListingProgress) -> bool:
        """Run the listing. Return False if it has paused. If it fails in an outage, append the
        known names that it has not shown."""
        snapshot = progress.snapshot
        try:
            return await self._lister.run(ino, progress)
        except OriginUnavailableError:
            listing = self._table.listing(ino)
            if listing is None or not snapshot.has_readers:
                raise
            if not self._may_show(ino, listing):
                raise
            self._validators.not_to_be_kept(ino)
            snapshot.as_of_ns = listing.listed_at_ns
            if not await self._lister.fill(ino, snapshot):
                self._table.note_lost_names(ino)
                raise
            return True
