"""Directories where the kernel keeps them whole: what it shows is never older than it would be if
it asked each time, and it asks once per TTL."""

import math
from dataclasses import replace

import pytest
import trio
import trio.testing

from cachefs.errors import NotFoundError, OriginUnavailableError
from cachefs.namespace.clock import coarse_ns
from cachefs.namespace.namespace import ROOT_INO, Ttls
from tests.namespace.harness import TTLS, Kernel, ScriptedOrigin, Tree, WallClock

STALE = replace(TTLS, stale_if_error_s=math.inf)
DOWN = OriginUnavailableError("no answer from fake://test")
LIST = [("list", "")]
is_logged = pytest.mark.expect_log("the origin does not answer")


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(page_size=10)


@pytest.fixture
async def kernel(tree: Tree) -> Kernel:
    tree.no_open = True
    await tree.restart(STALE)
    return tree.kernel


def fill(origin: ScriptedOrigin, count: int) -> list[str]:
    names = [f"{number:04}" for number in range(count)]
    for name in names:
        origin.put(name, b"x")
    return names


async def test_an_unchanged_directory_is_read_and_listed_once_per_ttl(
    kernel: Kernel, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 35)
    assert await kernel.names() == names
    assert kernel.take_messages() == ["getattr", "readdir"]
    for _ in range(3):
        for _ in range(9):
            clock.advance(11)
            assert await kernel.names() == names
        assert "readdir" not in kernel.take_messages()
        assert origin.take_requests() == LIST
        clock.advance(2)
        assert await kernel.names() == names
        assert kernel.take_messages() == ["getattr", "readdir"]
    clock.advance(12345)
    assert await kernel.names() == names
    assert kernel.take_messages() == ["getattr", "readdir"]
    assert origin.take_requests() == LIST * 2


@pytest.mark.parametrize("attr_s", [1.0, 7.0, 100.0, 5000.0, math.inf])
async def test_changes_are_seen_when_the_list_ttl_ends(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel, attr_s: float
) -> None:
    await tree.restart(replace(STALE, attr_s=attr_s))
    fill(origin, 15)
    kernel.mtime_ns()
    clock.advance(50)
    before = await kernel.entries()
    assert await kernel.entries() == before
    origin.put("new", b"x")
    origin.put("0001", b"xyz")
    origin.delete("0002")
    clock.advance(100.1)
    after = await kernel.entries()
    assert after.keys() - before.keys() == {b"new"}
    assert before.keys() - after.keys() == {b"0002"}
    assert after[b"0001"] != before[b"0001"]
    for number in range(5):
        origin.put(f"late{number}", b"x")
        clock.advance(100.1)
        assert f"late{number}" in await kernel.names()


async def test_who_lists_a_fresh_directory_has_the_kernel_read_it_when_its_names_expire(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    """Reading renews all names at once; without it each would have to be looked up."""
    names = fill(origin, 5)
    assert await kernel.names() == names
    mtime_ns = kernel.mtime_ns()
    clock.advance(50)
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())
    kernel.take_messages()
    assert await kernel.names() == names
    assert kernel.take_messages() == []
    clock.advance(51)
    assert await kernel.names() == names
    assert kernel.take_messages() == ["getattr", "readdir"]
    assert kernel.mtime_ns() == mtime_ns + 1
    assert origin.take_requests() == LIST * 2


async def test_a_stale_directory_shows_another_mtime_once_per_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    """What `stat` shows, without anybody who reads the directory."""
    await tree.names()
    seen = []
    for _ in range(7):
        seen.append(kernel.mtime_ns())
        clock.advance(50)
    assert [mtime_ns - seen[0] for mtime_ns in seen] == [0, 0, 1, 1, 2, 2, 3]


@is_logged
async def test_the_time_of_a_directory_is_that_of_its_last_change(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    """Whatever the kernel must read again. `coarse_ns` of the mtime is what it shows as ctime."""
    fill(origin, 15)
    await kernel.names()
    seen = {coarse_ns(kernel.mtime_ns())}

    async def look() -> None:
        mtime_ns = kernel.mtime_ns()
        await kernel.names()
        for shown_ns in (mtime_ns, kernel.mtime_ns()):
            assert shown_ns >= mtime_ns, "never backwards"
            seen.add(coarse_ns(shown_ns))

    for seconds in (1, 99, 1, 250, 1_000_000):  # within and after TTLs
        clock.advance(seconds)
        await look()
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())  # a refresh
    await look()
    clock.advance(200)
    origin.down = DOWN
    await look()
    clock.advance(1000)
    await look()
    origin.down = None
    await tree.restart(STALE)
    await look()
    await tree.restart(replace(STALE, list_s=0))
    for _ in range(3):
        clock.advance(5)
        await look()
    assert len(seen) == 1
    origin.put("new", b"x")
    await look()
    assert len(seen) == 2
    assert max(seen) == coarse_ns(clock.now_ns())


