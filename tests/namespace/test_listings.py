"""Directories: streamed, kept for a TTL, swept, and their times."""

import math
import threading
from contextlib import suppress

import pytest
import trio
import trio.testing

from cachefs.db import ChangedRows, database
from cachefs.errors import NotFoundError, OriginError, OriginUnavailableError
from cachefs.namespace.directories.snapshot import DirectorySnapshot
from cachefs.namespace.namespace import ROOT_INO, Ttls
from cachefs.origin.names import Pages
from cachefs.types import Entry, ObjectMeta
from tests.namespace.harness import ScriptedOrigin, Tree, WallClock


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(page_size=10)


def fill(origin: ScriptedOrigin, count: int, directory: str = "") -> list[str]:
    names = [f"{number:04}" for number in range(count)]
    for name in names:
        origin.put(directory + name, b"x")
    return names


async def read_to_end(snapshot: DirectorySnapshot) -> list[str]:
    names = []
    while await snapshot.has(len(names)):
        names.append(snapshot.entry(len(names))[0].decode())
    return names


async def test_a_reader_gets_the_first_page_while_the_second_is_on_its_way(
    tree: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock
) -> None:
    fill(origin, 35)
    origin.delay_s = 1
    began = trio.current_time()
    snapshot = tree.namespace.open_directory(ROOT_INO)
    times = []
    position = 0
    while await snapshot.has(position):
        times.append(trio.current_time() - began)
        position += 1
    assert times == [1] * 10 + [2] * 10 + [3] * 10 + [4] * 5
    assert len(snapshot) == 35


async def test_a_cold_name_does_not_wait_for_a_long_listing(
    tree: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock
) -> None:
    fill(origin, 100)
    origin.delay_s = 1
    began = trio.current_time()
    snapshot = tree.namespace.open_directory(ROOT_INO)
    await snapshot.has(0)
    inode = await tree.find("0099")
    assert trio.current_time() - began == 2
    assert len(await read_to_end(snapshot)) == 100
    assert trio.current_time() - began == 10
    assert snapshot.entry(99) == (b"0099", inode.ino)


async def test_readers_share_one_listing(
    tree: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock
) -> None:
    names = fill(origin, 35)
    origin.delay_s = 1
    found: list[list[str]] = []

    async def read() -> None:
        found.append(await tree.names())

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(read)
            await trio.sleep(0.3)
    assert found == [names] * 10
    assert origin.take_requests() == [("list", "")]


async def test_a_listing_is_kept_for_its_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 15)
    assert await tree.names() == names
    origin.put("zz", b"x")
    clock.advance(99)
    assert await tree.names() == names
    assert origin.take_requests() == [("list", "")]
    clock.advance(2)
    assert await tree.names() == [*names, "zz"]
    assert origin.take_requests() == [("list", "")]


