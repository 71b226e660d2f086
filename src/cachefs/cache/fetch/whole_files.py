"""Fetches a large file as a whole, because its reader loads all of it.

A reader that takes the tensors of a file in any order gets no read-ahead where it jumps, and would
pay a round trip or two for each tensor. `FileReader` sees that a file is being loaded. From then on
some requests are always under way here: for the blocks that follow the place of the latest read,
and if there are none left, for the rest of the file.

A file that no reader loads yet, but will probably load next, is fetched so while no loaded file has
anything left to request, at the priority of a load.

**Bounds.** A file is fetched only if the cache has free space for it beside the other files that
are fetched as a whole, so nothing is evicted for it and no block comes twice. All files share the
requests. Readers and their blocks go first in every queue (`Priority`). When nobody has read the
file for `_IDLE_S`, when a fetch fails, or when the cache has no space left, it ends, and the reader
goes on without it.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import trio

from cachefs.cache.fetch.fetches import Fetches
from cachefs.cache.fetch.in_flight import InFlightFetch
from cachefs.errors import OriginUnavailableError
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef, Priority, Turn

_EXTENT_BLOCKS, _EXTENT_BLOCKS_FAR = 8, 4
"""Most blocks of one request, for an origin nearby and for a far one. Each request costs the store
and both ends some CPU, but what a reader needs next comes after all that is under way."""
_REQUESTS, _REQUESTS_FAR = 4, 16
"""Most requests under way, in the same order."""
_AT_A_JUMP, _BLOCKS_AT_A_JUMP = 4, 2
"""Requests, and blocks of each, that begin at once when a reader jumps to a block that is not
coming. It would otherwise wait for the requests that are under way elsewhere."""
_MOST_AT_JUMPS = 16
"""Most requests beyond `_REQUESTS_FAR`."""
_LOOKS = 500
"""Blocks to look up in one turn of the event loop: less than 1 ms."""
_IDLE_S = 10.0


class ObjectSlabs(Protocol):
    """The part of `cachefs.cache.object_slabs.ObjectSlabs` that this module uses."""

    def wants(self, ref: ObjectRef, /) -> bool: ...
    def keep(
        self, ref: ObjectRef, may_evict: bool, on_made: Callable[[bool], None], /
    ) -> Awaitable[None]: ...


class WholeFile:
    """One object version that is fetched as a whole, until `is_over`."""

    __slots__ = (
        "_left", "_on_jump", "began_at", "is_next", "on_begun", "over", "place", "read_at", "ready",
        "ref",
    )  # fmt: skip

    def __init__(
        self, ref: ObjectRef, place: int, is_next: bool, on_jump: "Callable[[WholeFile], None]"
    ) -> None:
        self.ref = ref
        self._on_jump = on_jump
        self.is_next = is_next
        """Whether no reader loads the file yet."""
        self.place = place
        """The block of the latest read."""
        self.began_at = self.read_at = trio.current_time()
        self.on_begun: Callable[[range], None] = lambda blocks: None
        """Called with the blocks of each request that begins."""
        self.over = trio.Event()
        """Set when all blocks were requested, or when it has ended before that."""
        self.ready = trio.Event()
        """Set when it is known whether the object has a slab of its own."""
        self._left = bytearray(b"\1") * ref.block_count
        """1 for each block that is not known to be coming."""

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def note(self, block: int) -> None:
        """Note that a request of a reader is for this block."""
        self.place = block
        self.read_at = trio.current_time()
        if self._left[block] and not self.is_over:
            self._on_jump(self)

    @property
    def left_bytes(self) -> int:
        """How many bytes may still have to be fetched, rounded up to blocks."""
        return self._left.count(1) * BLOCK_BYTES

    def next_block(self) -> int:
        """Return the next block to consider: at the latest read or after it, else the first one of
        the file; -1 if none is left."""
        found = self._left.find(1, self.place)
        return found if found >= 0 else self._left.find(1)

    def is_left(self, block: int) -> bool:
        """Whether the block exists and is not known to be coming."""
        return block < len(self._left) and self._left[block] == 1

    def take(self, block: int) -> None:
        """Note that the block is coming or here."""
        self._left[block] = 0


class WholeFiles:
    """The files of one mount that are fetched as a whole; the `BlockCache` owns it. Only the event
    loop's thread may use it."""

    def __init__(
        self,
        fetches: Fetches,
        is_unneeded: Callable[[BlockKey, float], bool],
        has_free_space: Callable[[BlockKey, int, int], bool],
        object_slabs: ObjectSlabs,
    ) -> None:
        """`is_unneeded(key, began_at)`: the block is cached or in flight, or its object was evicted
        after `began_at`. `has_free_space(key, length,
        more_bytes)`: a tier has space for the block and for more bytes, without any eviction."""
        self._fetches = fetches
        self._is_unneeded = is_unneeded
        self._has_free_space = has_free_space
        self._object_slabs = object_slabs
        self._files: OrderedDict[bytes, WholeFile] = OrderedDict()
        self._under_way = 0
        self._is_stopped = False

    def start(self, ref: ObjectRef, place: int, is_next: bool = False) -> WholeFile | None:
        """Begin to fetch the file, first the blocks from `place` on, and return at once. `is_next`
        says that no reader loads it yet. Returns None if there is no space for it, or at shutdown.
        """
        file = self._files.get(ref.object_id)
        if file is not None:
            if not is_next:
                file.is_next, file.place, file.read_at = False, place, trio.current_time()
            return file
        key = BlockKey(ref.object_id, place)
        more_bytes = ref.meta.size_bytes + self._reserved_bytes(next_too=is_next)
        has_space = self._has_free_space(key, BLOCK_BYTES, more_bytes)
        makes_space = not is_next and self._object_slabs.wants(ref)
        nursery = self._fetches.nursery
        if self._is_stopped or nursery is None or not (has_space or makes_space):
            return None
        file = self._files[ref.object_id] = WholeFile(ref, place, is_next, self._jump)
        if has_space and not self._object_slabs.wants(ref):
            file.ready.set()
        else:
            prepared = partial(self._prepared, file, has_space)
            nursery.start_soon(self._object_slabs.keep, ref, not is_next, prepared)
        self._fill()
        return file

    def _prepared(self, file: WholeFile, has_space: bool, has_slab: bool) -> None:
        if not has_space and not has_slab:
            self._end(file)
        file.ready.set()

    def stop(self) -> None:
        """End all files, and begin no requests any more. Those under way continue."""
        self._is_stopped = True
        for file in list(self._files.values()):
            self._end(file)

    def _reserved_bytes(self, next_too: bool) -> int:
        """How many bytes may still have to be fetched of the files that are loaded, and of those
        that are next if `next_too`."""
        files = self._files.values()
        return sum(file.left_bytes for file in files if next_too or not file.is_next)

    def _fill(self) -> None:
        """Begin as many requests as may be under way, of all files in turn."""
        nursery = self._fetches.nursery
        is_far = self._fetches.is_far
        most = _REQUESTS_FAR if is_far else _REQUESTS
        extent_blocks = _EXTENT_BLOCKS_FAR if is_far else _EXTENT_BLOCKS
        while nursery is not None and self._files and self._under_way < most:
            file = min(self._files.values(), key=lambda file: file.is_next)  # the first of them
            self._files.move_to_end(file.ref.object_id)
            self._under_way += 1
            nursery.start_soon(self._fetch_next, file, extent_blocks)

    def _jump(self, file: WholeFile) -> None:
        """Fetch the blocks after the latest read at once. The reader fetches its own block."""
        nursery = self._fetches.nursery
        if nursery is not None and self._fetches.is_far:
            most = min(_AT_A_JUMP, _REQUESTS_FAR + _MOST_AT_JUMPS - self._under_way)
            for _ in range(most):
                self._under_way += 1
                nursery.start_soon(self._fetch_next, file, _BLOCKS_AT_A_JUMP)

    def _extent_blocks(self, file: WholeFile, first: int, most: int) -> int:
        """Return how many blocks from `first` on are requested together, up to `most`. All requests
        share the line, so a block that is needed soon must not be in a large one: requests grow
        with their distance from the latest read."""
        most = min(most, int(self._fetches.best_read_bytes // BLOCK_BYTES))
        if first >= file.place:
            most = min(most, (first - file.place) // 2)
        return max(1, most)

    async def _fetch_next(self, file: WholeFile, most: int) -> None:
        """Fetch the next extent of the file, of up to `most` blocks, or note that it is over. Then
        let others follow."""
        try:
            await file.ready.wait()
            first = await self._next_missing(file)
            if file.is_over or first < 0 or not self._may_go_on(file, first):
                self._end(file)
            else:
                fetch = self._begin(file, first, most)
                await fetch.done.wait()
                if fetch.error is not None:
                    self._end(file)
        except OriginUnavailableError:
            self._end(file)  # the cache is shutting down
        finally:
            self._under_way -= 1
        self._fill()

    def _end(self, file: WholeFile) -> None:
        file.over.set()
        if self._files.get(file.ref.object_id) is file:
            del self._files[file.ref.object_id]

    def _begin(self, file: WholeFile, first: int, most: int) -> InFlightFetch:
        end = first + 1
        most = self._extent_blocks(file, first, most)
        while end < first + most and file.is_left(end) and not self._has(file, end):
            end += 1
        for block in range(first, end):
            file.take(block)
        turn = Turn(Priority.LOAD if file.is_next else Priority.READ_AHEAD)
        fetch = self._fetches.start(
            file.ref, first, end - first, turn, ahead=True, into_free_space=True
        )
        file.on_begun(range(first, end))
        return fetch

    async def _next_missing(self, file: WholeFile) -> int:
        """Return the next block that must be fetched; -1 if none is left. There is no await between
        the look at this block and the return."""
        looks = 0
        while (block := file.next_block()) >= 0 and self._has(file, block):
            file.take(block)
            looks += 1
            if looks % _LOOKS == 0:
                await trio.lowlevel.checkpoint()
        return block

    def _has(self, file: WholeFile, block: int) -> bool:
        return self._is_unneeded(BlockKey(file.ref.object_id, block), file.began_at)

    def _may_go_on(self, file: WholeFile, block: int) -> bool:
        key = BlockKey(file.ref.object_id, block)
        if file.is_next:
            reserved_bytes = self._reserved_bytes(next_too=False)
            return self._has_free_space(key, BLOCK_BYTES, reserved_bytes)
        is_idle = trio.current_time() > file.read_at + _IDLE_S
        return not is_idle and self._has_free_space(key, BLOCK_BYTES, 0)
