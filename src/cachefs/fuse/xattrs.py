"""What a user may ask about a file with getfattr: its version, how much of it is cached, and
where it comes from."""

from cachefs.cache.block_cache import BlockCache
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace

USER_PREFIX = b"user."
PREFIX = USER_PREFIX + b"cachefs."
VERSION = PREFIX + b"version"
CACHED = PREFIX + b"cached"
SOURCE = PREFIX + b"source"
HINT = PREFIX + b"hint."


class Xattrs:
    """Read-only extended attributes. Directories have a source and nothing else."""

    def __init__(self, namespace: Namespace, cache: BlockCache) -> None:
        self._namespace = namespace
        self._cache = cache

    def names(self, inode: Inode) -> list[bytes]:
        return [SOURCE] if inode.is_dir else [VERSION, CACHED, SOURCE]

    async def get(self, inode: Inode, name: bytes) -> bytes | None:
        """The value, or None if there is no such attribute. `cached` is in whole percent,
        rounded down, so that 100 means all of it."""
        if name == SOURCE:
            return self._namespace.source_url(inode).encode("utf-8", "surrogateescape")
        if inode.is_dir:
            return None
        if name == VERSION:
            return inode.version.encode("utf-8", "surrogateescape")
        if name == CACHED:
            fraction = await self._cache.cached_fraction(self._namespace.object_ref(inode))
            return str(int(fraction * 100)).encode()
        return None
