"""Listing a directory from the origin: its pages are bound in the inode table, and shown.

When all pages have come, names that were not among them are unbound, and the directory's row in the
table says that it is complete.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import trio

from cachefs.errors import BadDataError, NotFoundError
from cachefs.format.inode_record import Inode, Listing
from cachefs.namespace.foreseen import Seen
from cachefs.namespace.inodes import ROOT_INO, InodeTable
from cachefs.namespace.outage import Outage
from cachefs.namespace.snapshot import Snapshot
from cachefs.namespace.stamps import Stamps
from cachefs.origin.base import Origin
from cachefs.origin.names import Pages
from cachefs.types import Entry

log = logging.getLogger(__name__)

_BIND_CHUNK = 50
"""Entries of a page taken in without letting the loop run: some 1 ms."""
_SWEEP_CHUNK = 500
"""Names looked through after a listing without letting the loop run: some 1 ms."""


_PAGES_AGAIN = 100
"""So many pages that bring no new name make it certain that a listing never ends."""
_BEHIND_S = 0.05


class TooLongError(Exception):
    """A probe has cost what it may for now. The listing can go on from there."""


@dataclass(slots=True)
class Begun:
    """A listing as far as it has come, and what the table said as it began."""

    snapshot: Snapshot
    pages: AsyncIterator[list[Entry]]
    below: dict[str, list[Entry]]
    """Directories further below that were seen whole on the way."""
    was_known: bool
    knew_names: bool
    found_before: int
    unbound_before: int
    mtime_before_ns: int
    seen: set[bytes] = field(default_factory=set)
    page_count: int = 0
    pages_again: int = 0
    """Pages one after the other that have brought no new name."""
    page: list[Entry] | None = None
    """The next one, if it has come already."""
    changed: bool = False


class Lister:
    """Of one mount."""

    def __init__(
        self,
        table: InodeTable,
        origin: Origin,
        outage: Outage,
        stamps: Stamps,
        give_way: Callable[[], Awaitable[None]],
        on_new: Callable[[int, bytes], None] = lambda parent, name: None,
    ) -> None:
        """`give_way` is awaited between two pieces of work for which no request waits.
        `on_new(parent, name)` is told of each name that a listing was the first to show."""
        self._on_new = on_new
        self._table = table
        self._origin = origin
        self._outage = outage
        self._stamps = stamps
        self._give_way = give_way

    def begin(self, directory: Inode, snapshot: Snapshot, seen: Seen | None = None) -> Begun:
        """Sends nothing yet, and nothing later if all of it was `seen`."""
        table, ino = self._table, directory.ino
        below: dict[str, list[Entry]] = {}
        if seen is None:
            path = table.path(directory)
            self._origin.counters.begin_listing(path)
            log.debug("%r: the origin is asked for a listing", path or "/")
            pages = self._origin.list_dir(path, below)
        else:
            pages = Pages(partial(_pop, [seen.entries]))
        return Begun(
            snapshot,
            aiter(pages),
            below,
            was_known=table.listing(ino) is not None,
            knew_names=next(table.dirents(ino), None) is not None,
            found_before=table.found_count,
            unbound_before=table.unbound_count,
            mtime_before_ns=self.mtime_ns(ino),
        )

    async def run(self, ino: int, listing: Begun) -> None:
        """All of it, or the rest of it. Raises `OriginError`, and `TooLongError` where the
        snapshot's `max_pages` are reached."""
        snapshot = listing.snapshot
        if ino == ROOT_INO and not listing.page_count:
            await self.observe_root()
        try:
            await self._take_pages(ino, listing)
            # The first listing of a large directory need not look through all of it again.
            if listing.knew_names or self._table.found_count != listing.found_before:
                listing.changed |= await self._sweep(ino, snapshot.as_of_ns, listing.seen)
            is_whole = self.mtime_ns(ino) == listing.mtime_before_ns
            self._stamps.renew(ino)
            self._table.finish_listing(ino, Listing(snapshot.as_of_ns, len(listing.seen)))
        finally:
            # What a failed listing has found is shown, too. Names that the first complete listing
            # adds are no change: nobody was shown a whole directory before.
            was_shown = listing.was_known or self._table.unbound_count != listing.unbound_before
            if listing.changed and was_shown:
                self._stamps.touch(ino)
        if is_whole:
            snapshot.mtime_ns = self.mtime_ns(ino)

    async def _take_pages(self, ino: int, listing: Begun) -> None:
        snapshot = listing.snapshot
        while True:
            page = listing.page or await self._next_page(ino, listing.pages)
            if page is None:
                return
            most = snapshot.max_pages  # a reader may have joined while the page came
            listing.page = page
            if most is not None and listing.page_count >= most:
                raise TooLongError
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
            snapshot.wake()

    async def _let_others(self, snapshot: Snapshot) -> None:
        """Between two pieces. A disk that takes its time holds up jobs, so that what they find
        does not pile up in memory, but no request of the kernel."""
        await (trio.lowlevel.checkpoint if snapshot.is_awaited else self._give_way)()
        while self._table.is_behind and not snapshot.is_awaited:  # noqa: ASYNC110 - no event
            await trio.sleep(_BEHIND_S)

    def mtime_ns(self, ino: int) -> int:
        """The directory's, or 0 if it is gone."""
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

    def _bind(self, ino: int, entries: list[Entry], listing: Begun) -> None:
        snapshot = listing.snapshot
        for text, meta in entries:
            name = text.encode("utf-8", "surrogateescape")
            if name in listing.seen:
                continue  # twice in the listing; it is shown as it came first
            child, is_new = self._table.bind_listed(ino, name, meta, snapshot.as_of_ns)
            listing.changed |= is_new
            if is_new:
                self._on_new(ino, name)
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


async def _pop(pages: list[list[Entry]]) -> list[Entry] | None:
    await trio.lowlevel.checkpoint()
    return pages.pop() if pages else None
