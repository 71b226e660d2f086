"""Maps names to files in the cache: single files, and all known files below a directory.

The names come from the namespace, which asks the origin only for unknown ones. A tree may have
millions of files, so all work is done in batches with checkpoints between them.
"""

from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError, NotADirError, NotFoundError, UsageError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.types import ObjectRef

NO_SUCH_FILE = "no such file or directory"

_BATCH_NAMES = 128
"""Names handled between two checkpoints: some 15 us each."""


@dataclass(slots=True)
class TierSums:
    """How much of some files one tier has cached."""

    medium: str
    blocks: int = 0
    size_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(slots=True)
class FileSums:
    """Sums over some files. `cached_bytes` counts each block once. `tiers` (by path, fastest
    first) counts each copy."""

    files: int = 0
    directories: int = 0
    size_bytes: int = 0
    blocks: int = 0
    cached_files: int = 0
    """The number of files that are cached completely."""
    cached_bytes: int = 0
    cached_blocks: int = 0
    pinned_bytes: int = 0
    unshown_keys: int = 0
    """The number of the origin's keys there that can't be shown as names."""
    tiers: dict[str, TierSums] = field(default_factory=dict)

    def add(self, other: "FileSums") -> None:
        """Add the sums over other files."""
        for name in (
            "files",
            "directories",
            "size_bytes",
            "blocks",
            "cached_files",
            "cached_bytes",
            "cached_blocks",
            "pinned_bytes",
            "unshown_keys",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for path, tier in other.tiers.items():
            mine = self.tiers.setdefault(path, TierSums(tier.medium))
            mine.blocks += tier.blocks
            mine.size_bytes += tier.size_bytes
            mine.pinned_bytes += tier.pinned_bytes


@dataclass(slots=True)
class _Directory:
    """One directory on the stack from the top to the directory that is being counted."""

    ino: int
    sums: FileSums
    below: "array[int] | None" = None
    """Its subdirectories that are not yet counted; None before it was read."""
    failure: CachefsError | None = None


@dataclass(frozen=True, slots=True)
class DirectorySums:
    """The sums over a directory. `failure` is the reason why some of its names may be missing."""

    ino: int
    sums: FileSums
    failure: CachefsError | None


class CacheTree:
    """The names and the cache of one mount."""

    def __init__(self, namespace: Namespace, cache: BlockCache) -> None:
        self.namespace = namespace
        self._objects = cache.objects

    async def find(self, parts: Sequence[bytes]) -> Inode:
        """Return the inode of a path below the mountpoint, as a look-up through the kernel finds
        it. Raises `CachefsError`."""
        inode = self.namespace.inode(ROOT_INO)
        for name in parts:
            if not inode.is_dir:
                raise NotADirError("not a directory")
            try:
                inode, _ = await self.namespace.lookup(inode.ino, name)
            except NotFoundError:
                raise NotFoundError(NO_SUCH_FILE) from None
        return inode

    async def refs(
        self, top: Inode, list_unknown: bool = False
    ) -> AsyncGenerator[list[ObjectRef], None]:
        """Yield the file, or all files below the directory, in batches.

        With `list_unknown`, directories that were never listed are listed first. Without, only
        known names count.
        """
        if not top.is_dir:
            yield [self.namespace.object_ref(top)]
            return
        directories = array("Q", [top.ino])
        while directories:
            ino = directories.pop()
            if list_unknown:
                await self.list_once(ino)
            async with aclosing(self._names(ino)) as batches:
                async for batch in batches:
                    directories.extend(inode.ino for inode in batch if inode.is_dir)
                    files = [inode for inode in batch if not inode.is_dir]
                    if files:
                        yield [self.namespace.object_ref(inode) for inode in files]

    async def sums_below(self, top: Inode) -> AsyncGenerator[DirectorySums, None]:
        """Yield the sums of each directory at or below `top`. A directory follows its
        subdirectories, so `top` comes last. Directories that were never listed are listed."""
        stack = [_Directory(top.ino, FileSums())]
        while stack:
            here = stack[-1]
            if here.below is None:
                here.below = array("Q")
                await self._count(here)
            if here.below:
                stack.append(_Directory(here.below.pop(), FileSums()))
                continue
            stack.pop()
            if stack:
                stack[-1].sums.add(here.sums)
            yield DirectorySums(here.ino, here.sums, here.failure)

    async def _count(self, here: _Directory) -> None:
        """Count the directory's own files, and collect its subdirectories."""
        assert here.below is not None
        here.sums.directories += 1
        try:
            await self.list_once(here.ino)
        except CachefsError as error:
            here.failure = error
        if (inode := self.namespace.table.get(here.ino)) is not None:
            here.sums.unshown_keys = self.namespace.unshown_in(inode)
        async with aclosing(self._names(here.ino)) as batches:
            async for batch in batches:
                files = [inode for inode in batch if not inode.is_dir]
                here.below.extend(inode.ino for inode in batch if inode.is_dir)
                here.sums.add(await self.sums_of(files))
        here.below.reverse()  # `sums_below` takes them from the end

    async def sums_of(self, files: Sequence[Inode]) -> FileSums:
        """Return the sums over these files."""
        sums = FileSums()
        for inode in files:
            ref = self.namespace.object_ref(inode)
            where = await self._objects.where(ref)
            sums.files += 1
            sums.size_bytes += inode.size_bytes
            sums.blocks += ref.block_count
            sums.cached_files += where.size_bytes >= inode.size_bytes
            sums.cached_bytes += where.size_bytes
            sums.cached_blocks += where.blocks
            sums.pinned_bytes += where.pinned_bytes
            for share in where.tiers:
                tier = sums.tiers.setdefault(str(share.path), TierSums(share.medium.value))
                tier.blocks += share.blocks
                tier.size_bytes += share.size_bytes
                tier.pinned_bytes += share.pinned_bytes
        return sums

    async def list_once(self, ino: int) -> None:
        """List the directory unless it was ever listed completely. Raises the listing's error."""
        if self.namespace.table.listing(ino) is None:
            snapshot = self.namespace.open_directory(ino)
            await snapshot.wait_for_end()
            await snapshot.has(len(snapshot))

    async def _names(self, ino: int) -> AsyncGenerator[list[Inode], None]:
        """Yield the inodes of the directory's known names, in batches."""
        table = self.namespace.table
        after: bytes | None = None
        while True:
            batch: list[Inode] = []
            count = 0
            for name, dirent in table.dirents(ino, after):
                after = name
                count += 1
                inode = table.get(dirent.ino)
                if inode is not None:
                    batch.append(inode)
                if count == _BATCH_NAMES:
                    break
            if batch:
                yield batch
            if count < _BATCH_NAMES:
                return
            await trio.lowlevel.checkpoint()


def parts_of(path: str) -> list[bytes]:
    """Split a path below the mountpoint into names. Raises `UsageError` for a path with `..`, a
    zero byte, or characters that can't be encoded."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise UsageError(f"{path!r}: a path must not contain .. or zero bytes")
    try:
        return [part.encode("utf-8", "surrogateescape") for part in parts]
    except UnicodeEncodeError:
        raise UsageError(f"{path!r} is no path: it is not valid Unicode") from None
