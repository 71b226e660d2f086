"""Asks the origin now for names that would otherwise stay valid until their TTL ends.

Directories are listed again, and files are looked up again. A file with a new version gets a new
inode. If a file is gone or was replaced, its blocks are dropped, and the kernel must ask for the
name again. Directories without known names are skipped, as nothing in them can be stale.

A new inode is recognized by its number, which is greater than all numbers before.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from cachefs.cache.block_cache import BlockCache
from cachefs.control.routes.tree import NO_SUCH_FILE, CacheTree, parts_of
from cachefs.errors import CachefsError, NotFoundError, OriginUnavailableError
from cachefs.format.inode_record import KIND_DIR, Inode
from cachefs.namespace.namespace import ROOT_INO
from cachefs.namespace.work_stack import work_off

_ENTRIES_PER_TURN = 500
_WAIT_S = 1.0
_TRIES = 3

_What = TypeVar("_What")


@dataclass(slots=True)
class Refreshed:
    """The numbers of names by what was found, of listed directories, and of dropped blocks."""

    checked: int = 0
    changed: int = 0
    new: int = 0
    gone: int = 0
    directories: int = 0
    dropped_blocks: int = 0
    dropped_bytes: int = 0


class Refresher:
    """One run of a refresh. `invalidate_entry(parent, name)` and `invalidate_attributes(ino)`
    make the kernel drop what it caches."""

    def __init__(
        self,
        tree: CacheTree,
        cache: BlockCache,
        invalidate_entry: Callable[[int, bytes], None],
        invalidate_attributes: Callable[[int], None],
        is_down: Callable[[], bool],
        wait: bool,
    ) -> None:
        """With `wait`, `run` waits for an origin that doesn't answer; without, that is an error.
        `is_down()` says whether the origin answers no requests at all."""
        self.found = Refreshed()
        self.failures: list[tuple[int, str]] = []
        """Each failure: the number of its path in the arguments, and the text of the error."""
        self._tree = tree
        self._namespace = tree.namespace
        self._table = tree.namespace.table
        self._objects = cache.objects
        self._invalidate_entry = invalidate_entry
        self._invalidate_attributes = invalidate_attributes
        self._is_down = is_down
        self._wait = wait
        self._since_ns = self._namespace.clock.now_ns()
        self._first_new = self._table.next_ino
        self._unnamed: list[int] = []
        self._fresh_count = 0
        """The number of names with a new inode: they are new, or refer to another version."""
        self._listed: set[int] = set()
        self._named: set[tuple[int, bytes]] = set()
        self._directories: list[tuple[int, int]] = []
        """The directories to list, each with the number of the path that led to it."""

    async def run(self, paths: Sequence[str]) -> None:
        """Refresh all paths. Errors of single paths go to `failures`."""
        self._table.on_unnamed.append(self._note_unnamed)
        try:
            for number, path in enumerate(paths):
                try:
                    await self._patiently(self._look_up, path, number)
                except CachefsError as error:
                    self.failures.append((number, str(error)))
            await work_off(self._directories, self._list_and_note)
        finally:
            self._table.on_unnamed.remove(self._note_unnamed)
        await self._drop_unnamed()
        self.found.new = max(0, self._fresh_count - self.found.changed)

    def _note_unnamed(self, ino: int) -> None:
        self._unnamed.append(ino)

    async def _patiently(
        self, ask: Callable[[_What, int], Awaitable[None]], what: _What, number: int
    ) -> None:
        """Await `ask(what, number)`. With `wait`, repeat it while the origin is unavailable; while
        it answers other requests, give up after `_TRIES`. Failures during an outage do not count:
        the last one may be told when it has just ended."""
        tries = 0
        while True:
            try:
                await ask(what, number)
                return
            except OriginUnavailableError:
                tries = 0 if self._is_down() else tries + 1
                if not self._wait or tries >= _TRIES:
                    raise
                await self._namespace.outage.wait(_WAIT_S)

    async def _look_up(self, path: str, number: int) -> None:
        parts = parts_of(path)
        if not parts:
            self._directories.append((ROOT_INO, number))
            return
        parent, name = (await self._tree.find(parts[:-1])).ino, parts[-1]
        was_known = self._table.dirent(parent, name) is not None
        self._named.add((parent, name))
        try:
            inode = await self._namespace.lookup_since(parent, name, self._since_ns)
        except NotFoundError:
            if was_known:
                return  # it is gone now, and `_drop_unnamed` counts it
            raise NotFoundError(NO_SUCH_FILE) from None
        self.found.checked += 1
        self._invalidate_attributes(parent)
        if inode.ino >= self._first_new:
            self._note_fresh(parent, name)
        elif inode.is_dir:
            self._directories.append((inode.ino, number))

    def _note_fresh(self, parent: int, name: bytes) -> None:
        self._fresh_count += 1
        self._invalidate_entry(parent, name)  # the kernel may cache it as absent

    async def _list_and_note(self, item: tuple[int, int]) -> None:
        ino, number = item
        try:
            await self._patiently(self._list, ino, number)
        except CachefsError as error:
            self.failures.append((number, f"{self._path_of(ino)}: {error}"))

    async def _list(self, ino: int, number: int) -> None:
        if ino in self._listed:
            return
        snapshot = await self._namespace.listed_since(ino, self._since_ns)
        self._listed.add(ino)
        self.found.directories += 1
        self.found.checked += len(snapshot)
        for position in range(len(snapshot)):
            if position % _ENTRIES_PER_TURN == _ENTRIES_PER_TURN - 1:
                await self._namespace.give_way()
            name, child = snapshot.entry(position)
            if child >= self._first_new:
                self._note_fresh(ino, name)
            elif self._is_known_directory(child):
                self._directories.append((child, number))
        # Also if nothing is new: other requests may have found a change that the kernel hasn't
        # seen yet.
        self._invalidate_attributes(ino)

    def _is_known_directory(self, ino: int) -> bool:
        stat = self._table.stat(ino)
        if stat is None or stat[0] != KIND_DIR:
            return False
        listing = self._table.listing(ino)
        return listing is not None or next(self._table.dirents(ino), None) is not None

    def _path_of(self, ino: int) -> str:
        try:
            return self._table.path(self._namespace.inode(ino)) or "/"
        except (CachefsError, LookupError):
            return f"inode {ino}"

    async def _drop_unnamed(self) -> None:
        """Count the inodes that lost their names, and drop the blocks that no name leads to any
        more. This includes inodes that other requests have unbound meanwhile."""
        parents = set()
        for ino in self._unnamed:
            unnamed = self._table.get(ino)
            if unnamed is None:
                continue
            place = (unnamed.parent, unnamed.name)
            current = self._table.dirent(*place)
            if unnamed.parent in self._listed or place in self._named:
                self.found.changed += current is not None
                self.found.gone += current is None
                parents.add(unnamed.parent)
            heir = None if current is None else self._table.get(current.ino)
            if heir is None or heir.version != unnamed.version or heir.is_dir != unnamed.is_dir:
                await self._drop(unnamed)
        for parent in parents:
            self._invalidate_attributes(parent)

    async def _drop(self, top: Inode) -> None:
        async with aclosing(self._tree.refs(top)) as batches:
            async for refs in batches:
                dropped = await self._objects.evict(refs, pinned_too=True)
                self.found.dropped_blocks += dropped.blocks
                self.found.dropped_bytes += dropped.size_bytes
