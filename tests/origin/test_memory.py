"""What the fake can do that no real origin should."""

import pytest
import trio

from cachefs.errors import NotADirError, ObjectChangedError, OriginUnavailableError
from tests.memory_origin import MemoryOrigin
from tests.origin.listing import list_all, list_pages


async def test_delay_runs_on_the_mock_clock(autojump_clock) -> None:
    origin = MemoryOrigin(delay_s=100)
    origin.put("f", b"data")
    meta = await origin.stat("f")
    await origin.read("f", meta, 0, 4)
    assert trio.current_time() == pytest.approx(200)


async def test_fail_next() -> None:
    origin = MemoryOrigin()
    meta = origin.put("f", b"data")
    origin.fail_next(2, OriginUnavailableError("down"))
    for _ in range(2):
        with pytest.raises(OriginUnavailableError):
            await origin.read("f", meta, 0, 4)
    assert await origin.read("f", meta, 0, 4) == b"data"
    assert origin.counters.errors == 2


async def test_on_read_may_mutate() -> None:
    origin = MemoryOrigin()
    meta = origin.put("f", b"data")

    async def replace(path: str, offset: int, length: int) -> None:
        origin.put(path, b"other")

    origin.on_read = replace
    assert await origin.read("f", meta, 0, 4) == b"data"
    with pytest.raises(ObjectChangedError):
        await origin.read("f", meta, 0, 4)


async def test_generated_content() -> None:
    origin = MemoryOrigin()
    meta = origin.put_generated("huge", 1 << 40, seed=7)
    at = (1 << 39) + 1234
    assert bytes(await origin.read("huge", meta, at, 10_000)) == origin.expected("huge", at, 10_000)
    whole = origin.expected("huge", 0, 20_000)
    assert origin.expected("huge", 5000, 9000) == whole[5000:14_000]
    assert len(whole) == 20_000


async def test_twins_and_odd_keys() -> None:
    origin = MemoryOrigin(page_size=2)
    for key in ["full", "full/x", "empty/x", "a//b", "/lead", "..", "dir/"]:
        origin.put(key, b"1")
    origin.put("empty", b"")
    listed = await list_all(origin)
    assert sorted(listed) == ["a", "dir", "empty", "full"]
    for name, entry in listed.items():
        assert await origin.stat(name) == entry.meta
    assert origin.counters.unshown_keys == 2
    assert sum(origin.counters.unshown_in_dir.values()) == 2
    assert await list_all(origin, "dir") == {}
    assert [len(page) for page in await list_pages(origin)] == [2, 2]


async def test_delete_tree() -> None:
    origin = MemoryOrigin()
    origin.put("d/e/f", b"1")
    origin.put("d2", b"1")
    origin.delete_tree("d")
    assert list(await list_all(origin)) == ["d2"]
    with pytest.raises(NotADirError):
        await list_all(origin, "d2")
