"""The prefetchers of a mount, and its readers, which report each first read to them."""

from collections.abc import Callable

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.reader import Readers
from cachefs.prefetch.bug_reports import report_bug
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.order import OrderPrefetcher


class Prefetch:
    """The prefetchers of one mount. `readers` are the mount's readers. `hints` receives the paths
    that jobs will read."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        look_ups: LookUpReads,
        may_fetch: Callable[[], bool],
        readahead_bytes: int,
        in_order: bool,
    ) -> None:
        """`may_fetch()` returns False while the origin is overloaded or unavailable. With
        `in_order`, the next files of a directory are fetched for readers in name order."""
        self.readers = Readers(namespace, cache, readahead_bytes, self._note_first_read)
        self.hints = Hints(namespace, cache, nursery, may_fetch, self.readers.drop)
        self._look_ups = look_ups
        self._order = OrderPrefetcher(namespace, cache, nursery, may_fetch) if in_order else None

    def _note_first_read(self, inode: Inode) -> None:
        try:
            self._look_ups.note_first_read(inode)
            self.hints.note_first_read(inode)
            if self._order is not None:
                self._order.note_first_read(inode)
        except Exception as error:
            report_bug(error)
