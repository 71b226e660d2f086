"""What a mount behind the relay has on top of any other."""

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.sharing import SharedBlocks
from cachefs.errors import CachefsError
from cachefs.fuse.relay.figures import RelayFigures
from cachefs.fuse.watchers import Watchers
from cachefs.metrics import Requests
from cachefs.namespace.reader import Readers
from cachefs.supervisor.link import Link
from cachefs.types import BlockKey


class Relayed:
    """Made before anything is written to a slab: what the relay was told by the daemon before is
    void from then on."""

    def __init__(self, link: Link) -> None:
        from cachefs.fuse.relay import _relay  # not there in every installation

        self.table = _relay.Table(link.table_fd)
        self._link = link

    def share(self, cache: BlockCache, readers: Readers) -> SharedBlocks:
        """Have the relay serve what it can. The caller starts `run`."""

        def key_of(ino: int, block: int) -> BlockKey | None:
            try:
                return BlockKey(readers.get(ino).ref.object_id, block)
            except CachefsError:
                return None

        return SharedBlocks(cache, self.table, self._link, key_of)

    def figures(self, shared: SharedBlocks, requests: Requests) -> RelayFigures:
        """For those who look at the mount."""
        return RelayFigures(self.table, shared, requests)

    def yield_to(self, watchers: Watchers) -> None:
        """While somebody watches requests, all of them come to us."""
        watchers.on_change = self.table.pause