async def test_on_the_python_path_the_mtime_stays(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.names()
    mtime_ns = tree.mtime_ns()
    clock.advance(250)
    assert tree.namespace.directory_mtime(ROOT_INO, mtime_ns) == (mtime_ns, 100)
    await tree.names()
    assert tree.mtime_ns() == mtime_ns


async def test_a_first_listing_moves_no_mtime_and_one_that_finds_a_loss_does(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    origin.put("d/a", b"x")
    origin.put("e/a", b"x")
    d, e = await tree.find("d"), await tree.find("e")
    await tree.find("e/a")
    origin.delete("e/a")
    origin.put("e/b", b"x")
    clock.advance(50)
    assert await tree.names(d.ino) == ["a"]
    assert await tree.names(e.ino) == ["b"]
    assert tree.mtime_ns(d.ino) == d.mtime_ns
    assert tree.mtime_ns(e.ino) > e.mtime_ns


async def test_what_a_look_up_has_found_is_shown_without_a_listing(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    await tree.restart(replace(STALE, attr_s=1, entry_s=1))
    fill(origin, 2_000)
    before = await kernel.entries()
    clock.advance(2)
    origin.put("0003", b"xyz")
    origin.delete("0004")
    found = await tree.find("0003")
    with pytest.raises(NotFoundError):
        await tree.find("0004")
    after = before | {b"0003": found.ino}
    del after[b"0004"]
    assert await kernel.entries() == after
    assert origin.take_requests().count(("list", "")) == 1


async def test_what_somebody_else_has_listed_reaches_the_kernel_within_the_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    """A listing whose names are all known already hides none of them from the kernel."""
    names = fill(origin, 5)
    assert await kernel.names() == names
    clock.advance(90)
    origin.put("new", b"x")
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())
    clock.advance(11)
    assert await kernel.names() == [*names, "new"]


@pytest.mark.parametrize("was_listed", [False, True])
async def test_a_name_found_while_its_directory_is_listed_is_not_hidden_for_a_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel, was_listed: bool
) -> None:
    names = fill(origin, 25)
    if was_listed:
        assert await kernel.names() == names
        clock.advance(101)

    async def create(path: str, page: int) -> None:
        if page == 2:
            origin.put("0000a", b"x")
            await tree.find("0000a")

    origin.before_page = create
    assert await kernel.names() == names, "its page had passed already"
    origin.before_page = None
    # Somebody else lists it, to whom nothing is new.
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())
    clock.advance(101)
    await tree.namespace.listed_since(ROOT_INO, clock.now_ns())
    assert "0000a" in await kernel.names()


async def test_who_joins_a_listing_late_does_not_believe_it_for_a_whole_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    names = fill(origin, 15)
    shown: list[list[str]] = []

    async def take_long(path: str, page: int) -> None:
        if page == 1:
            clock.advance(60)
            async with trio.open_nursery() as nursery:

                async def join() -> None:
                    shown.append(await kernel.names())

                tree_nursery.start_soon(join)
                nursery.start_soon(trio.testing.wait_all_tasks_blocked)

    origin.before_page = take_long
    async with trio.open_nursery() as tree_nursery:
        tree_nursery.start_soon(tree.names)
    origin.before_page = None
    assert shown == [names]
    origin.put("new", b"x")
    clock.advance(41)
    assert await kernel.names() == [*names, "new"]


# -- outages -----------------------------------------------------------------------------------


