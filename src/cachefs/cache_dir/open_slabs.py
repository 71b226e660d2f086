"""Limits the number of open slab files of a mount to what the process may have, less a reserve.

A descriptor in use is never closed. Among the others it closes that of a slab that was not read
lately: a slab that was read gets a second chance (the clock algorithm). After a close, the next
read of the slab goes through a thread, which opens the file again.
"""

import os
import resource
from collections import OrderedDict

from cachefs.cache_dir.slab import Slab

_RESERVED, _MOST_RESERVED = 144, 4096
"""Least and greatest number of descriptors reserved for other uses: about 40, one connection for
each request to the origin, and clients. In between, a quarter of all descriptors is reserved."""
_MOST_LOOKS = 1024
"""Maximum number of slabs examined in one search for slabs to close: about 100 us."""


def descriptors_for_slabs() -> int:
    """Return how many slab files this process may have open at a time; at least one."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        allowed = 1 << 20
    return max(1, allowed - min(max(_RESERVED, allowed // 4), _MOST_RESERVED))


def close_slab(slab: Slab) -> None:
    """Close the slab's files, if they are open. No other code closes its descriptors. Nobody may
    use it now: see `Slab.is_busy`."""
    if slab.fd >= 0:
        os.close(slab.fd)
        if slab.table_fd not in (slab.fd, -1):
            os.close(slab.table_fd)
        slab.table_fd = -1
        slab.fd = -1


class OpenSlabs:
    """The open slab files of all tiers of one mount. Used on the loop only.

    A slab that was closed for another reason stays here until the search reaches it.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit` is the maximum number of open slabs, `descriptors_for_slabs()` by default."""
        self.limit = descriptors_for_slabs() if limit is None else limit
        self._open: OrderedDict[Slab, None] = OrderedDict()

    def __len__(self) -> int:
        """The number of slabs that are open now."""
        return sum(slab.fd >= 0 for slab in self._open)

    def note(self, slab: Slab) -> None:
        """Add a slab that was just opened, and close others above the limit.

        If all others are in use, the limit is exceeded for a while.
        """
        self._open[slab] = None
        self._open.move_to_end(slab)
        slab.was_read = True
        excess = len(self._open) - self.limit
        for _ in range(min(2 * len(self._open), _MOST_LOOKS)):
            if excess <= 0:
                return
            excess -= self._look_at_next(slab)

    def _look_at_next(self, newest: Slab) -> bool:
        """Examine the next slab: close it or give it a second chance. Returns whether it is
        removed."""
        slab, _ = self._open.popitem(last=False)
        if slab.fd < 0:
            return True
        if slab is newest or slab.was_read or slab.is_busy:
            slab.was_read = False
            self._open[slab] = None
            return False
        close_slab(slab)
        return True
