"""The mtime that the mount shows for a directory.

It is the time when a change of the names was last seen, as a multiple of `GRAIN_NS`, plus some
nanoseconds that are no time. The ctime is without them, so it only changes with the names: GNU tar
compares it before and after it reads a directory, and says "file changed as we read it".

On the relay path the kernel sends no OPENDIR: it caches whole directories, and reads one again only
when its mtime has changed. So there the mtime is a validator: when the kernel has read names under
an mtime, the directory is never shown with this mtime and other names.

- While the listing is fresh, the inode's mtime is shown. It changes when the names change.
- While the listing is stale, a *temporary validator* is shown: the mtime and some nanoseconds. It
  grows once per list TTL until the directory is listed, and whenever an outage begins or ends. So
  the kernel reads the directory again, and doesn't cache for long what was shown in an outage.
- A listing that finds nothing new makes the temporary validator the inode's mtime: what the kernel
  has just read under it is valid as long as the listing is.
- If there was no temporary validator, because the listing before was still fresh, the mtime grows
  by 1 ns. So after expiry the kernel reads the directory, which renews all its cached names, and
  doesn't look up each expired name.
- A first listing that only adds names doesn't change the mtime: no reader has seen the whole
  directory before.

The nanoseconds reach `GRAIN_NS` after ten million TTLs, or after some hundred restarts and outages.

The kernel must not cache an mtime for longer than the names that it reads under it are valid, so
each mtime has a time limit. Names that are read later are listed later, so they are valid for
longer, except when the reader joins a listing that has already begun.
"""

import math
from collections.abc import Callable

from cachefs.namespace.clock import Clock, coarse_ns
from cachefs.namespace.inodes import InodeTable
from cachefs.namespace.outage import NS, STALE_TTL_S, Outage


class DirectoryValidators:
    """The directory validators of one mount, owned by its `Namespace`. All methods are synchronous.
    While `are_shown` is False, the inode's own mtime is always shown."""

    def __init__(
        self,
        table: InodeTable,
        clock: Clock,
        list_ttl_ns: float,
        outage: Outage,
        on_changed: Callable[[int], None],
    ) -> None:
        """`on_changed(ino)` must make the kernel ask for the inode's attributes again."""
        self._table = table
        self._clock = clock
        self.list_ttl_ns = list_ttl_ns
        self._outage = outage
        self._on_changed = on_changed
        self.are_shown = False
        self._under_way: dict[int, int] = {}
        """When the running listing of each directory began (ns)."""

    def begin(self, ino: int, as_of_ns: int) -> None:
        """Note that a listing which began at `as_of_ns` is running."""
        self._under_way[ino] = as_of_ns

    def end(self, ino: int) -> None:
        """Note that the listing has ended, successfully or not."""
        self._under_way.pop(ino, None)

    def of(self, ino: int, mtime_ns: int) -> tuple[int, float]:
        """Return the mtime (ns) to show for a directory whose inode has `mtime_ns`, and for how
        many ns the kernel may cache it."""
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
        # A directory without a known listing may have been listed before a crash.
        since_ns = mtime_ns if listing is None else listing.listed_at_ns
        age_ns = now_ns - since_ns
        if 0 <= age_ns < self.list_ttl_ns:
            return mtime_ns, self.list_ttl_ns - age_ns
        return self._temporary(since_ns, mtime_ns, now_ns)

    def _temporary(self, since_ns: int, mtime_ns: int, now_ns: int) -> tuple[int, float]:
        ttl_ns = int(self.list_ttl_ns)
        # If it is in the future, the clock was set back, and the staleness is unknown.
        since_ns = since_ns if since_ns <= now_ns else 0
        periods, past_ns = divmod(now_ns - since_ns, ttl_ns) if ttl_ns > 0 else (1, 0)
        validator_ns = mtime_ns + periods
        if since_ns < self._outage.changed_at_ns <= now_ns:
            validator_ns += self._outage.change_number
        left_ns = max(0.0, float(ttl_ns - past_ns))
        return validator_ns, min(left_ns, STALE_TTL_S * NS) if self._outage.is_on else left_ns

    def touch(self, ino: int) -> None:
        """Give the directory a new mtime, greater than any shown before, as its names have
        changed."""
        inode = self._table.get(ino)
        if inode is not None:
            shown_ns, _ = self.of(ino, inode.mtime_ns)
            self._table.touch(ino, max(coarse_ns(self._clock.now_ns()), shown_ns + 1))

    def bump(self, ino: int) -> None:
        """Give the directory another validator, and leave the time of its last change."""
        inode = self._table.get(ino)
        if inode is not None:
            shown_ns, _ = self.of(ino, inode.mtime_ns)
            self._table.touch(ino, shown_ns + 1)

    def renew(self, ino: int) -> None:
        """Call this after a listing, just before its row is put. Makes the temporary validator that
        is shown now the inode's mtime; without one, the mtime of a directory that was listed before
        grows by 1 ns."""
        inode = self._table.get(ino)
        if inode is None or not self.are_shown or math.isinf(self.list_ttl_ns):
            return
        shown_ns, _ = self.of(ino, inode.mtime_ns)
        if shown_ns > inode.mtime_ns:
            self._table.touch(ino, shown_ns)
        elif self._table.listing(ino) is not None:
            self._table.touch(ino, inode.mtime_ns + 1)

    def invalidate(self, ino: int) -> None:
        """Make the kernel ask for the mtime again at the next use: it is about to read names that
        are valid for less time than the mtime that it caches."""
        if self.are_shown:
            self._on_changed(ino)

    def not_to_be_kept(self, ino: int) -> None:
        """Do `bump`, so that the kernel doesn't show to the next reader what it is reading now."""
        if self.are_shown:
            self.bump(ino)
            self._on_changed(ino)
