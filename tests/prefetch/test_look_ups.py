"""Which look-ups bring the file along, and what becomes of its bytes."""

import pytest
import trio
import trio.testing

from cachefs.namespace.reader import Readers
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.types import Buffer, Found, ObjectMeta
from tests.namespace.harness import Reading, ScriptedOrigin, Tree

SIZE_BYTES = 20_000


class Bringing(ScriptedOrigin):
    """An origin that gives small files with their attributes; `brought` are their paths."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[str] = []

    async def stat_and_read(self, path: str) -> tuple[Found, Buffer | None]:
        meta = await self.stat(path)
        if not isinstance(meta, ObjectMeta) or not 0 < meta.size_bytes <= 256 << 10:
            return meta, None
        self.brought.append(path)
        return meta, memoryview(self.expected(path))


@pytest.fixture
def origin() -> Bringing:
    origin = Bringing()
    for number in range(100):
        origin.put_generated(f"d{number % 50}/f{number}", SIZE_BYTES + number, seed=number)
    return origin


@pytest.fixture
def reading(reading: Reading) -> Reading:
    """Readers of a tree whose look-ups may bring files."""
    reads = LookUpReads(reading.cache)
    reading.tree.namespace._look_up_policy = reads
    reading.readers = Readers(reading.tree.namespace, reading.cache, 0, reads.note_first_read)
    return reading


async def read(reading: Reading, path: str) -> None:
    inode = await reading.tree.find(path)
    assert await reading.read(inode.ino, 0, inode.size_bytes) == reading.origin.expected(path)


def paths(first: int, end: int) -> list[str]:
    return [f"d{number % 50}/f{number}" for number in range(first, end)]


async def test_files_that_are_read_come_with_their_look_ups(
    tree: Tree, reading: Reading, origin: Bringing
) -> None:
    for path in paths(0, 50):
        await read(reading, path)
    # Look-ups of directories cost credit, too, and bring nothing: the first file may be late.
    assert len(origin.brought) >= 45
    assert len(reading.gets()) == 50 - len(origin.brought)


async def test_look_ups_without_reads_soon_bring_nothing(
    tree: Tree, reading: Reading, origin: Bringing
) -> None:
    for path in paths(0, 50):
        await tree.find(path)
    assert len(origin.brought) <= 2
    await read(reading, "d0/f50")
    for path in paths(51, 60):
        await read(reading, path)
    assert len(origin.brought) > 5, "reads after look-ups give the credit back"


async def test_a_known_name_is_asked_for_without_its_bytes(
    tree: Tree, reading: Reading, origin: Bringing
) -> None:
    for path in paths(0, 10):
        await read(reading, path)
    brought = list(origin.brought)
    tree.clock.advance(1_000)
    for path in paths(0, 10):
        await read(reading, path)
    assert origin.brought == brought


async def test_a_large_file_is_read_as_ever(tree: Tree, reading: Reading, origin: Bringing) -> None:
    origin.put_generated("large", 3 << 20, seed=1)
    await read(reading, "large")
    assert origin.brought == []


async def test_bytes_that_come_unasked_are_dropped_where_there_is_no_memory(
    tree: Tree, reading: Reading, origin: Bringing
) -> None:
    memory = reading.cache._memory
    assert memory.try_reserve(memory._free_bytes)
    inode = await tree.find("d0/f0")
    assert not reading.cache.is_stored(tree.namespace.object_ref(inode))
    memory.release(memory.total_bytes)
    await read(reading, "d0/f0")
    assert origin.brought


@pytest.mark.parametrize("brings", [True, False])
async def test_a_look_up_that_brings_the_file_does_not_wait_for_a_list(
    tree: Tree, reading: Reading, origin: Bringing, mock_clock: trio.testing.MockClock, brings: bool
) -> None:
    """The eighth look-up in a directory begins a LIST. A look-up of only a name waits for it."""
    for number in range(20):
        origin.put_generated(f"one/f{number}", SIZE_BYTES, seed=number)
    may_list = trio.Event()

    async def hold(path: str, number: int) -> None:
        await may_list.wait()

    origin.before_page = hold
    for number in range(8):
        await read(reading, f"one/f{number}")
    await trio.testing.wait_all_tasks_blocked()
    assert ("list", "one") in origin.requests
    if not brings:
        reading.tree.namespace._look_up_policy._credit = 0
    async with trio.open_nursery() as nursery:
        ended = trio.Event()

        async def look_up() -> None:
            await tree.find("one/f9")
            ended.set()

        nursery.start_soon(look_up)
        if brings:
            await ended.wait()
            assert origin.brought[-1] == "one/f9"
        else:
            await trio.testing.wait_all_tasks_blocked()
            assert not ended.is_set()
        may_list.set()
