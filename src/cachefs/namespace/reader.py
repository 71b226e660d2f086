"""Reads file versions: maps byte ranges to blocks, and decides about read-ahead.

A reader belongs to an inode, not to an open file: the kernel's page cache makes one stream of
requests from many open files, and some data paths have no open at all. Several streams in one file
(workers that read different parts) are distinguished by their positions.

Read-ahead: a stream that enters block after block gets a window that doubles up to
`readahead_bytes` and is fetched in extents of up to 8 MiB. If the origin is far, one request brings
few bytes per second. The window then quadruples (that of a file of model weights has 16 blocks at
once), and is fetched in up to 16 requests at a time, which are renewed one by one. Random reads
never start a window: they fetch only the blocks that they touch. Small files have one block and
need no read-ahead. With a large window, the relay serves most of what was fetched ahead
(`Publisher.publish_ahead`), and this process sees few requests.

Loads: a reader that takes long runs at several places of a file, or some MiB of a file of model
weights, needs the rest, too. Such a file is fetched as a whole (`cache/fetch/whole_files.py`), and
its streams are not followed meanwhile. What is fetched so is served by the relay in the same way.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from cachefs.cache.block_cache import BlockCache, Replying
from cachefs.cache.fetch.whole_files import WholeFile
from cachefs.cache.publisher import SEEN_EVERY
from cachefs.errors import CachefsError, NotFoundError, ObjectChangedError
from cachefs.format.inode_record import Inode
from cachefs.namespace.load_signs import HEAD_BYTES, UNKNOWN_SHARE, share_before_load
from cachefs.namespace.namespace import Namespace
from cachefs.types import BLOCK_BYTES, BlockKey, Buffer, ObjectRef, Priority, Reply

log = logging.getLogger(__name__)

_BLOCK_SHIFT = 20
_BLOCK_MASK = BLOCK_BYTES - 1
assert 1 << _BLOCK_SHIFT == BLOCK_BYTES

_TOLD_AGAIN_S = 60.0
_EXTENT_BLOCKS = 8
_GROWTH, _FAR_GROWTH = 2, 4
_FAR_REQUESTS = 16
"""Of 30 ms each, with 80 MB/s per connection, they bring 800 MB/s when the window is 64 MiB."""
_STREAMS = 16
_PUBLISHED_FROM = 2 * SEEN_EVERY
"""From this window on, blocks are published ahead. Enough of the window is left whenever this
process sees a request."""
_LOAD_RUNS = 3
"""A file whose first bytes don't say that it has weights does not count as being loaded before
blocks were entered in order and cold in so many streams."""
_SKIM_BLOCKS = 16
"""Programs that want to know what a file of weights has read up to so much from its begin."""
_READERS = 8_192
"""The most readers kept, of some 1.4 KB each. A dropped reader can be made again in some 10 us."""


OnLoad = Callable[[Inode, WholeFile], None]
PublishAhead = Callable[[int, ObjectRef, range], None]
"""See `Publisher.publish_ahead`."""


class _Stream:
    """A run of consecutive blocks: `head` is the last block entered, the blocks before `ahead` are
    already requested, `run` blocks were entered in order, and `window` is the read-ahead in
    blocks. `is_cold` says that read-ahead has found something to fetch."""

    __slots__ = ("ahead", "first", "head", "is_cold", "run", "window")

    def __init__(self, head: int) -> None:
        self.first = self.head = head
        self.ahead = head + 1
        # A random read rarely hits the first block of a file, so that block counts as the first of
        # a sequence: one more block starts read-ahead.
        self.run = 1 if head == 0 else 0
        self.window = 1
        self.is_cold = False

    @property
    def step(self) -> int:
        """How many blocks further the next request of this stream may be: the relay may serve
        those between."""
        return SEEN_EVERY if self.window >= _PUBLISHED_FROM else 1


class FileReader:
    """The read state of one file version, owned by `Readers`."""

    __slots__ = (
        "_cache",
        "_cold_blocks",
        "_on_load",
        "_publish_ahead",
        "_runs",
        "_share",
        "_streams",
        "_whole",
        "inode",
        "is_new",
        "max_window",
        "ref",
    )

    def __init__(
        self,
        cache: BlockCache,
        inode: Inode,
        ref: ObjectRef,
        max_window: int,
        publish_ahead: PublishAhead,
        on_load: OnLoad = lambda inode, file: None,
    ) -> None:
        """`on_load(inode, file)` is called when the file begins to be fetched as a whole. It must
        not call back, and must not wait."""
        self._cache = cache
        self._publish_ahead = publish_ahead
        self._on_load = on_load
        self.max_window = max_window
        self._streams: list[_Stream] = []
        self._runs = self._cold_blocks = 0
        """How many streams were cold, and how many blocks readers have entered in them in order."""
        self._share: float | None = None
        """See `share_before_load`; None if it is not known yet."""
        self._whole: WholeFile | None = None
        self.is_new = True
        """Whether no `Readers.read` has asked for its first byte yet."""
        self.inode = inode
        self.ref = ref

    def read_now(self, offset: int, size: int) -> Buffer | None:
        """Return the bytes if they are cached, in memory, and in one block. Return None if the
        caller must call `read`.

        The buffer is valid until the next await or call.
        """
        size_bytes = self.ref.meta.size_bytes
        if offset + size > size_bytes:
            size = size_bytes - offset
            if size <= 0:
                return b""
        block = offset >> _BLOCK_SHIFT
        self.enter(block)
        start = offset & _BLOCK_MASK
        if start + size > BLOCK_BYTES:
            return None
        return self._cache.read_block_now(BlockKey(self.ref.object_id, block), start, size)

    def enter(self, block: int) -> None:
        """Note that a request enters a block, for read-ahead."""
        if self.max_window and self.ref.block_count > 1:
            self._advance(block)

    async def read(self, offset: int, size: int) -> Buffer:
        """Return `size` bytes from `offset`, fewer only at the end of the file. Call this only
        after `read_now` has returned None for the same range.

        Raises the origin's error, or `ObjectChangedError` if the origin has another version.
        """
        end = min(offset + size, self.ref.meta.size_bytes)
        block, start = offset >> _BLOCK_SHIFT, offset & _BLOCK_MASK
        if start + end - offset <= BLOCK_BYTES:
            is_random = self._is_random(block)
            return await self._cache.read_block(self.ref, block, start, end - offset, is_random)
        # The blocks after the first, too: a far origin would otherwise answer one after the other.
        more = -(-(start + end - offset) // BLOCK_BYTES) - 1
        self._cache.fetch(self.ref, block + 1, more, priority=Priority.READER)
        left = found = memoryview(bytearray(end - offset))
        while left:
            block, start = offset >> _BLOCK_SHIFT, offset & _BLOCK_MASK
            length = min(len(left), BLOCK_BYTES - start)
            key = BlockKey(self.ref.object_id, block)
            if self._cache.read_block_now(key, start, length, left) is None:
                left[:length] = await self._cache.read_block(self.ref, block, start, length)
            offset += length
            left = left[length:]
        return found

    def _advance(self, block: int) -> None:
        """Note that a request enters `block`, and fetch ahead if its stream is sequential."""
        if self._whole is not None:
            self._whole.note(block)
            if not self._whole.is_over:
                return
            self._whole = None
        stream = self._stream_of(block)
        if block <= stream.head:
            return
        stream.run += 1
        stream.head = block
        if stream.run < 2:
            return
        self._read_ahead(stream)
        if stream.is_cold:
            self._cold_blocks += 1
            if self._is_load(stream):
                self._runs = self._cold_blocks = 0
                self._whole = self._cache.fetch_whole(self.ref, block)
                if self._whole is not None:
                    ino, ref = self.inode.ino, self.ref
                    self._whole.on_begun = partial(self._publish_ahead, ino, ref)
                    self._on_load(self.inode, self._whole)

    def _read_ahead(self, stream: _Stream) -> None:
        """Fetch ahead of a sequential stream if that is due."""
        block = stream.head
        if stream.ahead <= block:
            stream.ahead = block + 1
        left_blocks = stream.ahead - block
        is_far = self._cache.origin_is_far
        if left_blocks <= stream.window // 2 + 1:
            growth = _GROWTH
            if is_far:
                growth = _FAR_REQUESTS if self._share_before_load() == 0 else _FAR_GROWTH
            stream.window = min(stream.window * growth, self.max_window)
        elif not (is_far and self._is_extent_due(stream, left_blocks)):
            return
        self._fetch_ahead(stream, _far_extent(stream) if is_far else _EXTENT_BLOCKS)

    def _is_load(self, stream: _Stream) -> bool:
        """Whether the reader of this stream seems to need the whole file."""
        share = self._share_before_load()
        if share == 0:
            return stream.first > 0 or stream.head >= _SKIM_BLOCKS
        return self._runs >= _LOAD_RUNS and self._cold_blocks >= share * self.ref.block_count

    def _share_before_load(self) -> float:
        """Return what `share_before_load` says of the first bytes of the file, if they are here."""
        if self._share is None:
            key, head = BlockKey(self.ref.object_id, 0), memoryview(bytearray(HEAD_BYTES))
            found = self._cache.read_block_now(key, 0, HEAD_BYTES, head)
            if found is not None:
                self._share = share_before_load(bytes(found), self.ref.meta.size_bytes)
        return UNKNOWN_SHARE if self._share is None else self._share

    def _is_extent_due(self, stream: _Stream, left_blocks: int) -> bool:
        """Whether the window has its full size and room for one more GET."""
        is_full_size = stream.window == self.max_window
        return is_full_size and left_blocks <= stream.window + 1 - _far_extent(stream)

    def _is_random(self, block: int) -> bool:
        """Whether no stream reads in order at this block. Without read-ahead, streams are not
        distinguished, and all reads count as sequential, as in a file of one block."""
        if not self.max_window or self.ref.block_count == 1 or self._whole is not None:
            return False
        return not any(
            stream.run and stream.head - 2 <= block <= stream.head + 1 for stream in self._streams
        )

    def _stream_of(self, block: int) -> _Stream:
        """Return the stream that this block continues (requests arrive slightly out of order),
        else a new one, which replaces the least recently used."""
        for index, stream in enumerate(self._streams):
            if stream.head - 2 <= block <= stream.head + stream.step:
                if index:
                    del self._streams[index]
                    self._streams.insert(0, stream)
                return stream
        stream = _Stream(block)
        self._streams.insert(0, stream)
        del self._streams[_STREAMS:]
        return stream

    def _fetch_ahead(self, stream: _Stream, extent_blocks: int) -> None:
        """Fetch the missing blocks from `ahead` to the end of the window, in GETs of up to
        `extent_blocks`."""
        end = min(stream.head + 1 + stream.window, self.ref.block_count)
        first = stream.ahead
        while first < end:
            if self._is_coming(first):
                first += 1
                continue
            count = 1
            while (
                count < extent_blocks and first + count < end and not self._is_coming(first + count)
            ):
                count += 1
            self._cache.fetch(self.ref, first, count)
            first += count
            if not stream.is_cold:
                stream.is_cold = True
                self._runs += 1
        if stream.window >= _PUBLISHED_FROM:
            self._publish_ahead(self.inode.ino, self.ref, range(stream.ahead, first))
        stream.ahead = first

    def _is_coming(self, block: int) -> bool:
        return self._cache.is_cached_or_inflight(BlockKey(self.ref.object_id, block))


def _far_extent(stream: _Stream) -> int:
    """Return how many blocks one GET brings when the origin is far."""
    return min(max(stream.window // _FAR_REQUESTS, 1), _EXTENT_BLOCKS)


class Readers:
    """The readers of a mount by inode number. When there are too many, the oldest are dropped."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        readahead_bytes: int,
        on_first_read: Callable[[Inode], None] = lambda inode: None,
        on_read: Callable[[Inode], None] = lambda inode: None,
        on_load: OnLoad = lambda inode, file: None,
    ) -> None:
        """`on_first_read(inode)` is called when a file is read for the first time, and each later
        time that `read` asks for its first byte. `on_read(inode)` is called after each `read` that
        has returned the first byte. `on_load`: see `FileReader`. They must not call back, and must
        not wait."""
        self._on_load = on_load
        self._on_first_read = on_first_read
        self._on_read = on_read
        self._namespace = namespace
        self._cache = cache
        self._max_window = -(-readahead_bytes // BLOCK_BYTES)
        self._readers: OrderedDict[int, FileReader] = OrderedDict()
        namespace.table.on_unnamed.append(self.drop)  # a replaced file is hardly read any more
        self.publish_ahead: PublishAhead = lambda ino, ref, blocks: None
        """Called with blocks that are fetched ahead of a long sequential read."""
        self._stale_reads = 0
        self._told_at_s = -math.inf

    @property
    def readahead(self) -> int:
        """The most bytes to read ahead; it can be changed."""
        return self._max_window * BLOCK_BYTES

    @readahead.setter
    def readahead(self, size_bytes: int) -> None:
        self._max_window = -(-size_bytes // BLOCK_BYTES)
        for reader in self._readers.values():
            reader.max_window = self._max_window

    def get(self, ino: int) -> FileReader:
        """Return the reader of this inode, or make one. Raises `ObjectChangedError` if the inode's
        record is gone."""
        reader = self._readers.get(ino)
        if reader is None:
            inode = self._namespace.inode(ino)
            ref = self._namespace.object_ref(inode)
            reader = self._readers[ino] = FileReader(
                self._cache, inode, ref, self._max_window, self.publish_ahead, self._on_load
            )
            if len(self._readers) > _READERS:
                self._readers.popitem(last=False)
            self._on_first_read(inode)
        return reader

    def new(self, inode: Inode, ref: ObjectRef) -> FileReader:
        """Return a reader of this version that is not kept: its inode is about to change."""
        return FileReader(self._cache, inode, ref, self._max_window, self.publish_ahead)

    def drop_all(self) -> None:
        """Drop all readers: paths have changed."""
        self._readers.clear()

    def drop(self, ino: int) -> None:
        """Drop the reader. The next read of this file counts as the first."""
        self._readers.pop(ino, None)

    async def read(self, reader: FileReader, offset: int, size: int) -> Buffer:
        """Do the same as `FileReader.read`. If the object turns out to be replaced or gone, look it
        up again at once, so that the next open gets the present version.

        Raises `ObjectChangedError` in both cases: this version is no longer available.
        """
        if offset == 0:
            if not reader.is_new:
                self._on_first_read(reader.inode)
            reader.is_new = False
        try:
            data = await reader.read(offset, size)
        except (ObjectChangedError, NotFoundError) as error:
            self._tell_stale(error)
            await self._namespace.note_object_changed(reader.inode)
            raise ObjectChangedError(str(error)) from error
        if offset == 0:
            self._on_read(reader.inode)
        return data

    def reply(
        self, reader: FileReader, reply: Reply, on_replied: Callable[[bool], None]
    ) -> Replying | None:
        """Begin to answer a READ without a task: see `BlockCache.reply`. Return None if the caller
        must use `read`, as also later if `on_replied` is called with False."""
        reader.enter(reply.offset >> _BLOCK_SHIFT)
        is_first = reply.offset == 0
        if not is_first:
            return self._cache.reply(reader.ref, reply, on_replied)
        inode = reader.inode
        replying: Replying | None = None

        def end(is_replied: bool) -> None:
            if not is_replied and replying == "wait":
                reader.is_new = True  # `read` of the same READ is no other one
            on_replied(is_replied)
            if is_replied and replying == "wait":
                self._on_read(inode)

        replying = self._cache.reply(reader.ref, reply, end)
        if replying == "wait":
            if not reader.is_new:
                self._on_first_read(inode)
            reader.is_new = False
        return replying

    def _tell_stale(self, error: CachefsError) -> None:
        """Log a read that gets ESTALE, at most once a minute. The kernel has the old size already,
        so it can't get the new version's bytes instead."""
        self._stale_reads += 1
        if trio.current_time() - self._told_at_s >= _TOLD_AGAIN_S:
            self._told_at_s = trio.current_time()
            log.info(
                "a read failed with ESTALE, because the origin has another version: %s; open the "
                "file again to read that; %d such reads so far (shorter TTLs make them fewer)",
                error,
                self._stale_reads,
            )
