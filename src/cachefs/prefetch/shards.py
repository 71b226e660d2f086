"""Fetching the next shards of a model: large models are files that an index beside them names.

transformers and its relatives split the weights of a model into `NAME-00001-of-00030.safetensors`
and so on, with `NAME.safetensors.index.json` beside them
(https://huggingface.co/docs/transformers/big_models). When a reader loads one of these files, the
others follow. They are fetched in the order of their names, one at a time, while no file that a
reader loads has anything left to request.

**Bounds.** A reader may need only some shards (its share of a pipeline). So not more shards are
fetched ahead and unread than were read, or one. Nothing is evicted for them. The index comes from
outside and may say anything: its size and the number of its names are limited, and only plain names
in its own directory count.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch.whole_files import WholeFile
from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.prefetch.bug_reports import report_bug
from cachefs.prefetch.shard_index import SUFFIX, ShardIndex
from cachefs.types import ObjectRef

_NUMBERED = re.compile(rb"-\d{5}-of-\d{5}\.safetensors\Z")
_USUAL_INDEX = b"model.safetensors.index.json"
_MOST_INDEX_BYTES = 64 << 20
"""The index of a model with 90,000 tensors has 9 MB."""
_MOST_SHARDS = 4_096
_PIECE_BYTES = 64 << 10
"""Bytes of an index that are looked at in one turn of the event loop: less than 1 ms."""
_MODELS = 16
"""Most models whose shards are fetched at a time."""
_IDLE_S = 60.0
"""How long to wait for a reader of the shards that were fetched ahead."""


@dataclass(slots=True, eq=False)
class _Model:
    """The shards of one directory; `Shards` owns it."""

    unread: set[bytes] = field(default_factory=set)
    """Names of shards that no reader has opened since the model began to be loaded."""
    read_count: int = 1
    ahead: set[bytes] = field(default_factory=set)
    """Names of shards that were fetched ahead, and not read yet."""
    changed: trio.Event = field(default_factory=trio.Event)

    def note_read(self, name: bytes) -> None:
        if name in self.unread:
            self.unread.discard(name)
            self.ahead.discard(name)
            self.read_count += 1
            self.changed.set()

    async def wait_for_room(self) -> bool:
        """Wait until one more shard may be fetched ahead. Returns False if no reader comes."""
        while len(self.ahead) >= self.read_count:
            self.changed = trio.Event()
            with trio.move_on_after(_IDLE_S) as waited:
                await self.changed.wait()
            if waited.cancelled_caught:
                return False
        return True


class Shards:
    """The models that are loaded through one mount; its `Prefetch` owns it. It runs on the event
    loop, and only tasks in `nursery` wait."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        forget_reader: Callable[[int], None],
    ) -> None:
        """`forget_reader(ino)` makes the next read of a file count as its first."""
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._forget_reader = forget_reader
        self._models: OrderedDict[int, _Model] = OrderedDict()
        """By the inode number of the directory."""

    def note_load(self, inode: Inode, file: WholeFile) -> None:
        """Note that a reader loads this file. Begin to fetch the other shards of its model."""
        model = self._models.get(inode.parent)
        if model is not None:
            model.note_read(inode.name)
        elif inode.name.endswith(SUFFIX) and len(self._models) < _MODELS:
            self._models[inode.parent] = model = _Model()
            self._nursery.start_soon(self._run, model, inode, file)

    def note_first_read(self, inode: Inode) -> None:
        """Note the first read of this file."""
        model = self._models.get(inode.parent)
        if model is not None:
            model.note_read(inode.name)

    async def _run(self, model: _Model, inode: Inode, file: WholeFile) -> None:
        try:
            await self._fetch_others(model, inode, file)
        except (CachefsError, LookupError):
            pass  # a wrong index is no error, and readers get their own errors
        except Exception as error:
            report_bug(error)
        finally:
            del self._models[inode.parent]

    async def _fetch_others(self, model: _Model, inode: Inode, file: WholeFile) -> None:
        """Fetch the shards that follow the file, then those before it. `file` is its state."""
        names = await self._shards_with(inode)
        model.unread = set(names)
        for name in sorted(names, key=lambda name: (name < inode.name, name)):
            await file.over.wait()
            if file.left_bytes or not await model.wait_for_room():
                return  # the cache is full, the origin fails, or the reader has ended
            shard, _ = await self._namespace.lookup(inode.parent, name)
            if not await self._is_wanted(shard):
                continue
            started = self._cache.fetch_whole(self._namespace.object_ref(shard), 0, is_next=True)
            if started is None:
                return  # there is no space
            file = started
            if name in model.unread:
                model.ahead.add(name)
                self._forget_reader(shard.ino)

    async def _is_wanted(self, shard: Inode) -> bool:
        if shard.is_dir or not shard.size_bytes:
            return False
        return await self._cache.cached_fraction(self._namespace.object_ref(shard)) < 1

    # -- the index -----------------------------------------------------------------------------

    async def _shards_with(self, inode: Inode) -> set[bytes]:
        """Return the names of the other shards of this file's model; none if no index names it."""
        stem, count = _NUMBERED.subn(b"", inode.name)
        candidates = [stem + b".safetensors.index.json"] if count else []
        for name in dict.fromkeys([*candidates, _USUAL_INDEX]):
            try:
                index, _ = await self._namespace.lookup(inode.parent, name)
            except CachefsError:
                continue
            if not index.is_dir and index.size_bytes <= _MOST_INDEX_BYTES:
                names = await self._names_in(self._namespace.object_ref(index))
                if inode.name in names and len(names) <= _MOST_SHARDS:
                    return names - {inode.name}
        return set()

    async def _names_in(self, index: ObjectRef) -> set[bytes]:
        """Return the names in an index, or somewhat more than `_MOST_SHARDS` of them."""
        found = ShardIndex()
        for block in range(index.block_count):
            if len(found.names) > _MOST_SHARDS:
                break
            length = index.block_length(block)
            data = bytes(await self._cache.read_block(index, block, 0, length))
            for at in range(0, length, _PIECE_BYTES):
                found.add(data[at : at + _PIECE_BYTES])
                await self._cache.give_way()
        return found.names