@is_logged
async def test_the_end_of_an_outage_is_seen_within_a_second(
    tree: Tree,
    origin: ScriptedOrigin,
    clock: WallClock,
    kernel: Kernel,
    autojump_clock: trio.testing.MockClock,
) -> None:
    names = fill(origin, 15)
    assert await kernel.names() == names
    clock.advance(101)
    kernel.mtime_ns()
    kernel.take_messages()
    origin.down = DOWN
    for _ in range(3):
        assert await kernel.names() == names
        assert await kernel.names() == names
        assert kernel.take_messages().count("readdir") <= 2
        clock.advance(120)
        await trio.sleep(2)
    origin.put("new", b"x")
    origin.down = None
    await trio.sleep(2)
    clock.advance(1.1)
    assert await kernel.names() == [*names, "new"]
    assert await kernel.names() == [*names, "new"]


@is_logged
async def test_an_outage_that_ends_while_the_daemon_is_dead(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    names = fill(origin, 15)
    assert await kernel.names() == names
    clock.advance(101)
    origin.down = DOWN
    assert await kernel.names() == names
    assert await kernel.names() == names
    origin.put("new", b"x")
    origin.down = None
    await tree.restart(STALE)
    clock.advance(1.1)
    assert await kernel.names() == [*names, "new"]


@is_logged
async def test_a_listing_that_fails_half_way_is_not_kept(
    tree: Tree,
    origin: ScriptedOrigin,
    clock: WallClock,
    kernel: Kernel,
    autojump_clock: trio.testing.MockClock,
) -> None:
    names = fill(origin, 25)
    assert await kernel.names() == names
    clock.advance(101)
    origin.delete("0024")

    async def fail(path: str, page: int) -> None:
        if page == 1:
            origin.fail_next(1, DOWN)

    origin.before_page = fail
    assert await kernel.names() == names
    origin.before_page = None
    await trio.sleep(5)
    assert await kernel.names() == names[:-1], "the outage is over"


# -- restarts and clocks -----------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("age_s", [0, 101])
async def test_a_restart_shows_what_the_kernel_keeps_with_the_same_mtime(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel, crash: bool, age_s: float
) -> None:
    names = fill(origin, 15)
    assert await kernel.names() == names
    clock.advance(age_s)
    assert await kernel.names() == names
    await tree.db.commit()
    kernel.take_messages()
    await tree.restart(STALE, crash=crash)
    kernel.invalidate_attributes(ROOT_INO)
    assert await kernel.names() == names
    assert kernel.take_messages() == ["getattr"]


async def test_a_reading_that_goes_on_after_a_restart_is_not_kept(
    tree: Tree, origin: ScriptedOrigin, kernel: Kernel
) -> None:
    """It may have missed a name."""
    fill(origin, 25)
    await tree.names()
    snapshot = tree.namespace.open_directory(ROOT_INO)
    mtime_ns = kernel.mtime_ns()
    await tree.restart(STALE)
    resumed = tree.namespace.resume_directory(ROOT_INO, snapshot.generation)
    assert resumed.generation != snapshot.generation
    assert kernel.mtime_ns() != mtime_ns


async def test_a_clock_that_is_set_back_hides_nothing(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    names = fill(origin, 5)
    assert await kernel.names() == names
    kernel.invalidate_attributes(ROOT_INO)  # its own clock doesn't go back
    clock.advance(-1_000_000)
    for number in range(3):
        origin.put(f"new{number}", b"x")
        names.append(f"new{number}")
        assert await kernel.names() == names
        clock.advance(101)


async def test_list_ttls_of_nothing_and_for_ever(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    await tree.restart(Ttls(attr_s=100, entry_s=100, negative_s=0, list_s=0))
    names = fill(origin, 5)
    for number in range(3):
        origin.put(f"new{number}", b"x")
        names.append(f"new{number}")
        assert await kernel.names() == names
    origin.take_requests()
    await tree.restart(Ttls(attr_s=100, entry_s=100, negative_s=0, list_s=math.inf))
    assert await kernel.names() == names
    origin.put("never", b"x")
    kernel.take_messages()
    for _ in range(3):
        clock.advance(1_000_000)
        assert await kernel.names() == names
    assert "readdir" not in kernel.take_messages()
    assert origin.take_requests() == []


async def test_a_directory_that_is_gone_is_an_error_when_its_ttl_ends(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, kernel: Kernel
) -> None:
    origin.put("d/a", b"x")
    directory = await tree.find("d")
    assert await kernel.names(directory.ino) == ["a"]
    origin.delete_tree("d")
    clock.advance(101)
    with pytest.raises(NotFoundError):
        await kernel.names(directory.ino)
