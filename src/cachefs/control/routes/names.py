"""The route that shows one directory, name by name, and how much of each name is cached."""

from collections.abc import Mapping
from contextlib import aclosing
from itertools import islice
from typing import Any

from cachefs.cache.block_cache import BlockCache
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.control.routes.tree import CacheTree, parts_of
from cachefs.errors import CachefsError, NotADirError, UsageError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace

MOST_NAMES = 500

_FILES_BELOW = 5_000
"""The most files below the directories of one answer that are counted: about 150 ms of the loop,
in steps. The directories share this number."""

_LEAST_FILES = 64
"""The most files that are counted in a directory, however many directories there are."""


class NamesRoutes:
    """Shows directories. Only the directory itself is listed at the origin, and only if it never
    was; what lies below it is counted as far as it is known."""

    def __init__(self, namespace: Namespace, cache: BlockCache) -> None:
        self._namespace = namespace
        self._objects = cache.objects
        self._tree = CacheTree(namespace, cache)

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {api.CACHE_NAMES: self.names}

    async def names(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Answer with up to `limit` names of the directory `path` that follow `after`."""
        path, after = _text(arguments, "path"), _text(arguments, "after")
        limit = arguments.get("limit", MOST_NAMES)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_NAMES:
            raise UsageError(f"limit is a number from 1 to {MOST_NAMES}, not {str(limit)[:40]}")
        top = await self._tree.find(parts_of(path))
        if not top.is_dir:
            raise NotADirError(f"{path!r} is not a directory")
        problem = None
        try:
            await self._tree.list_once(top.ino)
        except CachefsError as error:
            problem = str(error)
        found = self._inodes(top.ino, after, limit + 1)
        shown = found[:limit]
        directories = sum(inode.is_dir for inode in shown)
        most_files = max(_LEAST_FILES, _FILES_BELOW // max(1, directories))
        return {
            "names": [await self._described(inode, most_files) for inode in shown],
            "has_more": len(found) > limit,
            "problem": problem,
        }

    def _inodes(self, ino: int, after: str, count: int) -> list[Inode]:
        if "/" in after:
            raise UsageError(f"after is one name, not {after!r}")
        (start,) = parts_of(after) or (None,)
        table = self._namespace.table
        inodes = (table.get(dirent.ino) for _, dirent in table.dirents(ino, start))
        return list(islice((inode for inode in inodes if inode is not None), count))

    async def _described(self, inode: Inode, most_files: int) -> Mapping[str, object]:
        files = size_bytes = cached_bytes = pinned_bytes = 0
        is_whole = not inode.is_dir or self._namespace.table.listing(inode.ino) is not None
        async with aclosing(self._tree.refs(inode)) as batches:
            async for refs in batches:
                for ref in refs:
                    where = await self._objects.where(ref)
                    files += 1
                    size_bytes += ref.meta.size_bytes
                    cached_bytes += where.size_bytes
                    pinned_bytes += where.pinned_bytes
                if files >= most_files:
                    is_whole = False
                    break
        return {
            "name": inode.name.decode("utf-8", "surrogateescape"),
            "kind": "directory" if inode.is_dir else "file",
            "files": files,
            "size_bytes": size_bytes,
            "cached_bytes": cached_bytes,
            "pinned_bytes": pinned_bytes,
            "is_whole": is_whole,
        }


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text")
    return value