async def test_names_of_a_listing_need_no_look_up(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    fill(origin, 15)
    entries = await tree.entries()
    clock.advance(90)
    for name, ino in entries.items():
        inode, ttl_s = await tree.namespace.lookup(ROOT_INO, name)
        assert inode.ino == ino
        assert ttl_s == pytest.approx(10)
    assert origin.take_requests() == [("list", "")]


async def test_listing_again_without_a_change_writes_one_row_and_renews_all_names(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 50)
    entries = await tree.entries()
    mtime_ns = tree.mtime_ns()
    await tree.db.commit()
    clock.advance(101)
    assert await tree.entries() == entries
    assert tree.db.pending_count == 1, "the listing's own row"
    assert tree.mtime_ns() == mtime_ns
    assert tree.unbound == []
    origin.take_requests()
    clock.advance(90)
    assert (await tree.namespace.lookup(ROOT_INO, names[7].encode()))[1] == pytest.approx(10)
    assert origin.take_requests() == []


async def test_the_mtime_moves_exactly_when_the_listing_changes(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    origin.put("d/f", b"x")
    await tree.names()
    seen = [tree.mtime_ns()]

    async def relist(moves: bool) -> None:
        clock.advance(101)
        await tree.names()
        assert (tree.mtime_ns() != seen[-1]) == moves
        assert tree.mtime_ns() >= seen[-1], "never backwards"
        seen.append(tree.mtime_ns())

    await relist(moves=False)
    origin.put("b", b"x")
    await relist(moves=True)
    await relist(moves=False)
    origin.put("b", b"xy")
    await relist(moves=True)
    origin.put("d/g", b"x")
    await relist(moves=False)
    origin.delete("b")
    await relist(moves=True)
    origin.delete_tree("d")
    await relist(moves=True)
    await relist(moves=False)


async def test_the_mtime_moves_when_a_look_up_finds_a_change(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.restart(Ttls(1, 1, 1, 100))
    fill(origin, 2_000)
    await tree.names()
    before = tree.mtime_ns()
    clock.advance(2)
    await tree.find("0001")
    assert tree.mtime_ns() == before
    origin.put("0001", b"xy")
    clock.advance(2)
    inode = await tree.find("0001")
    changed = tree.mtime_ns()
    assert changed > before
    assert (await tree.entries())[b"0001"] == inode.ino, "the kept listing shows it too"
    origin.delete("0001")
    clock.advance(2)
    with pytest.raises(NotFoundError):
        await tree.find("0001")
    assert tree.mtime_ns() > changed
    assert b"0001" not in await tree.entries()


async def test_names_that_vanished_are_swept(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 25)
    await tree.names()
    for name in names[::2]:
        origin.delete(name)
    clock.advance(101)
    assert await tree.names() == names[1::2]
    assert sorted(tree.unbound) == [(ROOT_INO, name.encode()) for name in names[::2]]
    origin.take_requests()
    with pytest.raises(NotFoundError):
        await tree.find(names[0])
    assert origin.take_requests() == []


@pytest.mark.parametrize("known_before", [False, True])
async def test_names_found_during_a_listing_are_not_swept(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, known_before: bool
) -> None:
    names = fill(origin, 25)
    if known_before:
        await tree.names()
        clock.advance(101)

    async def create(path: str, page: int) -> None:
        if page == 2:
            origin.put("0000a", b"x")
            await tree.find("0000a")

    origin.before_page = create
    assert await tree.names() == names, "its page had passed already"
    origin.before_page = None
    found = await tree.find("0000a")
    assert found.size_bytes == 1
    assert tree.unbound == []
    clock.advance(101)
    assert (await tree.entries())[b"0000a"] == found.ino


async def test_a_name_replaced_during_a_listing_is_shown_as_it_is_now(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin, 25)

    async def replace(path: str, page: int) -> None:
        if page == 1:
            origin.put("0022", b"xyz")
            await tree.find("0022")

    origin.before_page = replace
    entries = await tree.entries()
    inode = await tree.find("0022")
    assert inode.size_bytes == 3
    assert entries[b"0022"] == inode.ino


async def test_an_older_look_up_is_swept_by_a_first_listing(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    """Its answer arrives during the listing, and was given before the listing began."""
    origin.put("a", b"x")
    fill(origin, 25)
    looking = trio.Event()
    listing = trio.Event()

    async def hold_answer(path: str) -> None:
        looking.set()
        await listing.wait()

    async def let_go(path: str, page: int) -> None:
        if page == 1:
            listing.set()
            await trio.testing.wait_all_tasks_blocked()

    origin.after_stat = hold_answer
    origin.before_page = let_go
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tree.find, "a")
        await looking.wait()
        origin.delete("a")
        clock.advance(1)
        names = await tree.names()
    assert "a" not in names
    with pytest.raises(NotFoundError):
        await tree.find("a")


async def test_a_failed_listing_is_told_to_its_readers_and_tried_again_by_the_next(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    names = fill(origin, 35)

    async def fail(path: str, page: int) -> None:
        if page == 2:
            origin.fail_next(1, OriginUnavailableError("no luck"))

    origin.before_page = fail
    snapshot = tree.namespace.open_directory(ROOT_INO)
    assert await snapshot.has(19)
    errors = []
    for _ in range(2):
        with pytest.raises(OriginUnavailableError, match="no luck") as caught:
            await snapshot.has(20)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert tree.namespace.table.listing(ROOT_INO) is None
    origin.before_page = None
    assert await tree.names() == names


async def test_a_failed_listing_forgets_no_name(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 25)
    await tree.names()
    clock.advance(101)
    origin.fail_next(1, OriginUnavailableError("no luck"))
    with pytest.raises(OriginUnavailableError):
        await tree.names()
    assert tree.unbound == []
    assert await tree.names() == names


async def test_a_directory_that_is_gone_says_so_and_an_empty_root_is_empty(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    assert await tree.names() == []
    origin.put("d/a", b"x")
    clock.advance(101)
    assert await tree.names() == ["d"]
    directory = await tree.find("d")
    origin.delete_tree("d")
    with pytest.raises(NotFoundError):
        await tree.names(directory.ino)


async def test_a_bug_while_listing_costs_an_error_and_not_the_mount(
    tree: Tree, origin: ScriptedOrigin, expect_log
) -> None:
    expect_log("bug while listing inode 1")
    names = fill(origin, 5)
    origin.fail_next(1, ZeroDivisionError())
    with pytest.raises(Exception, match="internal error"):
        await tree.names()
    assert await tree.names() == names


async def test_a_reader_goes_on_where_it_was_after_its_snapshot_was_evicted(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.namespace.directories.snapshot._KEPT_NAMES", 60)
    fill(origin, 30, "a/")
    fill(origin, 50, "b/")
    first, second = [await tree.find(name) for name in "ab"]
    snapshot = tree.namespace.open_directory(first.ino)
    whole = await read_to_end(snapshot)
    assert tree.namespace.resume_directory(first.ino, snapshot.generation) is snapshot
    await tree.names(second.ino)
    origin.take_requests()
    again = tree.namespace.resume_directory(first.ino, snapshot.generation)
    assert again is not snapshot
    assert again.generation != snapshot.generation
    assert await read_to_end(again) == whole, "the same order, so positions stay right"
    assert origin.take_requests() == []


async def test_a_reader_keeps_its_snapshot_while_the_directory_is_listed_again(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 30)
    old = tree.namespace.open_directory(ROOT_INO)
    await read_to_end(old)
    for name in names[:5]:
        origin.delete(name)
    clock.advance(101)
    assert await tree.names() == names[5:]
    assert tree.namespace.resume_directory(ROOT_INO, old.generation) is old
    assert await read_to_end(old) == names
    gone = [tree.namespace.listed_ino(ROOT_INO, *old.entry(index), old) for index in range(30)]
    assert gone[:5] == [None] * 5
    assert None not in gone[5:]


async def test_a_long_directory_is_read_back_in_pieces_in_order(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.namespace.directories.lister.FILL_CHUNK", 7)
    names = fill(origin, 49)
    await tree.names()
    await tree.restart()
    origin.take_requests()
    snapshot = tree.namespace.open_directory(ROOT_INO)
    assert await read_to_end(snapshot) == names
    assert origin.take_requests() == []


async def test_names_asked_one_by_one_make_a_new_listing_when_that_is_cheaper(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    """A listing costs a request per 1,000 names; so do as many look-ups."""
    for count, limit in ((20, 1), (2_500, 3)):
        directory = f"d{count}"
        names = fill(origin, count, directory + "/")
        ino = (await tree.find(directory)).ino
        await tree.names(ino)
        clock.advance(101)
        origin.take_requests()
        for name in names[: limit + 1]:
            await tree.namespace.lookup(ino, name.encode())
        await trio.testing.wait_all_tasks_blocked()
        asked = origin.take_requests()
        assert [kind for kind, _ in asked].count("stat") == limit + 1
        assert asked.count(("list", directory)) == 1
        for name in names:
            await tree.namespace.lookup(ino, name.encode())
        assert origin.take_requests() == [], "all of them are fresh again"


async def test_a_few_look_ups_never_list(tree: Tree, origin: ScriptedOrigin) -> None:
    """Data sets by file list touch few names of many directories."""
    for name in fill(origin, 30)[:7]:
        await tree.find(name)
    await trio.testing.wait_all_tasks_blocked()
    assert {kind for kind, _ in origin.take_requests()} == {"stat"}


async def test_looking_up_all_of_a_directory_soon_lists_it(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    origin.page_size = 1000
    for name in fill(origin, 900):
        await tree.find(name)
        await trio.testing.wait_all_tasks_blocked()
    kinds = [kind for kind, _ in origin.take_requests()]
    assert (kinds.count("stat"), kinds.count("list")) == (8, 1)


async def test_probing_a_huge_directory_is_given_up_in_time(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    """Looked up from behind: the pages tried from the front help nobody."""
    pages = 0

    async def count(path: str, number: int) -> None:
        nonlocal pages
        pages += 1

    origin.before_page = count
    names = fill(origin, 2000)
    for name in reversed(names[-200:]):
        await tree.find(name)
        await trio.testing.wait_all_tasks_blocked()
    kinds = [kind for kind, _ in origin.take_requests()]
    assert (kinds.count("stat"), kinds.count("list")) == (200, 1)
    assert pages == 16 + 1


async def pause_a_bounded_listing(tree: Tree, origin: ScriptedOrigin) -> list[str]:
    """50 names of which a bounded listing has seen a page."""
    names = fill(origin, 50)
    for name in reversed(names[-8:]):
        await tree.find(name)
    await trio.testing.wait_all_tasks_blocked()
    assert origin.take_requests().count(("list", "")) == 1
    return names


async def test_a_listing_goes_on_where_a_bounded_listing_has_paused(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    names = await pause_a_bounded_listing(tree, origin)
    origin.delete(names[0])  # it is seen for as long as what the bounded listing has found is good
    assert await tree.names() == names
    assert origin.take_requests() == []
    for name in names[:-9]:
        await tree.find(name)
    assert origin.take_requests() == [], "all is known now"


async def test_what_a_look_up_finds_while_a_bounded_listing_is_paused(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    """Its listing is right for the moment when it began; the name is not lost with its end."""
    names = await pause_a_bounded_listing(tree, origin)
    origin.put("000", b"new")
    await tree.find("000")
    await tree.names()
    assert origin.take_requests() == [("stat", "000")]
    assert await tree.names() == ["000", *names]


async def test_what_is_gone_does_not_come_back_with_a_pause_a_bounded_listing(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    names = await pause_a_bounded_listing(tree, origin)
    origin.delete(names[20])  # stands on the page that has come and was not taken in
    with pytest.raises(NotFoundError):
        await tree.find(names[20])
    assert names[20] not in await tree.names()
    with pytest.raises(NotFoundError):
        await tree.find(names[20])


async def test_a_listing_that_paused_long_ago_is_not_gone_on_with(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = await pause_a_bounded_listing(tree, origin)
    origin.delete(names[0])
    clock.advance(31)
    assert await tree.names() == names[1:]
    assert origin.take_requests() == [("list", "")]


async def test_who_wants_a_new_listing_does_not_get_a_paused_one(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = await pause_a_bounded_listing(tree, origin)
    origin.delete(names[0])
    clock.advance(1)
    snapshot = await tree.namespace.listed_since(ROOT_INO, tree.namespace.clock.now_ns())
    assert len(snapshot) == 49
    assert origin.take_requests() == [("list", "")]


async def test_many_paused_listings(tree: Tree, origin: ScriptedOrigin) -> None:
    """Only the latest are kept."""
    for directory in range(20):
        names = fill(origin, 50, f"d{directory}/")
    for directory in range(20):
        ino = (await tree.find(f"d{directory}")).ino
        for name in reversed(names[-8:]):
            await tree.namespace.lookup(ino, name.encode())
        await trio.testing.wait_all_tasks_blocked()
    origin.take_requests()
    for directory in range(20):
        ino = (await tree.find(f"d{directory}")).ino
        assert len(await tree.names(ino)) == 50
    lists = [path for kind, path in origin.take_requests() if kind == "list"]
    assert lists == [f"d{directory}" for directory in range(5)], "the root's is one of 16, too"


async def test_a_reader_who_joins_a_bounded_listing_gets_all_of_it(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    go_on = trio.Event()

    async def hold(path: str, number: int) -> None:
        await go_on.wait()

    origin.before_page = hold
    names = fill(origin, 50)
    for name in names[:8]:
        await tree.find(name)
    await trio.testing.wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_expect_names, tree, names)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()


async def _expect_names(tree: Tree, names: list[str]) -> None:
    assert sorted(await tree.names(ROOT_INO)) == sorted(names)


async def test_a_listing_believed_for_ever(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    await tree.restart(Ttls(math.inf, math.inf, math.inf, math.inf))
    names = fill(origin, 12)
    assert await tree.names() == names
    origin.put("new", b"x")
    clock.advance(1e9)
    assert await tree.names() == names
    snapshot = tree.namespace.open_directory(ROOT_INO)
    assert tree.namespace.snapshot_ttl_s(snapshot) == math.inf
    assert origin.take_requests() == [("list", "")]


async def test_names_that_are_not_utf8_come_through(tree: Tree, origin: ScriptedOrigin) -> None:
    odd = b"\xff\xfe caf\xe9"
    origin.put(odd.decode("utf-8", "surrogateescape"), b"xyz")
    assert list(await tree.entries()) == [odd]
    inode, _ = await tree.namespace.lookup(ROOT_INO, odd)
    assert inode.size_bytes == 3
    assert tree.namespace.table.path(inode).encode("utf-8", "surrogateescape") == odd


async def test_a_name_that_is_listed_twice_is_shown_once(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    fill(origin, 25)
    list_dir = origin.list_dir

    def repeated(path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        pages = [list_dir(path), list_dir(path)]

        async def next_page() -> list[Entry] | None:
            while pages:
                with suppress(StopAsyncIteration):
                    return await anext(pages[0])
                del pages[0]
            return None

        return Pages(next_page)

    origin.list_dir = repeated  # type: ignore[method-assign]
    names = await read_to_end(tree.namespace.open_directory(ROOT_INO))
    assert names == [f"{number:04}" for number in range(25)]


async def test_a_listing_that_repeats_itself_for_ever_is_an_error(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    async def same_page() -> list[Entry] | None:
        await trio.lowlevel.checkpoint()
        return [Entry("a", ObjectMeta(1, 0, "v"))]

    origin.list_dir = lambda path, below=None: Pages(same_page)  # type: ignore[method-assign]
    with trio.fail_after(300), pytest.raises(OriginError, match="same names"):
        await read_to_end(tree.namespace.open_directory(ROOT_INO))


async def test_a_job_waits_for_a_slow_disk_and_a_reader_does_not(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = fill(origin, 2000)
    monkeypatch.setattr(database, "_MUCH_PENDING", 500)
    released = threading.Event()
    write = tree.db._write

    def slow_write(batch: dict[str, ChangedRows]) -> None:
        released.wait(60)
        write(batch)

    monkeypatch.setattr(tree.db, "_write", slow_write)
    most_pending = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tree.namespace.listed_since, ROOT_INO, 0)
        with trio.fail_after(300):
            while not tree.db.is_behind:  # noqa: ASYNC110 - it has no event
                await trio.sleep(0.001)
            nursery.start_soon(tree.db.commit)
            for _ in range(200):
                await trio.sleep(0.001)
                most_pending = max(most_pending, tree.db.pending_count)
            assert 500 < most_pending < 1000, "the job goes no further"
            assert await read_to_end(tree.namespace.open_directory(ROOT_INO)) == names
        assert tree.db.pending_count > 2000
        released.set()


@pytest.fixture
def short_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.namespace.directories.snapshot._MOST_AHEAD", 20)


async def test_a_listing_waits_for_its_readers(
    tree: Tree, origin: ScriptedOrigin, short_lead: None, autojump_clock: trio.testing.MockClock
) -> None:
    names = fill(origin, 95)
    snapshot = tree.namespace.open_directory(ROOT_INO)
    assert await snapshot.has(0)
    await trio.sleep(20)
    assert len(snapshot) == 30
    assert await snapshot.has(29)
    await trio.sleep(20)
    assert len(snapshot) == 50
    assert tree.namespace.open_directory(ROOT_INO) is snapshot
    assert await read_to_end(snapshot) == names
    assert await read_to_end(tree.namespace.open_directory(ROOT_INO)) == names
    assert origin.requests.count(("list", "")) == 1


async def test_a_listing_without_readers_is_given_up(
    tree: Tree, origin: ScriptedOrigin, short_lead: None, autojump_clock: trio.testing.MockClock
) -> None:
    names = fill(origin, 95)
    snapshot = tree.namespace.open_directory(ROOT_INO)
    assert await snapshot.has(0)
    await trio.sleep(100)
    with pytest.raises(OriginError, match="nobody read on"):
        await read_to_end(snapshot)
    assert await read_to_end(tree.namespace.open_directory(ROOT_INO)) == names


async def test_a_new_reader_does_not_get_an_old_listing_that_was_left(
    tree: Tree, origin: ScriptedOrigin, short_lead: None, autojump_clock: trio.testing.MockClock
) -> None:
    fill(origin, 95)
    left = tree.namespace.open_directory(ROOT_INO)
    assert await left.has(0)
    await trio.sleep(20)
    origin.put("0000a", b"x")
    tree.clock.advance(1000)
    assert "0000a" in await read_to_end(tree.namespace.open_directory(ROOT_INO))
    await trio.sleep(100)
    assert left.ended
    assert tree.namespace.open_directory(ROOT_INO) is not left


async def test_jobs_that_wait_for_the_end_hold_nothing_up(
    tree: Tree, origin: ScriptedOrigin, short_lead: None, autojump_clock: trio.testing.MockClock
) -> None:
    fill(origin, 95)
    with trio.fail_after(20):
        assert len(await tree.namespace.listed_since(ROOT_INO, tree.clock.now_ns())) == 95


async def test_a_listing_without_an_end_fails(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.namespace.directories.lister._MOST_NAMES", 50)
    fill(origin, 95)
    with pytest.raises(OriginError, match="more than 50 names"):
        await read_to_end(tree.namespace.open_directory(ROOT_INO))
