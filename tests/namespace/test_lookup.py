"""Look-ups: what is asked, what is believed, for how long, and what becomes of inodes."""

import math
from collections.abc import Callable

import pytest
import trio
import trio.testing

from cachefs.db import Get
from cachefs.errors import (
    AccessDeniedError,
    CacheDirError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginUnavailableError,
)
from cachefs.format.inode_record import KIND_DIR, KIND_FILE, Inode, dirent_key, ino_key, pack_inode
from cachefs.namespace.namespace import ROOT_INO, Ttls
from tests.namespace.harness import NS, TTLS, ScriptedOrigin, Tree, WallClock


async def test_a_name_is_asked_once_and_believed_for_its_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    meta = origin.put("a", b"abc")
    inode, ttl_s = await tree.namespace.lookup(ROOT_INO, b"a")
    assert (inode.size_bytes, inode.version, inode.mtime_ns) == (3, meta.version, meta.mtime_ns)
    assert ttl_s == pytest.approx(100)
    clock.advance(40)
    again, ttl_s = await tree.namespace.lookup(ROOT_INO, b"a")
    assert again == inode
    assert ttl_s == pytest.approx(60)
    assert origin.take_requests() == [("stat", "a")]


async def test_an_unchanged_version_keeps_its_inode_after_the_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"abc")
    before = await tree.find("a")
    clock.advance(101)
    inode, ttl_s = await tree.namespace.lookup(ROOT_INO, b"a")
    assert inode == before
    assert ttl_s == pytest.approx(100)
    assert origin.take_requests() == [("stat", "a"), ("stat", "a")]
    assert tree.unbound == []


async def test_a_changed_version_is_a_new_inode_and_the_kernel_is_told(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"abc")
    before = await tree.find("a")
    origin.put("a", b"defgh")
    assert await tree.find("a") == before
    clock.advance(101)
    after = await tree.find("a")
    assert after.ino != before.ino
    assert (before.size_bytes, after.size_bytes) == (3, 5)
    assert tree.unbound == [(ROOT_INO, b"a")]
    assert tree.namespace.inode(before.ino) == before, "who has it open still needs it"


async def test_a_file_that_becomes_a_directory_and_back_is_a_new_inode_each_time(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    inodes = []
    for _ in range(2):
        origin.put("a", b"abc")
        inodes.append(await tree.find("a"))
        origin.delete("a")
        origin.put("a/b", b"x")
        clock.advance(101)
        inodes.append(await tree.find("a"))
        assert await tree.names(inodes[-1].ino) == ["b"]
        origin.delete_tree("a")
        clock.advance(101)
    assert [inode.is_dir for inode in inodes] == [False, True, False, True]
    assert len({inode.ino for inode in inodes}) == 4


async def test_a_deleted_object_is_gone_after_the_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"abc")
    await tree.find("a")
    origin.delete("a")
    assert (await tree.find("a")).size_bytes == 3
    clock.advance(101)
    with pytest.raises(NotFoundError):
        await tree.find("a")
    assert tree.unbound == [(ROOT_INO, b"a")]


async def test_absence_is_believed_for_the_negative_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    for number in range(1_001):  # more than a page: it is not known as a whole
        origin.put(f"b{number}", b"")
    for wait_s, wanted_s in ((0, 30), (10, 20), (10, 10)):
        clock.advance(wait_s)
        with pytest.raises(NotFoundError):
            await tree.namespace.lookup(ROOT_INO, b"a")
        await trio.testing.wait_all_tasks_blocked()  # one page is tried
        assert tree.namespace.negative_ttl_s(ROOT_INO, b"a") == pytest.approx(wanted_s)
    assert origin.take_requests() == [("stat", "a"), ("list", "")]
    origin.put("a", b"x")
    clock.advance(11)
    assert (await tree.find("a")).size_bytes == 1
    assert tree.namespace.negative_ttl_s(ROOT_INO, b"a") == 0


