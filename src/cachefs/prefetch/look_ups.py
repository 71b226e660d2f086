"""Look-ups that fetch the file: one GET for an unknown name instead of a HEAD and then a GET.

A reader of files that no listing contains waits for the origin twice per file: for its attributes,
then for its bytes. One GET returns both. The GET is wasted if no read follows the look-up (`stat`,
`find`). So a credit limits these GETs: each one takes 1, and each read after a look-up gives 2. A
few wasted GETs use up the credit, and a few reads restore it. While the shared tier has most of
what is read, look-ups bring nothing: the bytes would come from the origin, which it is to spare.
"""

from collections import OrderedDict

from cachefs.cache.block_cache import BlockCache
from cachefs.format.inode_record import Inode
from cachefs.types import Buffer, ObjectRef

_FIRST_CREDIT = 2
_MOST_CREDIT = 32
_READ_GIVES = 2
_REMEMBERED = 1_024
"""Most looked-up files that are remembered. Only their first reads give credit."""


class LookUpReads:
    """The credit of one mount. Only the event loop uses it, and no method waits. See
    `namespace.LookUpPolicy`."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.is_on = True
        """Whether look-ups may fetch files' bytes at all."""
        self._credit = _FIRST_CREDIT
        self._looked_up: OrderedDict[int, None] = OrderedDict()
        """Inode numbers of files that a look-up has found and no reader has read yet."""

    def would_bring(self) -> bool:
        """Return whether `may_bring` would return True now."""
        return self._credit > 0 and not self._cache.shared.serves_most

    def may_bring(self) -> bool:
        """Return whether the next look-up of an unknown name may fetch the bytes too. If so, take
        one credit."""
        if not self.is_on or self._credit <= 0 or self._cache.shared.serves_most:
            return False
        self._credit -= 1
        return True

    def note_look_up(self, inode: Inode, ref: ObjectRef | None, data: Buffer | None) -> None:
        """Note that a look-up has found this file. `data` are its bytes, if the look-up fetched
        them; they are stored."""
        if ref is not None and data is not None:
            self._cache.put_ahead(ref, data)
        self._looked_up[inode.ino] = None
        if len(self._looked_up) > _REMEMBERED:
            self._looked_up.popitem(last=False)

    def note_first_read(self, inode: Inode) -> None:
        """Note the first read of this file. It gives credit if a look-up has found the file."""
        if inode.ino in self._looked_up:
            del self._looked_up[inode.ino]
            self._credit = min(self._credit + _READ_GIVES, _MOST_CREDIT)
