"""The additional objects of a mount behind the relay."""

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import Publisher
from cachefs.errors import CachefsError
from cachefs.namespace.reader import Readers
from cachefs.supervisor.link import Link
from cachefs.types import BlockKey


class Relayed:
    """The daemon's side of the relay's table; the mount owns it.

    It must be created before anything is written to a slab: this invalidates all blocks that the
    previous daemon published to the relay.
    """

    def __init__(self, link: Link) -> None:
        from cachefs.fuse.relay import _relay  # not compiled in every installation

        self.table = _relay.Table(link.table_fd)
        self._link = link

    def publisher(self, cache: BlockCache, readers: Readers) -> Publisher:
        """Return the object that publishes blocks to the relay. The caller must start its `run`."""

        def key_of(ino: int, block: int) -> BlockKey | None:
            try:
                return BlockKey(readers.get(ino).ref.object_id, block)
            except CachefsError:
                return None

        return Publisher(cache, self.table, self._link, key_of)
