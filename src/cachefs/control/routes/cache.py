"""Routes that show and control what is cached: info, usage, evict, pin, unpin, refresh.

All routes take `paths`, relative to the mount's root ("" is the root), and answer with a stream.
Its lines identify a path by its `number` in `paths`, from 0. An error for one path is a line with a
`failure`; the other paths continue.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.objects import Dropped
from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route
from cachefs.control.routes.refresh import Refresher
from cachefs.control.routes.tree import CacheTree, FileSums, parts_of
from cachefs.errors import CacheDirError, CachefsError, UsageError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.types import ObjectRef
from cachefs.units import format_bytes
from cachefs.writes.unsent.report import UnsentFiles

NS = 1_000_000_000
_DRAIN_S = 5.0
_MOST_SHARED = 10_000
"""The most blocks of a file for which the shared tier is asked."""


class CacheRoutes:
    """The handlers of one mount.

    `invalidate_entry` and `invalidate_attributes`: see `Refresher`.
    """

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        invalidate_entry: Callable[[int, bytes], None],
        invalidate_attributes: Callable[[int], None],
        names_dropped: Callable[[], Awaitable[None]],
        is_down: Callable[[], bool],
        unsent: UnsentFiles | None = None,
    ) -> None:
        """`names_dropped()` waits until the kernel has dropped the names of all earlier
        `invalidate_entry`. `is_down()` says whether the origin answers no requests at all.
        `unsent` are the unsent files of a writable mount."""
        self._namespace = namespace
        self._cache = cache
        self._invalidate_entry = invalidate_entry
        self._invalidate_attributes = invalidate_attributes
        self._names_dropped = names_dropped
        self._is_down = is_down
        self._unsent = unsent
        self._tree = CacheTree(namespace, cache)

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {
            api.CACHE_INFO: self.info,
            api.CACHE_USAGE: self.usage,
            api.CACHE_EVICT: self.evict,
            api.CACHE_PIN: self.pin,
            api.CACHE_UNPIN: self.unpin,
            api.CACHE_REFRESH: self.refresh,
        }

    # -- looking -------------------------------------------------------------------------------

    def info(self, arguments: dict[str, Any]) -> Lines:
        """Yield a line for each path: what it is, and how much of it is cached."""
        return _on_each(_paths(arguments), self._info)

    async def _info(self, path: str) -> Lines:
        inode = await self._tree.find(parts_of(path))
        sums, failures = await self._sum(inode)
        answer: dict[str, object] = {
            "kind": "directory" if inode.is_dir else "file",
            "source": self._namespace.source_url(inode),
            "inode": inode.ino,
            "mtime": inode.mtime_ns / NS,
            "checked_at": self._checked_at(inode),
            **asdict(sums),
        }
        if not inode.is_dir:
            answer |= {"version": inode.version}
            if self._cache.shared.is_on:
                answer["shared"] = await self._in_shared_tier(self._namespace.object_ref(inode))
        unsent = None if self._unsent is None else self._unsent.of_inode(inode.ino)
        if unsent is not None:
            answer["unsent"] = {"state": unsent.state.value, "reason": unsent.reason or None}
        if failures:
            answer["problem"] = failures[0]
        yield answer

    async def _in_shared_tier(self, ref: ObjectRef) -> dict[str, object]:
        """Return how many of the first blocks are in the shared tier; None if it does not say."""
        asked = min(ref.block_count, _MOST_SHARED)
        return {"blocks": await self._cache.shared.count_blocks(ref, asked), "of": asked}

    async def _sum(self, inode: Inode) -> tuple[FileSums, list[str]]:
        """Return the sums over a file or a tree, and the reasons why some names may be missing."""
        if not inode.is_dir:
            return await self._tree.sums_of([inode]), []
        sums, failures = FileSums(), []
        async with aclosing(self._tree.sums_below(inode)) as lines:
            async for line in lines:
                sums = line.sums
                if line.failure is not None:
                    failures.append(f"{self._path_of(line.ino)}: {line.failure}")
        return sums, failures

    def _path_of(self, ino: int) -> str:
        return self._namespace.table.path(self._namespace.inode(ino)) or "/"

    def _checked_at(self, inode: Inode) -> float | None:
        """Return when the origin last confirmed this file's name, or when this directory was
        listed, in seconds since the epoch; None for a directory that was never listed."""
        table = self._namespace.table
        if inode.is_dir:
            listing = table.listing(inode.ino)
            return None if listing is None else listing.listed_at_ns / NS
        dirent, listing = table.dirent(inode.parent, inode.name), table.listing(inode.parent)
        known_ns = 0 if dirent is None else dirent.checked_at_ns
        if listing is not None:
            known_ns = max(known_ns, listing.listed_at_ns)
        return known_ns / NS

    def usage(self, arguments: dict[str, Any]) -> Lines:
        """Yield a line for each file in `paths`, and for each directory at or below those in
        `paths`, down to `depth` levels (none: no limit). `path` is relative to the given path."""
        depth = arguments.get("depth")
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise UsageError(f"depth is a number from 0 on, not {depth!r}")
        return _on_each(_paths(arguments), partial(self._usage, depth))

    async def _usage(self, depth: int | None, path: str) -> Lines:
        top = await self._tree.find(parts_of(path))
        if not top.is_dir:
            yield {"path": "", **asdict(await self._tree.sums_of([top]))}
            return
        prefix = self._namespace.table.path(top)
        async with aclosing(self._tree.sums_below(top)) as lines:
            async for line in lines:
                found = self._namespace.table.path(self._namespace.inode(line.ino))
                below = found[len(prefix) :].strip("/")
                if line.failure is not None:
                    yield {"path": below, "failure": str(line.failure)}
                if depth is None or (below.count("/") + 1 if below else 0) <= depth:
                    yield {"path": below, **asdict(line.sums)}

    # -- changing ------------------------------------------------------------------------------

    def evict(self, arguments: dict[str, Any]) -> Lines:
        """Drop the cached blocks of the paths; with `force` also pinned ones. With `dry_run` only
        count them. The last line has the sums."""
        force, dry_run = _flag(arguments, "force"), _flag(arguments, "dry_run")
        objects = self._cache.objects

        async def act(refs: list[ObjectRef]) -> Dropped:
            return await objects.evict(refs, pinned_too=force, dry_run=dry_run)

        return self._on_all(arguments, act)

    def unpin(self, arguments: dict[str, Any]) -> Lines:
        """Unpin the files: they can be evicted again. The last line has the sums."""
        return self._on_all(arguments, self._cache.objects.unpin)

    async def _on_all(
        self, arguments: dict[str, Any], act: Callable[[list[ObjectRef]], Any]
    ) -> Lines:
        """Call `act` for all known files at or below the paths. This lists no directory."""
        sums = Dropped()
        files = 0
        for number, path in enumerate(_paths(arguments)):
            try:
                top = await self._tree.find(parts_of(path))
                async with aclosing(self._tree.refs(top)) as batches:
                    async for refs in batches:
                        done: Dropped = await act(refs)
                        files += len(refs)
                        sums.add(done)
            except CachefsError as error:
                yield {"number": number, "failure": str(error)}
        yield {"files": files, **asdict(sums)}

    async def pin(self, arguments: dict[str, Any]) -> Lines:
        """Pin the cached blocks of the paths: they are not evicted. The last line has the sums.

        Raises `CacheDirError`, and pins nothing, if they exceed a tier's pin limit.
        """
        paths = _paths(arguments)
        found: dict[int, Inode] = {}
        for number, path in enumerate(paths):
            try:
                found[number] = await self._tree.find(parts_of(path))
            except CachefsError as error:
                yield {"number": number, "failure": str(error)}
        with trio.move_on_after(_DRAIN_S):
            await self._cache.drain()  # blocks that were read just now must count, too
        await self._refuse_too_much(found)
        sums = {"files": 0, "size_bytes": 0, "pinned_bytes": 0, "refused_bytes": 0}
        for number, inode in found.items():
            try:
                async with aclosing(self._tree.refs(inode, list_unknown=True)) as batches:
                    async for refs in batches:
                        pinned = await self._cache.objects.pin(refs)
                        sums["files"] += len(refs)
                        sums["size_bytes"] += sum(ref.meta.size_bytes for ref in refs)
                        sums["pinned_bytes"] += pinned.size_bytes
                        sums["refused_bytes"] += pinned.refused_bytes
            except CachefsError as error:
                yield {"number": number, "failure": str(error)}
        yield sums

    async def _refuse_too_much(self, found: Mapping[int, Inode]) -> None:
        more_bytes: dict[str, int] = {}
        for inode in found.values():
            async with aclosing(self._tree.refs(inode)) as batches:
                async for refs in batches:
                    charges = await self._cache.objects.charge_to_pin(refs)
                    for path, size_bytes in charges.items():
                        more_bytes[str(path)] = more_bytes.get(str(path), 0) + size_bytes
        for room in self._cache.objects.pin_room():
            wanted_bytes = more_bytes.get(str(room.path), 0)
            if wanted_bytes > room.limit_bytes - room.pinned_bytes:
                raise CacheDirError(
                    f"{format_bytes(wanted_bytes)} more would be pinned in {room.path}, where "
                    f"{format_bytes(room.pinned_bytes)} of at most "
                    f"{format_bytes(room.limit_bytes)} are: nothing was pinned; unpin something, "
                    "or mount with a higher --pin-limit"
                )

    async def refresh(self, arguments: dict[str, Any]) -> Lines:
        """Ask the origin for the paths now; with `wait`, retry until it answers. The last line has
        the sums."""
        paths = _paths(arguments)
        refresher = Refresher(
            self._tree,
            self._cache,
            self._invalidate_entry,
            self._invalidate_attributes,
            self._is_down,
            wait=_flag(arguments, "wait"),
        )
        await refresher.run(paths)
        await self._names_dropped()
        for number, failure in refresher.failures:
            yield {"number": number, "failure": failure}
        yield asdict(refresher.found)


async def _on_each(paths: Sequence[str], answer: Callable[[str], Lines]) -> Lines:
    """Yield the lines of the answer for each path, with the path's number."""
    for number, path in enumerate(paths):
        try:
            async with aclosing(answer(path)) as lines:
                async for line in lines:
                    yield {"number": number, **line}
        except CachefsError as error:
            yield {"number": number, "failure": str(error)}


def _paths(arguments: dict[str, Any]) -> list[str]:
    paths = arguments.get("paths")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise UsageError("paths must be a list of texts")
    return paths


def _flag(arguments: dict[str, Any], name: str) -> bool:
    value = arguments.get(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false")
    return value
