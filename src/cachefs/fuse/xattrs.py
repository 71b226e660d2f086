"""Extended attributes (getfattr): a file's version, its cached percentage, and its source URL."""

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
    """The read-only extended attributes. A directory has only `SOURCE`."""

    def __init__(self, namespace: Namespace, cache: BlockCache) -> None:
        self._namespace = namespace
        self._cache = cache

    def names(self, inode: Inode) -> list[bytes]:
        """Return the names of the inode's attributes."""
        return [SOURCE] if inode.is_dir else [VERSION, CACHED, SOURCE]

    async def get(self, inode: Inode, name: bytes) -> bytes | None:
        """Return the value, or None if there is no such attribute.

        `CACHED` is in whole percent, rounded down, so 100 means that the whole file is cached.
        """
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
