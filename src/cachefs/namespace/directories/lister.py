"""Lists a directory from the origin, binds its pages in the inode table, and shows them to readers.

After the last page, names that were on no page are unbound, and the directory's row in the table
notes the complete listing.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import trio

from cachefs.errors import BadDataError, NotFoundError
from cachefs.format.inode_record import Inode, Listing
from cachefs.namespace.directories.directory_validators import DirectoryValidators
from cachefs.namespace.directories.prefetched_listings import PrefetchedListing
from cachefs.namespace.directories.snapshot import DirectorySnapshot
from cachefs.namespace.inodes import ROOT_INO, InodeTable
from cachefs.namespace.outage import Outage
from cachefs.origin.base import Origin
from cachefs.origin.names import Pages
from cachefs.origin.on_behalf import expecting
from cachefs.types import Entry

log = logging.getLogger(__name__)

_BIND_CHUNK = 50
"""Entries of a page that are bound between two checkpoints: some 1 ms."""
_SWEEP_CHUNK = 500
"""Names that are checked after a listing between two checkpoints: some 1 ms."""
_PAGES_AGAIN = 100
"""After so many successive pages without a new name, the listing would never end: it fails."""
_MOST_NAMES = 20_000_000
"""The most names of a directory. A listing without an end would fill the memory and the disk."""
FILL_CHUNK = 2_000
"""Entries read from the table between two checkpoints: about 2 ms."""
_BEHIND_S = 0.05
"""How often background listings check whether the database has caught up."""


@dataclass(slots=True)
class ListingProgress:
    """The progress of one listing, and the state of the table when it began.

    `was_known`: the directory had a complete listing. `knew_names`: it had names. `found_before` is
    the table's counter, and `mtime_before_ns` the directory's mtime at that time.
    """

    snapshot: DirectorySnapshot
    pages: AsyncIterator[list[Entry]]
    places: dict[str, str]
    """The place of the directory by its path (`Directory.place`), if it is known."""
    below: dict[str, list[Entry]]
    """Complete directories further below that the listing has shown, by path."""
    was_known: bool
    knew_names: bool
    found_before: int
    mtime_before_ns: int
    seen: set[bytes] = field(default_factory=set)
    page_count: int = 0
    pages_again: int = 0
    """The number of successive pages without a new name."""
    page: list[Entry] | None = None
    """The next page, if it has been received but not bound."""
    shown: frozenset[bytes] = frozenset()
    """Names that the snapshot had before the listing began."""
    changed: bool = False
    """Whether names of the directory have changed."""
    has_lost: bool = False
    """Whether a name is gone, or is another version now."""


class Lister:
    """Runs the listings of one mount; owned by `Listings`."""

    def __init__(
        self,
        table: InodeTable,
        origin: Origin,
        outage: Outage,
        validators: DirectoryValidators,
        give_way: Callable[[], Awaitable[None]],
        on_new: Callable[[int, bytes], None] = lambda parent, name: None,
    ) -> None:
        """`give_way` is awaited between two pieces of work for which no request waits.
        `on_new(parent, name)` is called for each name that gets a new inode from a listing."""
        self._on_new = on_new
        self._table = table
        self._origin = origin
        self._outage = outage
        self._validators = validators
        self._give_way = give_way

    def begin(
        self, directory: Inode, snapshot: DirectorySnapshot, seen: PrefetchedListing | None = None
    ) -> ListingProgress:
        """Return a listing that is ready to run. This sends no request. If `seen` is given, all
        entries come from it, and `run` sends no LIST either."""
        table, ino = self._table, directory.ino
        below: dict[str, list[Entry]] = {}
        path = table.path(directory)
        if seen is None:
            self._origin.counters.begin_listing(path)
            log.debug("%r: the origin is asked for a listing", path or "/")
            pages = self._origin.list_dir(path, below)
        else:
            pages = Pages(partial(_pop, [seen.entries]))
        return ListingProgress(
            snapshot,
            aiter(pages),
            {path: directory.version} if directory.version else {},
            below,
            was_known=table.listing(ino) is not None,
            knew_names=next(table.dirents(ino), None) is not None,
            found_before=table.found_count,
            mtime_before_ns=self._mtime_ns(ino),
        )

    async def run(self, ino: int, listing: ListingProgress) -> bool:
        """Run the listing, or the rest of it. Return False if it has reached the snapshot's
        `max_pages`: it can continue from there. Raises `OriginError`."""
        snapshot = listing.snapshot
        if ino == ROOT_INO and not listing.page_count:
            await self.observe_root()
        try:
            if not await self._take_pages(ino, listing):
                return False
            # After the first listing of a large directory no sweep is needed: the table has no
            # other names.
            if listing.knew_names or self._table.found_count != listing.found_before:
                listing.has_lost |= await self._sweep(ino, snapshot, listing.seen)
            is_whole = self._mtime_ns(ino) == listing.mtime_before_ns
            self._validators.renew(ino)
            self._table.finish_listing(ino, Listing(snapshot.as_of_ns, len(listing.seen)))
        finally:
            # What a failed listing has found is shown, too. Names that the first complete listing
            # adds are no change: no reader has seen the whole directory before.
            if listing.has_lost or (listing.changed and listing.was_known):
                self._validators.touch(ino)
        if is_whole:
            snapshot.mtime_ns = self._mtime_ns(ino)
        return True

    async def _take_pages(self, ino: int, listing: ListingProgress) -> bool:
        """Bind and show the pages. Return False if the snapshot's `max_pages` are reached before
        the last one. Raises `OriginError`, also if the listing has no end or no readers left."""
        snapshot = listing.snapshot
        while True:
            page = listing.page or await self._next_page(ino, listing)
            if page is None:
                return True
            most = snapshot.max_pages  # read it now: a reader may have joined during the await
            listing.page = page
            if most is not None and listing.page_count >= most:
                return False
            names_before = len(listing.seen)
            for first in range(0, len(page), _BIND_CHUNK):
                self._bind(ino, page[first : first + _BIND_CHUNK], listing)
                await self._let_others(snapshot)
            listing.page = None
            listing.page_count += 1
            listing.pages_again += 1
            if len(listing.seen) > names_before:
                listing.pages_again = 0
            elif listing.pages_again >= _PAGES_AGAIN:
                raise BadDataError("a listing has shown nothing but the same names for long")
            if len(listing.seen) > _MOST_NAMES:
                raise BadDataError(f"a listing has shown more than {_MOST_NAMES:,} names")
            snapshot.wake()
            await snapshot.wait_for_readers()

    async def fill(self, ino: int, snapshot: DirectorySnapshot) -> bool:
        """Append the table's names in order, except those that the snapshot already has. Each
        chunk continues after the last name, so changes between two chunks neither repeat nor skip
        an entry. Return False if the table has lost names of the directory."""
        changes_before, found = self._table.change_count, 0
        snapshot.mtime_ns = None if len(snapshot) else self._mtime_ns(ino)
        had = {snapshot.entry(position)[0] for position in range(len(snapshot))}
        after: bytes | None = None
        while True:
            count = 0
            for name, dirent in self._table.dirents(ino, after, unlisted=True):
                if dirent.is_listed and name not in had:
                    snapshot.append(name, dirent.ino)
                after = name
                count += 1
                if count == FILL_CHUNK:
                    break
            found += count
            if count < FILL_CHUNK:
                has_changed = self._table.change_count != changes_before
                return has_changed or self._table.must_have(ino, found)
            snapshot.wake()
            await trio.lowlevel.checkpoint()

    async def _let_others(self, snapshot: DirectorySnapshot) -> None:
        """Let other tasks run between two pieces of work. While commits are behind, jobs wait here
        so that their changes don't fill the memory; requests of the kernel don't wait."""
        await (trio.lowlevel.checkpoint if snapshot.is_awaited else self._give_way)()
        while self._table.is_behind and not snapshot.is_awaited:  # noqa: ASYNC110 - no event
            await trio.sleep(_BEHIND_S)

    def _mtime_ns(self, ino: int) -> int:
        """Return the directory's mtime, or 0 if its inode doesn't exist."""
        stat = self._table.stat(ino)
        return 0 if stat is None else stat[2]

    async def observe_root(self) -> None:
        """Get owner and mode of the root, which no listing shows, if the origin has them. Raises
        `OriginError`."""
        if self._origin.tells_owners:
            with self._outage.asking():
                self._table.note_root(await self._origin.stat(""))

    async def _next_page(self, ino: int, listing: ListingProgress) -> list[Entry] | None:
        with self._outage.asking(), expecting(listing.places):
            try:
                return await anext(listing.pages, None)
            except NotFoundError:
                if ino != ROOT_INO:
                    raise
                return None

    def _bind(self, ino: int, entries: list[Entry], listing: ListingProgress) -> None:
        snapshot = listing.snapshot
        for text, meta in entries:
            name = text.encode("utf-8", "surrogateescape")
            if name in listing.seen:
                continue  # twice in the listing: only the first entry counts
            unbound_before = self._table.unbound_count
            child, is_new = self._table.bind_seen(
                ino, name, meta, snapshot.as_of_ns, note_check=False
            )
            listing.changed |= is_new
            listing.has_lost |= self._table.unbound_count != unbound_before
            if is_new:
                self._on_new(ino, name)
            listing.seen.add(name)
            if child is not None and name not in listing.shown:
                snapshot.append(name, child)

    async def _sweep(self, ino: int, snapshot: DirectorySnapshot, seen: set[bytes]) -> bool:
        """Unbind the names that the listing didn't show, except names that a look-up has found
        since it began, or that this mount has created: those are shown. Return whether any were
        unbound. It can't be cancelled half-way, so that the caller always notes the change.
        """
        changed = False
        after: bytes | None = None
        while True:
            names = list(islice(self._table.dirents(ino, after), _SWEEP_CHUNK))
            for name, dirent in names:
                if name in seen:
                    continue
                if self._table.unbind_unlisted(ino, name, snapshot.as_of_ns):
                    changed = True
                elif self._table.own.is_writable:
                    snapshot.append(name, dirent.ino)
            if len(names) < _SWEEP_CHUNK:
                return changed
            after = names[-1][0]
            await trio.lowlevel.cancel_shielded_checkpoint()


async def _pop(pages: list[list[Entry]]) -> list[Entry] | None:
    await trio.lowlevel.checkpoint()
    return pages.pop() if pages else None
