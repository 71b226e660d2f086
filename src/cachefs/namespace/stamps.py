"""The mtime that a directory is shown with.

Where no OPENDIR is sent (the relay path) the kernel keeps whole directories, and asks for one
again only when its mtime has changed. So there the mtime is a validator: it is never shown again
for other names than those that were read under it.

- While a listing is fresh, it is the inode's mtime, which moves when the names do.
- While it is stale, it is a *stamp*: it changes once per list TTL for as long as nobody lists, and
  whenever an outage begins or ends. So the kernel asks again, and what was shown for want of an
  origin doesn't stay.
- A listing that finds nothing new makes the stamp the inode's mtime: what the kernel has just read
  under it is good for as long as the listing is.
- If there was no stamp, as the listing before was still fresh, the mtime moves by a nanosecond:
  when its time is over the kernel shall read the directory, which renews all that it knows of the
  names in it, rather than look up each name that has expired.
- A first listing that only adds names moves nothing: nobody has read a whole directory before.

The kernel must not believe an mtime for longer than what it reads under it is good, so each comes
with the time until then. What is read later is listed later, and so good for longer, unless a
listing that has begun already is joined.
"""

import math
from collections.abc import Callable

from cachefs.namespace.clock import Clock
from cachefs.namespace.inodes import InodeTable
from cachefs.namespace.outage import NS, STALE_TTL_S, Outage


class Stamps:
    """All methods are synchronous. Nothing but the inode's own mtime is shown until `are_shown`."""

    def __init__(
        self,
        table: InodeTable,
        clock: Clock,
        list_ttl_ns: float,
        outage: Outage,
        on_changed: Callable[[int], None],
    ) -> None:
        """`on_changed(ino)` shall make the kernel ask for attributes again."""
        self._table = table
        self._clock = clock
        self.list_ttl_ns = list_ttl_ns
        self._outage = outage
        self._on_changed = on_changed
        self.are_shown = False
        self._under_way: dict[int, int] = {}
        """Since when directories are being listed."""

    def begin(self, ino: int, as_of_ns: int) -> None:
        """A listing has begun."""
        self._under_way[ino] = as_of_ns

    def end(self, ino: int) -> None:
        """It has ended, in whatever way."""
        self._under_way.pop(ino, None)

    def of(self, ino: int, mtime_ns: int) -> tuple[int, float]:
        """The mtime that a directory with this mtime is shown with, and for how many ns it may be
        believed."""
        if not self.are_shown or math.isinf(self.list_ttl_ns):
            return mtime_ns, math.inf
        now_ns = self._clock.now_ns()
        shown_ns, for_ns = self._of(ino, mtime_ns, now_ns)
        began_ns = self._under_way.get(ino)
        if began_ns is not None:
            for_ns = min(for_ns, max(0.0, self.list_ttl_ns - abs(now_ns - began_ns)))
        return shown_ns, for_ns

    def _of(self, ino: int, mtime_ns: int, now_ns: int) -> tuple[int, float]:
        listing = self._table.listing(ino)
        # A directory of which no listing is known may have been listed before a crash.
        since_ns = mtime_ns if listing is None else listing.listed_at_ns
        age_ns = now_ns - since_ns
        if 0 <= age_ns < self.list_ttl_ns:
            return mtime_ns, self.list_ttl_ns - age_ns
        return self._stamp(since_ns, mtime_ns, now_ns)

    def _stamp(self, since_ns: int, mtime_ns: int, now_ns: int) -> tuple[int, float]:
        ttl_ns = int(self.list_ttl_ns)
        if ttl_ns <= 0:
            return max(now_ns, mtime_ns + 1), 0.0
        # From the future: the clock was set back, and nobody knows for how long it is stale.
        since_ns = since_ns if since_ns <= now_ns else 0
        periods, past_ns = divmod(now_ns - since_ns, ttl_ns)
        # The mtime may be ahead of the clock, too, and the stamp must change all the same.
        stamp_ns = max(since_ns + periods * ttl_ns, mtime_ns + periods)
        if self._outage.changed_at_ns <= now_ns:
            stamp_ns = max(stamp_ns, self._outage.changed_at_ns)
        left_ns = float(ttl_ns - past_ns)
        return stamp_ns, min(left_ns, STALE_TTL_S * NS) if self._outage.is_on else left_ns

    def touch(self, ino: int) -> None:
        """The directory's names are others than were ever shown: so is its mtime."""
        inode = self._table.get(ino)
        if inode is not None:
            shown_ns, _ = self.of(ino, inode.mtime_ns)
            self._table.touch(ino, max(self._clock.now_ns(), shown_ns + 1))

    def renew(self, ino: int) -> None:
        """The directory has been listed, and its row is about to be put: it goes on being shown
        with the stamp that it is shown with now."""
        inode = self._table.get(ino)
        if inode is None or not self.are_shown or math.isinf(self.list_ttl_ns):
            return
        shown_ns, _ = self.of(ino, inode.mtime_ns)
        if shown_ns > inode.mtime_ns:
            self._table.touch(ino, shown_ns)
        elif self._table.listing(ino) is not None:
            self._table.touch(ino, inode.mtime_ns + 1)

    def forget(self, ino: int) -> None:
        """The kernel is about to read what it may not keep for as long as it believes the mtime:
        it shall ask for that again next time."""
        if self.are_shown:
            self._on_changed(ino)

    def not_to_be_kept(self, ino: int) -> None:
        """The kernel is reading what shall not be shown to the next reader: he shall find another
        mtime."""
        if self.are_shown:
            self.touch(ino)
            self._on_changed(ino)
