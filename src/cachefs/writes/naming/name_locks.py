"""Lets changes of the same names wait for each other.

The kernel holds the lock of a directory (`i_rwsem`) while its names change, and of both directories
during a rename. This is not enough in two cases:

- A rename of a directory within its parent does not lock the directory itself, so names below it
  change at the same time. In an object store this takes as long as the copies, and a name below
  would change after its object was copied, or be moved back.
- A process that is killed ends at once, and the kernel's lock with it. Its request goes on in the
  daemon (`fuse/relay/waiting.c`), and meanwhile the next process changes the same name.

So each change claims its names. It waits for all earlier claims that it conflicts with, held or
waiting, and for no later ones. So no two changes ever wait for each other. Claims come before the
locks of files (`WrittenFiles.quiet`), and nothing that holds such a lock claims a name.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from cachefs.format.inode_record import Inode

Key = tuple[int, bytes]
"""The inode number of a directory, and a name in it."""


class _Claim:
    def __init__(self, keys: frozenset[Key], has_below: bool) -> None:
        self.keys = keys
        self.has_below = has_below
        """It is about everything below the names, too."""
        self.ended = trio.Event()


class NameLocks:
    """The claims of one mount. Loop thread only."""

    def __init__(self, inode: Callable[[int], Inode | None]) -> None:
        """`inode` returns the inode of a number; None if there is none."""
        self._inode = inode
        self._claims: dict[_Claim, None] = {}
        """Held and waiting ones, in the order in which they came."""

    @asynccontextmanager
    async def claim(self, *keys: Key, has_below: bool = False) -> AsyncIterator[None]:
        """Keep these names to the caller; with `has_below` also all names below them."""
        claim = _Claim(frozenset(keys), has_below)
        earlier = list(self._claims)
        self._claims[claim] = None
        try:
            for each in earlier:
                # The tree may have changed during the last wait. It does not change any more for
                # this claim: a change that moves one of its directories has a claim that conflicts.
                if not each.ended.is_set() and self._conflict(each, claim):
                    await each.ended.wait()
            yield
        finally:
            del self._claims[claim]
            claim.ended.set()

    def _conflict(self, one: _Claim, other: _Claim) -> bool:
        return (
            not one.keys.isdisjoint(other.keys)
            or (one.has_below and any(self._is_below(key, one.keys) for key in other.keys))
            or (other.has_below and any(self._is_below(key, other.keys) for key in one.keys))
        )

    def _is_below(self, key: Key, tops: frozenset[Key]) -> bool:
        """Return whether one of the directories above a name has one of the names `tops`."""
        ino = key[0]
        while (directory := self._inode(ino)) is not None and directory.parent != ino:
            if (directory.parent, directory.name) in tops:
                return True
            ino = directory.parent
        return False