async def test_after_one_absent_name_a_small_directory_is_known(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    """As Python looks for a module: by one suffix after the other."""
    origin.put("package/__init__.py", b"x")
    package = (await tree.find("package")).ino
    origin.take_requests()
    for suffix in (b".cpython-311-x86_64-linux-gnu.so", b".abi3.so", b".so"):
        with pytest.raises(NotFoundError):
            await tree.namespace.lookup(package, b"__init__" + suffix)
    assert (await tree.namespace.lookup(package, b"__init__.py"))[0].size_bytes == 1
    absent = ("stat", "package/__init__.cpython-311-x86_64-linux-gnu.so")
    assert origin.take_requests() == [absent, ("list", "package")]


async def test_absent_names_below_a_complete_listing_cost_nothing(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    await tree.names()
    origin.take_requests()
    clock.advance(90)
    for name in (b"b", b"c", b"d"):
        with pytest.raises(NotFoundError):
            await tree.namespace.lookup(ROOT_INO, name)
        assert tree.namespace.negative_ttl_s(ROOT_INO, name) == pytest.approx(10)
    await tree.find("a")
    assert origin.take_requests() == []
    clock.advance(11)
    with pytest.raises(NotFoundError):
        await tree.find("b")
    assert origin.take_requests() == [("stat", "b")]


async def test_many_who_look_up_one_name_send_one_request(
    tree: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock
) -> None:
    origin.put("a", b"x")
    origin.delay_s = 1
    found = []

    async def look(name: bytes) -> None:
        try:
            found.append((await tree.namespace.lookup(ROOT_INO, name))[0].ino)
        except NotFoundError:
            found.append(0)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(look, b"a")
            nursery.start_soon(look, b"absent")
    assert len(found) == 100
    assert len(set(found)) == 2
    requests = origin.take_requests()
    assert sorted(requests) == [("list", ""), ("stat", "a"), ("stat", "absent")]


async def test_who_gives_up_takes_nobody_along(
    tree: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock
) -> None:
    origin.put("a", b"x")
    origin.delay_s = 2
    with trio.move_on_after(1) as scope:
        await tree.find("a")
    assert scope.cancelled_caught
    await tree.find("a")
    assert origin.take_requests() == [("stat", "a")]


@pytest.mark.parametrize("error", [OriginUnavailableError, AccessDeniedError])
async def test_an_error_of_the_origin_reaches_the_reader_and_nothing_is_concluded(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, error: type[Exception]
) -> None:
    origin.put("a", b"x")
    before = await tree.find("a")
    clock.advance(101)
    origin.fail_next(1, error("no luck"))
    with pytest.raises(error, match="no luck"):
        await tree.find("a")
    assert tree.namespace.negative_ttl_s(ROOT_INO, b"a") == 0
    assert await tree.find("a") == before


async def test_a_bug_in_an_origin_costs_an_error_and_not_the_mount(
    tree: Tree, origin: ScriptedOrigin, expect_log
) -> None:
    expect_log("bug while looking up b'a'")
    origin.put("a", b"x")
    origin.fail_next(1, ZeroDivisionError())
    with pytest.raises(Exception, match="broken off"):
        await tree.find("a")
    assert (await tree.find("a")).size_bytes == 1


async def test_a_file_has_no_entries(tree: Tree, origin: ScriptedOrigin) -> None:
    origin.put("a", b"x")
    inode = await tree.find("a")
    with pytest.raises(NotADirError):
        await tree.namespace.lookup(inode.ino, b"b")
    with pytest.raises(NotADirError):
        tree.namespace.open_directory(inode.ino)


async def test_an_unknown_inode_is_stale(tree: Tree) -> None:
    with pytest.raises(ObjectChangedError):
        tree.namespace.inode(4711)


@pytest.mark.parametrize("ttl_s", [0.0, math.inf])
async def test_ttls_of_nothing_and_for_ever(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, ttl_s: float
) -> None:
    await tree.restart(Ttls(ttl_s, ttl_s, ttl_s, ttl_s))
    origin.put("a", b"x")
    for _ in range(3):
        assert (await tree.namespace.lookup(ROOT_INO, b"a"))[1] == ttl_s
        with pytest.raises(NotFoundError):
            await tree.find("b")
        assert tree.namespace.negative_ttl_s(ROOT_INO, b"b") == ttl_s
        clock.advance(1e9)
    stats = [request for request in origin.take_requests() if request[0] == "stat"]
    assert len(stats) == (6 if ttl_s == 0 else 2)


# -- the clock ---------------------------------------------------------------------------------


async def test_a_clock_set_back_makes_nothing_fresh_for_longer(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    await tree.names()
    before = await tree.find("a")
    clock.advance(-1_000_000)
    origin.put("a", b"xy")
    origin.put("b", b"z")
    after = await tree.find("a")
    assert (after.size_bytes, after.ino != before.ino) == (2, True)
    assert (await tree.find("b")).size_bytes == 1
    origin.delete("a")
    clock.advance(101)
    with pytest.raises(NotFoundError):
        await tree.find("a")
    assert await tree.names() == ["b"]


async def test_a_clock_set_back_does_not_hide_what_a_listing_shows(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    origin.put("b", b"x")
    await tree.find("a")
    await tree.find("b")
    mtime_ns = tree.mtime_ns()
    clock.advance(-1_000_000)
    origin.put("a", b"xy")
    origin.delete("b")
    entries = await tree.entries()
    assert list(entries) == [b"a"]
    assert tree.namespace.inode(entries[b"a"]).size_bytes == 2
    assert tree.mtime_ns() > mtime_ns, "the kernel compares mtimes"


# -- restarts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
async def test_a_restart_keeps_inode_numbers_and_sends_no_request(
    tree: Tree, origin: ScriptedOrigin, crash: bool
) -> None:
    origin.put("a", b"x")
    origin.put("d/e/f", b"y")
    before = [await tree.find(path) for path in ("a", "d", "d/e", "d/e/f")]
    names = await tree.names(before[1].ino)
    await tree.db.commit()
    await tree.restart(crash=crash)
    origin.take_requests()
    assert [await tree.find(path) for path in ("a", "d", "d/e", "d/e/f")] == before
    assert await tree.names(before[1].ino) == names
    assert origin.take_requests() == []


async def test_ttls_go_on_over_a_restart(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    await tree.find("a")
    clock.advance(70)
    await tree.restart()
    assert (await tree.namespace.lookup(ROOT_INO, b"a"))[1] == pytest.approx(30)


async def test_a_crash_never_makes_an_inode_number_be_used_again(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    used: set[int] = set()
    for number in range(5):
        origin.put(f"{number}", b"x")
        inode = await tree.find(f"{number}")
        assert inode.ino not in used
        used.add(inode.ino)
        await tree.restart(crash=True)


async def test_records_without_a_name_go_at_the_next_start(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    origin.put("d/e/f", b"x")
    old = [await tree.find(path) for path in ("a", "d", "d/e", "d/e/f")]
    await tree.names(old[1].ino)
    origin.put("a", b"xy")
    origin.delete_tree("d")
    clock.advance(101)
    new = await tree.find("a")
    with pytest.raises(NotFoundError):
        await tree.find("d")
    await trio.testing.wait_all_tasks_blocked()  # it had the root listed
    assert all(tree.namespace.inode(inode.ino) == inode for inode in old)
    await tree.restart()
    assert tree.purged == 4
    for inode in old:
        assert tree.namespace.table.get(inode.ino) is None
    assert tree.namespace.table.listing(old[1].ino) is None
    assert await tree.find("a") == new
    for table in ("inodes", "dirents", "listings", "orphans"):
        rows = len(list(tree.db.scan(table, b"")))
        wanted = {"inodes": 2, "dirents": 1, "listings": 1}.get(table, 0)
        assert (table, rows) == (table, wanted)
    await tree.restart()
    assert tree.purged == 0


async def test_a_large_purge_is_spread_over_several_starts(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        origin.put(f"d/{number}", b"x")
    directory = await tree.find("d")
    assert len(await tree.names(directory.ino)) == 20
    origin.delete_tree("d")
    origin.put("other", b"x")
    clock.advance(101)
    assert await tree.names() == ["other"]
    monkeypatch.setattr("cachefs.namespace.inodes._PURGED_PER_START", 8)
    purged = []
    for _ in range(4):
        await tree.restart()
        purged.append(tree.purged)
    assert purged == [8, 8, 5, 0]


async def test_a_database_of_another_source_or_another_format_is_refused(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    origin.put("a", b"x")
    await tree.find("a")
    tree.origin.identity = "fake://other"
    with pytest.raises(CacheDirError, match=r"belongs to fake://test, not to fake://other"):
        await tree.restart()
    assert tree.db.pending_count == 0
    tree.origin.identity = "fake://test"
    for other in (1, 2, 4):
        tree.db.put("meta", b"format", b"%d" % other)
        with pytest.raises(CacheDirError, match=f"has format {other}, this cachefs knows 3"):
            await tree.restart()
        assert tree.db.pending_count == 0
    tree.db.put("meta", b"format", b"3")
    await tree.restart()
    assert (await tree.find("a")).size_bytes == 1


# -- races -------------------------------------------------------------------------------------


async def test_an_answer_older_than_a_listing_does_not_bring_a_name_back(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")
    origin.put("b", b"x")

    async def deleted_and_listed(path: str) -> None:
        origin.after_stat = None
        clock.advance(1)
        origin.delete("a")
        clock.advance(1)
        assert await tree.names() == ["b"]

    origin.after_stat = deleted_and_listed
    with pytest.raises(NotFoundError):
        await tree.find("a")
    assert await tree.names() == ["b"]


async def test_an_absence_older_than_a_listing_does_not_remove_a_name(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("b", b"x")

    async def created_and_listed(path: str) -> None:
        origin.after_stat = None
        clock.advance(1)
        origin.put("a", b"x")
        clock.advance(1)
        assert await tree.names() == ["a", "b"]

    origin.after_stat = created_and_listed
    with pytest.raises(NotFoundError):
        await tree.find("a")
    assert tree.namespace.negative_ttl_s(ROOT_INO, b"a") == 0
    assert (await tree.find("a")).size_bytes == 1


async def test_an_answer_overtaken_by_a_listing_is_not_believed_for_a_ttl(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    origin.put("a", b"x")

    async def replaced_and_listed(path: str) -> None:
        origin.after_stat = None
        clock.advance(1)
        origin.put("a", b"xy")
        await tree.names()

    origin.after_stat = replaced_and_listed
    inode, ttl_s = await tree.namespace.lookup(ROOT_INO, b"a")
    now = await tree.find("a")
    assert now.size_bytes == 2
    assert ttl_s == 0 or inode == now


async def test_the_default_clock_is_the_wall_clock() -> None:
    import time

    from cachefs.namespace.clock import Clock

    assert abs(Clock().now_ns() - time.time_ns()) < 10 * NS
    assert Clock(lambda: 50 * NS).remaining_ns(20 * NS, 100 * NS) == 70 * NS
    assert TTLS.entry_s == 100


async def test_paths_may_be_thousands_of_levels_deep(tree: Tree, origin: ScriptedOrigin) -> None:
    deep = "/".join(["d"] * 3_000)
    origin.put(deep + "/file", b"x")
    parent = 1
    for _ in range(3_000):
        parent, _ = tree.namespace.table.bind(parent, b"d", None, tree.clock.now_ns())
        assert parent is not None
    await tree.restart()
    inode = await tree.find(deep + "/file")
    assert tree.namespace.table.path(inode) == deep + "/file"


async def test_directories_that_lie_in_each_other_are_no_loop(tree: Tree) -> None:
    for ino, parent in ((90, 91), (91, 90)):
        record = pack_inode(Inode(ino, KIND_DIR, parent, b"d", 0, 0, ""))
        tree.db.put("inodes", ino_key(ino), record)
    with pytest.raises(LookupError):
        tree.namespace.table.path(tree.namespace.inode(90))


async def test_rows_that_make_no_sense_count_as_missing(tree: Tree, origin: ScriptedOrigin) -> None:
    for name in ("a", "b", "c"):
        origin.put(name, b"x")
    inos = await tree.entries()
    tree.db.put("inodes", ino_key(inos[b"a"]), b"\2\0short")
    huge = pack_inode(Inode(inos[b"b"], KIND_FILE, ROOT_INO, b"b", (1 << 64) - 1, 0, "v"))
    tree.db.put("inodes", ino_key(inos[b"b"]), huge)
    tree.db.put("dirents", dirent_key(ROOT_INO, b"c"), b"")
    tree.db.put("listings", ino_key(ROOT_INO), b"?")
    tree.db.put("inodes", ino_key(ROOT_INO), b"")
    await tree.restart()
    for name in ("a", "b", "c"):
        assert (await tree.find(name)).size_bytes == 1
    assert await tree.names() == ["a", "b", "c"]


async def test_numbers_that_were_never_given_out_are_damage(tree: Tree) -> None:
    tree.db.put("meta", b"next_ino", b"\xff" * 8)
    with pytest.raises(CacheDirError, match="the namespace is damaged"):
        await tree.restart()
    tree.db.put("meta", b"next_ino", (1 << 30).to_bytes(8, "big"))


async def test_in_a_cold_table_threads_look_first(
    tree: Tree, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.put("a", b"x")
    inode = await tree.find("a")
    await tree.db.commit()
    monkeypatch.setattr(tree.db.residency, "is_cold", True)
    brought: list[bytes | None] = []
    bring = tree.db.residency.bring

    async def noted(look_up: Callable[[Get], object]) -> None:
        def look(get: Get) -> None:
            def get_and_note(table: str, key: bytes) -> bytes | None:
                brought.append(get(table, key))
                return brought[-1]

            look_up(get_and_note)

        await bring(look)

    monkeypatch.setattr(tree.db.residency, "bring", noted)
    assert await tree.find("a") == inode
    assert len([row for row in brought if row is not None]) == 3, "the name, the root, the file"


async def test_the_kernel_is_told_when_a_listing_shows_what_was_absent(
    tree: Tree, origin: ScriptedOrigin
) -> None:
    origin.put("d/other", b"x")
    directory = await tree.find("d")
    with pytest.raises(NotFoundError):
        await tree.namespace.lookup(directory.ino, b"new")
    assert tree.namespace.negative_ttl_s(directory.ino, b"new") > 0
    origin.put("d/new", b"x")
    tree.clock.advance(1_000)
    assert await tree.names(directory.ino) == ["new", "other"]
    assert tree.unbound == [(directory.ino, b"new")]
