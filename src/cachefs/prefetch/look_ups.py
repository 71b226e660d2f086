"""Look-ups that bring the file: one GET for an unknown name instead of a HEAD and then a GET.

Whoever reads files by names that no listing has shown waits for the origin twice per file: for its
attributes, then for its bytes. One GET gives both. It is wasted where look-ups are not followed by
reads (`stat`, `find`), so it costs credit: each GET takes one, each read that follows a look-up
gives two. A few wasted files use the credit up, and a few read ones bring it back.
"""

from collections import OrderedDict

from cachefs.cache.block_cache import BlockCache
from cachefs.format.inode_record import Inode
from cachefs.types import Buffer, ObjectRef

_FIRST_CREDIT = 2
_MOST_CREDIT = 32
_READ_GIVES = 2
_REMEMBERED = 1_024
"""Looked-up files that count as read if somebody reads them."""


class LookUpReads:
    """Of one mount, on the loop; nothing here waits. See `namespace.LookUpReads`."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._credit = _FIRST_CREDIT
        self._looked_up: OrderedDict[int, None] = OrderedDict()
        """Inode numbers of files that a look-up has found and nobody has read yet."""

    def may_bring(self) -> bool:
        """Whether the next look-up of an unknown name asks for the bytes, too. Takes credit."""
        if self._credit <= 0:
            return False
        self._credit -= 1
        return True

    def note_look_up(self, inode: Inode, ref: ObjectRef | None, data: Buffer | None) -> None:
        """A name was asked for and is this file; `data` are its bytes, if they came along."""
        if ref is not None and data is not None:
            self._cache.put_ahead(ref, data)
        self._looked_up[inode.ino] = None
        if len(self._looked_up) > _REMEMBERED:
            self._looked_up.popitem(last=False)

    def note_first_read(self, inode: Inode) -> None:
        """Somebody reads this file for the first time."""
        if inode.ino in self._looked_up:
            del self._looked_up[inode.ino]
            self._credit = min(self._credit + _READ_GIVES, _MOST_CREDIT)
