"""Which slab files of a mount are open: as many as this process may have, less what else it needs.

A descriptor that is in use is never closed, and of the others that of a slab which was not read
lately: each that was gets a second chance. What follows from closing one is that the next read of
its slab goes through a thread, which opens it.
"""

import os
import resource
from collections import OrderedDict

from cachefs.tiers.slabs import Slab

_RESERVED, _MOST_RESERVED = 144, 4096
"""Descriptors for all else: some 40, a connection for each request to the origin, and clients. A
quarter of them all, within these limits."""
_MOST_LOOKS = 1024
"""At slabs, for one to close: some 100 us."""


def descriptors_for_slabs() -> int:
    """How many this process may have open at a time; at least one."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        allowed = 1 << 20
    return max(1, allowed - min(max(_RESERVED, allowed // 4), _MOST_RESERVED))


class OpenSlabs:
    """Of one mount, whatever its tiers; on the loop. Slabs that others have closed are found out
    when their turn comes."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: by default what the process may have."""
        self.limit = descriptors_for_slabs() if limit is None else limit
        self._open: OrderedDict[Slab, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(slab.fd >= 0 for slab in self._open)

    def note(self, slab: Slab) -> None:
        """The slab has a descriptor now, so another may have to go. If all are in use, there is
        one too many for a while."""
        self._open[slab] = None
        self._open.move_to_end(slab)
        slab.was_read = True
        excess = len(self._open) - self.limit
        for _ in range(min(2 * len(self._open), _MOST_LOOKS)):
            if excess <= 0:
                return
            excess -= self._look_at_next(slab)

    def _look_at_next(self, newest: Slab) -> bool:
        """Whether there is one less afterwards."""
        slab, _ = self._open.popitem(last=False)
        if slab.fd < 0:
            return True
        if slab is newest or slab.was_read or slab.is_busy:
            slab.was_read = False
            self._open[slab] = None
            return False
        os.close(slab.fd)
        slab.fd = -1
        return True
