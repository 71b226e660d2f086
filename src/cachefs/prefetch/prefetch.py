"""The prefetchers of a mount, and its readers, which report each first read to them."""

from collections.abc import Callable
from typing import Literal

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch.whole_files import WholeFile
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.reader import Readers
from cachefs.prefetch.bug_reports import report_bug
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.order import OrderPrefetcher
from cachefs.prefetch.shards import Shards
from cachefs.prefetch.siblings import SiblingPrefetcher, Throttle

PrefetchMode = Literal["off", "order", "siblings"]
"""The values of `--prefetch`."""


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
        throttle: Throttle,
        readahead_bytes: int,
        mode: PrefetchMode,
    ) -> None:
        """`may_fetch()` returns False while the origin is overloaded or unavailable. `throttle`
        makes the fetches of siblings give way to readers."""
        self.readers = Readers(
            namespace,
            cache,
            readahead_bytes,
            self._note_first_read,
            self._note_read,
            self._note_load,
        )
        self._shards = Shards(namespace, cache, nursery, self.readers.drop)
        self.hints = Hints(namespace, cache, nursery, may_fetch, self.readers.drop)
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._look_ups = look_ups
        self._may_fetch = may_fetch
        self._throttle = throttle
        self._order: OrderPrefetcher | None = None
        self._siblings: SiblingPrefetcher | None = None
        self._mode: PrefetchMode = "off"
        self._start(mode)

    @property
    def mode(self) -> PrefetchMode:
        """Which files are fetched ahead without hints; it can be changed."""
        return self._mode

    @mode.setter
    def mode(self, mode: PrefetchMode) -> None:
        if mode != self._mode:
            self._start(mode)

    def _start(self, mode: PrefetchMode) -> None:
        """End the prefetchers of the present mode, and start those of `mode`."""
        if self._order is not None:
            self._order.stop()
        if self._siblings is not None:
            self._siblings.stop()
        self._mode = mode
        self._look_ups.is_on = mode != "off"
        self._order = self._siblings = None
        namespace, cache, nursery = self._namespace, self._cache, self._nursery
        budget = None
        if mode == "siblings":
            self._siblings = SiblingPrefetcher(
                namespace, cache, nursery, self._may_fetch, self._throttle
            )
            budget = self._siblings.budget
            nursery.start_soon(self._siblings.run)
        if mode != "off":
            self._order = OrderPrefetcher(namespace, cache, nursery, self._may_fetch, budget)

    def _note_first_read(self, inode: Inode) -> None:
        try:
            self._look_ups.note_first_read(inode)
            self.hints.note_first_read(inode)
            self._shards.note_first_read(inode)
            if self._siblings is not None:
                self._siblings.note_first_read(inode)
            if self._order is not None:
                self._order.note_first_read(inode)
        except Exception as error:
            report_bug(error)

    def _note_load(self, inode: Inode, file: WholeFile) -> None:
        if self._mode == "off":
            return
        try:
            self._shards.note_load(inode, file)
        except Exception as error:
            report_bug(error)

    def _note_read(self, inode: Inode) -> None:
        if self._siblings is None:
            return
        try:
            self._siblings.note_read(inode)
        except Exception as error:
            report_bug(error)
