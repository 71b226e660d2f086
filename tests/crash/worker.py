"""A process that serves a cache until it is killed, and the server that forks such processes.

The server (`python -m tests.crash.worker`) imports everything and makes the files once; each line
on its standard input, an `Order`, is one fork. It answers with the worker's pid, and when that has
ended with its wait status.
"""

import os
import random
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.tier import cooldown
from cachefs.cache.tier import store as store_module
from cachefs.db.database import Database
from cachefs.errors import CacheDirError
from cachefs.types import ObjectRef
from tests.cache.faulty_disk import UndoDisk
from tests.cache.harness import read_whole
from tests.crash.load import COUNTED, TIERS, Order, Tally, open_tiers
from tests.memory_origin import MemoryOrigin

READERS = 6
FAILURE_NAME = "failure"
"""In the order's root: what went wrong in a worker."""
TALLY_NAME = "tally"
_TALLY_INTERVAL_S = 0.01


class Worker:
    def __init__(
        self, order: Order, origin: MemoryOrigin, files: dict[str, list[ObjectRef]]
    ) -> None:
        self._order = order
        self._origin = origin
        self._files = files
        self._root = Path(order.root)
        self._random = random.Random(order.seed)
        self._tally = Tally(self._root / TALLY_NAME)
        self._reads = self._commits = self._changes = 0
        undo_file = order.undo_file
        self._disk = UndoDisk(Path(undo_file)) if undo_file is not None else None
        self._gone: list[tuple[int, ...]] = []
        """What tiers had counted that have left."""

    async def run(self) -> None:
        order = self._order
        self._patch()
        tiers = open_tiers(self._root, order.tiers, self._disk)
        cache = BlockCache(self._origin, tiers, order.policy)
        async with trio.open_nursery() as nursery:
            await nursery.start(cache.run)
            with trio.move_on_after(order.close_after_s or 60):
                async with trio.open_nursery() as readers:
                    readers.start_soon(self._note, cache)
                    for _ in range(READERS):
                        readers.start_soon(self._read, cache, self._random.randrange(1 << 30))
                    readers.start_soon(self._steer, cache)
                    if order.resizing:
                        readers.start_soon(self._change, cache)
            await cache.aclose()

    def _patch(self) -> None:
        store_module.COMMIT_INTERVAL_S = self._order.commit_interval_s
        store_module._RECENCY_INTERVAL_S = 0.1
        cooldown.COOLDOWN_S = self._order.cooldown_s
        end_commit = Database._end_commit

        def count(database: Database, committed: bool) -> None:
            self._commits += committed
            end_commit(database, committed)

        Database._end_commit = count

    async def _read(self, cache: BlockCache, seed: int) -> None:
        choice = random.Random(seed)
        kinds, weights = list(self._order.kinds), list(self._order.kinds.values())
        while True:
            (kind,) = choice.choices(kinds, weights)
            # Some files are read much more often than others: those are promoted.
            number = int(len(self._files[kind]) * choice.random() ** 2)
            ref = self._files[kind][number]
            if await read_whole(cache, ref) != self._origin.expected(ref.path):
                raise AssertionError(f"wrong bytes of {ref.path}")
            self._reads += 1
            await trio.lowlevel.checkpoint()

    async def _change(self, cache: BlockCache) -> None:
        """Quotas up and down, and now and then a tier goes and comes back."""
        choice = random.Random(self._order.seed + 1)
        while True:
            await trio.sleep(choice.uniform(0.005, 0.06))
            name = choice.choice(self._order.tiers)
            path, quota_bytes = self._root / name, TIERS[name][1]
            if choice.random() < 0.8:
                with suppress(CacheDirError):  # more than that is pinned
                    await cache.resize_tier(path, quota_bytes * choice.randint(1, 6) // 4)
            else:
                self._gone += _counted(cache, path)
                await cache.remove_tier(path)
                await trio.sleep(choice.uniform(0, 0.02))
                (tier,) = open_tiers(self._root, [name], self._disk)
                try:
                    await cache.add_tier(tier)
                except CacheDirError:
                    if cache._nursery is not None:
                        raise
                    tier.close()  # closed meanwhile
                    return
            self._changes += 1

    async def _steer(self, cache: BlockCache) -> None:
        """Files are pinned, and no longer, and dropped."""
        choice = random.Random(self._order.seed + 2)
        while True:
            await trio.sleep(choice.uniform(0.002, 0.03))
            some = choice.sample(self._files["small"], 8)
            drawn = choice.random()
            if drawn < 0.6:
                with cache.admission_filter.pinning(some):
                    await cache.objects.pin(some)
                    await trio.sleep(0.002)
            elif drawn < 0.8:
                await cache.objects.unpin(some)
            else:
                await cache.objects.evict(some, pinned_too=drawn < 0.85)

    async def _note(self, cache: BlockCache) -> None:
        while True:
            rows = [*self._gone]
            for status in cache.status():
                rows += _counted(cache, Path(status.path))
            sums = [sum(column) for column in zip(*rows, strict=True)]
            self._tally.write(
                **dict(zip(COUNTED[2:-1], sums, strict=True)),
                reads=self._reads,
                commits=self._commits,
                changes=self._changes,
            )
            await trio.sleep(_TALLY_INTERVAL_S)


def _counted(cache: BlockCache, path: Path) -> list[tuple[int, ...]]:
    return [
        tuple(getattr(status.counters, name) for name in COUNTED[2:-1])
        for status in cache.status()
        if status.path == str(path)
    ]


def serve() -> None:
    from tests.crash.load import make_origin

    origin, files = make_origin()
    for line in sys.stdin:
        order = Order.decode(line)
        pid = os.fork()
        if pid == 0:
            _be_worker(order, origin, files)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def _be_worker(order: Order, origin: MemoryOrigin, files: dict[str, list[ObjectRef]]) -> None:
    status = 1
    try:
        trio.run(Worker(order, origin, files).run)
        status = 0
    except BaseException:
        Path(order.root, FAILURE_NAME).write_text(traceback.format_exc())
    finally:
        os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve()
