"""What is shown while the origin does not answer, for how long, and how that ends."""

import logging
import math
from dataclasses import replace

import pytest
import trio
import trio.testing

from cachefs.errors import (
    AccessDeniedError,
    CachefsError,
    NotFoundError,
    OriginBusyError,
    OriginUnavailableError,
)
from cachefs.fuse.xattrs import SOURCE, VERSION, Xattrs
from cachefs.namespace.namespace import ROOT_INO, Ttls
from tests.namespace.harness import NS, TTLS, Reading, ScriptedOrigin, Tree, WallClock

STALE = replace(TTLS, stale_if_error_s=math.inf)
HOUR = replace(TTLS, stale_if_error_s=3600)
DOWN = OriginUnavailableError("no answer from fake://test")
DEADLINE_S = 5
PROBED_S = 1.6
"""The first probe, and the first answer, have come."""

SHOWN_AS_KNOWN = "names, attributes and listings are shown as they were last known"
is_logged = pytest.mark.expect_log(r"the origin does not answer \(no answer from fake://test\)")


@pytest.fixture
def origin() -> ScriptedOrigin:
    return ScriptedOrigin(page_size=10)


@pytest.fixture
async def stale(tree: Tree) -> Tree:
    """The tree, with stale answers allowed for ever."""
    await tree.restart(STALE)
    return tree


def fill(origin: ScriptedOrigin, count: int, directory: str = "") -> list[str]:
    names = [f"{number:04}" for number in range(count)]
    for name in names:
        origin.put(directory + name, b"x")
    return names


def go_silent(origin: ScriptedOrigin) -> None:
    origin.down, origin.silence_s = DOWN, DEADLINE_S


# -- names -------------------------------------------------------------------------------------


@is_logged
@pytest.mark.parametrize("error", [DOWN, OriginBusyError(str(DOWN))])
async def test_known_names_are_shown_while_the_origin_is_down(
    stale: Tree,
    origin: ScriptedOrigin,
    autojump_clock: trio.testing.MockClock,
    clock: WallClock,
    error: CachefsError,
) -> None:
    origin.put("a", b"abc")
    origin.put("d/e/f", b"x")
    before = [await stale.find(path) for path in ("a", "d", "d/e", "d/e/f")]
    origin.down = error
    for _ in range(3):
        clock.advance(1e7)
        await trio.sleep(7)
        assert [await stale.find(path) for path in ("a", "d", "d/e", "d/e/f")] == before
    assert stale.unbound == []


@is_logged
async def test_attributes_of_known_files_are_shown_while_the_origin_is_down(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    meta = origin.put("a", b"abc")
    inode = await stale.find("a")
    origin.down = DOWN
    clock.advance(1000)
    await stale.find("a")
    shown = stale.namespace.inode(inode.ino)
    assert (shown.size_bytes, shown.mtime_ns, shown.version) == (3, meta.mtime_ns, meta.version)


@is_logged
async def test_xattrs_are_shown_while_the_origin_is_down(
    stale: Tree,
    reading: Reading,
    origin: ScriptedOrigin,
    clock: WallClock,
) -> None:
    meta = origin.put("a", b"abc")
    await stale.find("a")
    origin.down = DOWN
    clock.advance(1000)
    inode = await stale.find("a")
    xattrs = Xattrs(stale.namespace, reading.cache)
    assert await xattrs.get(inode, VERSION) == meta.version.encode()
    assert await xattrs.get(inode, SOURCE) == b"fake://test/a"


@is_logged
async def test_the_end_of_stale_if_error(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    await stale.restart(HOUR)
    origin.put("d/a", b"x")
    directory = await stale.find("d")
    await stale.names(directory.ino)
    with pytest.raises(NotFoundError):
        await stale.find("d/b")
    await stale.namespace.lookup(ROOT_INO, b"d")
    origin.down = DOWN
    clock.advance(3690)
    assert await stale.names(directory.ino) == ["a"]
    await stale.find("d/a")
    clock.advance(20)
    for ask in (stale.find("d/a"), stale.names(directory.ino), stale.find("d/b")):
        with pytest.raises(OriginUnavailableError):
            await ask
    origin.down = None
    await stale.find("d/a")
    assert await stale.names(directory.ino) == ["a"]


async def test_stale_if_error_0_hands_every_error_on(
    tree: Tree, origin: ScriptedOrigin, clock: WallClock
) -> None:
    names = fill(origin, 5)
    await tree.names()
    origin.down = DOWN
    await tree.find(names[0])
    clock.advance(101)
    for _ in range(2):
        for ask in (tree.find(names[0]), tree.names(), tree.find("absent")):
            with pytest.raises(OriginUnavailableError):
                await ask
    origin.take_requests()
    origin.down = None
    await tree.find(names[0])
    assert origin.take_requests() == [("stat", names[0])], "nothing stands in the way"
    assert not tree.namespace.outage.state.is_stale


async def test_errors_that_are_answers_are_handed_on(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    names = fill(origin, 5)
    await stale.names()
    clock.advance(101)
    origin.down = AccessDeniedError("not for you")
    for ask in (stale.find(names[0]), stale.names()):
        with pytest.raises(AccessDeniedError):
            await ask
    origin.down = None
    origin.delete(names[0])
    with pytest.raises(NotFoundError):
        await stale.find(names[0])
    assert stale.namespace.outage.state.answer_count == 0


# -- absence -----------------------------------------------------------------------------------


@is_logged
async def test_known_absence_stays_and_what_is_unknown_is_an_error(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    origin.put("listed/a", b"x")
    for number in range(1_001):  # more than a page, so that it is never known as a whole
        origin.put(f"other/{number}", b"")
    origin.put("other/a", b"x")
    listed, other = await stale.find("listed"), await stale.find("other")
    await stale.names(listed.ino)
    with pytest.raises(NotFoundError):
        await stale.find("other/asked")
    origin.down = DOWN
    clock.advance(1000)
    for path in ("listed/never-seen", "other/asked"):
        with pytest.raises(NotFoundError):
            await stale.find(path)
    for _ in range(2):
        with pytest.raises(OriginUnavailableError):
            await stale.find("other/never-asked")
    assert stale.namespace.negative_ttl_s(listed.ino, b"never-seen") == 1
    assert stale.namespace.negative_ttl_s(other.ino, b"asked") == 1
    assert stale.namespace.negative_ttl_s(other.ino, b"never-asked") == 0
    assert stale.namespace.negative_ttl_s(other.ino, b"a") == 0


# -- directories -------------------------------------------------------------------------------


@is_logged
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_listed_directory_is_shown_as_it_was(
    stale: Tree,
    origin: ScriptedOrigin,
    autojump_clock: trio.testing.MockClock,
    clock: WallClock,
    monkeypatch: pytest.MonkeyPatch,
    restarted: bool,
) -> None:
    monkeypatch.setattr("cachefs.namespace.directories.lister.FILL_CHUNK", 7)
    fill(origin, 25)
    before = await stale.entries()
    if restarted:
        await stale.restart(STALE)
    origin.down = DOWN
    for _ in range(3):
        clock.advance(1e6)
        await trio.sleep(10)
        assert await stale.entries() == before
    assert stale.unbound == []


@is_logged
async def test_a_listing_that_fails_half_way_goes_on_with_what_is_known(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    names = fill(origin, 35)
    before = await stale.entries()
    mtime_ns = stale.mtime_ns()
    origin.put("0000a", b"new")
    origin.delete("0003")
    origin.delete("0033")

    async def fail(path: str, page: int) -> None:
        if page == 2:
            origin.down = DOWN

    origin.before_page = fail
    clock.advance(1000)
    entries = await stale.entries()
    assert sorted(entries) == sorted([*(name.encode() for name in names), b"0000a"])
    assert {name: ino for name, ino in entries.items() if name != b"0000a"} == before
    assert stale.mtime_ns() > mtime_ns, "a name has come"
    origin.down = None
    origin.before_page = None
    await trio.sleep(PROBED_S)
    assert set(before) - set(await stale.entries()) == {b"0003", b"0033"}


async def test_a_directory_never_listed_completely_ends_in_an_error(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    fill(origin, 35)

    async def fail(path: str, page: int) -> None:
        if page == 2:
            origin.down = DOWN

    origin.before_page = fail
    for shown in (20, 0):
        snapshot = stale.namespace.open_directory(ROOT_INO)
        with pytest.raises(OriginUnavailableError):
            await snapshot.has(20)
        assert len(snapshot) == shown


@is_logged
async def test_a_reader_goes_on_in_a_stale_listing(
    stale: Tree,
    origin: ScriptedOrigin,
    autojump_clock: trio.testing.MockClock,
    clock: WallClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Positions belong to a snapshot, while it is filled and afterwards."""
    monkeypatch.setattr("cachefs.namespace.directories.lister.FILL_CHUNK", 10)
    fill(origin, 50)
    await stale.names()
    await stale.restart(STALE)
    origin.down = DOWN
    clock.advance(1000)
    await stale.find("0001")
    snapshot = stale.namespace.open_directory(ROOT_INO)
    assert await snapshot.has(5)
    assert not snapshot.ended
    assert stale.namespace.open_directory(ROOT_INO) is snapshot
    assert stale.namespace.resume_directory(ROOT_INO, snapshot.generation) is snapshot
    assert not await snapshot.has(50)
    assert stale.namespace.resume_directory(ROOT_INO, snapshot.generation) is snapshot
    assert stale.namespace.open_directory(ROOT_INO) is snapshot


# -- bytes -------------------------------------------------------------------------------------


@is_logged
async def test_cached_blocks_are_read_and_others_are_errors(
    stale: Tree,
    reading: Reading,
    origin: ScriptedOrigin,
    clock: WallClock,
) -> None:
    data = bytes(range(256)) * 8192
    origin.put("a", data)
    inode = await stale.find("a")
    assert await reading.read(inode.ino, 0, 4096) == data[:4096]
    origin.down = DOWN
    clock.advance(1000)
    assert await stale.find("a") == inode
    assert await reading.read(inode.ino, 100, 4096) == data[100:4196]
    with pytest.raises(OriginUnavailableError):
        await reading.read(inode.ino, 1 << 20, 4096)


# -- waiting -----------------------------------------------------------------------------------


@is_logged
async def test_a_thousand_expired_names_wait_for_one_deadline(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    names = fill(origin, 1000)
    await stale.names()
    origin.take_requests()
    go_silent(origin)
    clock.advance(1000)
    began = trio.current_time()
    for name in names:
        await stale.find(name)
        clock.advance(0.01)
    assert await stale.names() == names
    with pytest.raises(NotFoundError):
        await stale.find("absent")
    assert trio.current_time() - began == DEADLINE_S
    assert origin.take_requests() == [("stat", names[0])]


@is_logged
async def test_nobody_waits_again_while_the_outage_lasts(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    fill(origin, 25)
    await stale.names()
    go_silent(origin)
    clock.advance(1000)
    began = trio.current_time()
    await stale.names()
    assert trio.current_time() - began == DEADLINE_S
    origin.take_requests()
    for _ in range(60):
        await trio.sleep(1)
        began = trio.current_time()
        await stale.find("0001")
        await stale.names()
        assert trio.current_time() == began
    asked = origin.take_requests()
    assert {kind for kind, _ in asked} == {"check"}
    assert 60 / (DEADLINE_S + 1.5) - 1 <= len(asked) <= 60 / (DEADLINE_S + 1) + 1


@is_logged
async def test_an_origin_that_never_answers_and_never_fails_is_asked_again(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    """Deadlines are the origin's; the namespace doesn't rely on them once it is in an outage."""
    origin.put("a", b"x")
    await stale.find("a")
    origin.down = DOWN
    clock.advance(1000)
    await stale.find("a")
    origin.silence_s = math.inf
    await trio.sleep(60)
    origin.down = None
    await trio.sleep(13)
    assert not stale.namespace.outage.state.is_stale


# -- the kernel --------------------------------------------------------------------------------


@is_logged
async def test_the_kernel_believes_stale_answers_for_a_second(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    names = fill(origin, 5)
    await stale.names()
    origin.down = DOWN
    clock.advance(101)
    assert (await stale.namespace.lookup(ROOT_INO, names[0].encode()))[1] == 1
    snapshot = stale.namespace.open_directory(ROOT_INO)
    assert stale.namespace.snapshot_ttl_s(snapshot) == 1
    with pytest.raises(NotFoundError):
        await stale.find("absent")
    assert stale.namespace.negative_ttl_s(ROOT_INO, b"absent") == 1
    await stale.restart(Ttls(0, 0, 0, 0, math.inf))
    assert (await stale.namespace.lookup(ROOT_INO, names[0].encode()))[1] == 0
    snapshot = stale.namespace.open_directory(ROOT_INO)
    assert stale.namespace.snapshot_ttl_s(snapshot) == 0
    assert stale.namespace.negative_ttl_s(ROOT_INO, b"absent") == 0


async def test_what_is_fresh_keeps_its_ttl_in_an_outage(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    fill(origin, 5, "d/")
    directory = await stale.find("d")
    await stale.names(directory.ino)
    origin.down = DOWN
    with pytest.raises(OriginUnavailableError):
        await stale.find("unknown")
    clock.advance(60)
    assert (await stale.namespace.lookup(directory.ino, b"0000"))[1] == pytest.approx(40)
    snapshot = stale.namespace.open_directory(directory.ino)
    assert stale.namespace.snapshot_ttl_s(snapshot) == pytest.approx(40)
    assert stale.namespace.outage.state.answer_count == 0


# -- the end -----------------------------------------------------------------------------------


@is_logged
@pytest.mark.parametrize("silence_s", [0, DEADLINE_S])
async def test_the_origin_is_asked_again_soon_after_it_has_come_back(
    stale: Tree,
    origin: ScriptedOrigin,
    autojump_clock: trio.testing.MockClock,
    clock: WallClock,
    silence_s: float,
) -> None:
    names = fill(origin, 25)
    old = await stale.find(names[0])
    await stale.names()
    origin.down, origin.silence_s = DOWN, silence_s
    clock.advance(1000)
    assert await stale.find(names[0]) == old
    await trio.sleep(100)
    assert await stale.names() == names
    origin.put(names[0], b"changed")
    origin.delete(names[1])
    origin.put("new", b"x")
    origin.down = None
    await trio.sleep(PROBED_S + silence_s)
    new = await stale.find(names[0])
    assert (new.size_bytes, new.ino != old.ino) == (7, True)
    with pytest.raises(NotFoundError):
        await stale.find(names[1])
    assert (await stale.find("new")).size_bytes == 1
    assert await stale.names() == [names[0], *names[2:], "new"]
    _, ttl_s = await stale.namespace.lookup(ROOT_INO, b"new")
    assert ttl_s == pytest.approx(100)
    asked = origin.take_requests()
    assert {("stat", names[0]), ("list", "")} < set(asked)


@is_logged
async def test_any_answer_ends_an_outage_but_not_within_a_second(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    """An origin that fails at some things and not at others doesn't hold up every look-up."""
    names = fill(origin, 25)
    await stale.names()
    clock.advance(1000)
    origin.fail_next(1, DOWN)
    await stale.find(names[0])
    origin.take_requests()
    for name in names:
        await stale.find(name)
    assert origin.take_requests() == [], "within a second"
    await trio.sleep(PROBED_S)
    assert origin.take_requests() == [("check", "")]
    await stale.find(names[1])
    assert ("stat", names[1]) in origin.take_requests()


async def test_who_has_no_stale_answer_asks_and_may_end_the_outage(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    origin.put("a", b"x")
    origin.fail_next(1, DOWN)
    with pytest.raises(OriginUnavailableError):
        await stale.find("a")
    assert (await stale.find("a")).size_bytes == 1
    origin.take_requests()
    await trio.sleep(PROBED_S)
    clock.advance(101)
    await stale.find("a")
    assert origin.take_requests() == [("stat", "a")], "no probe was needed"


@is_logged
async def test_the_log_and_the_state_say_when_stale_answers_begin_and_end(
    stale: Tree,
    origin: ScriptedOrigin,
    autojump_clock: trio.testing.MockClock,
    clock: WallClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cachefs")
    names = fill(origin, 25)
    await stale.names()
    origin.down = DOWN
    assert not stale.namespace.outage.state.is_stale, "all is fresh"
    clock.advance(1000)
    for name in names:
        await stale.find(name)
    began_ns = clock.now_ns()
    state = stale.namespace.outage.state
    assert (state.is_stale, state.answer_count) == (True, 25)
    assert state.since_ns is not None
    assert abs(state.since_ns - began_ns) < NS
    clock.advance(3 * 3600)
    origin.down = None
    await trio.sleep(PROBED_S)
    assert stale.namespace.outage.state == replace(state, is_stale=False, since_ns=None)
    assert caplog.messages == [
        f"the origin does not answer ({DOWN}); {SHOWN_AS_KNOWN}",
        "the origin answers again; stale answers were shown for 3h",
    ]


@pytest.mark.expect_log("bug while probing")
@is_logged
async def test_a_bug_while_probing_costs_nobody_the_mount(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    origin.put("a", b"x")
    await stale.find("a")
    clock.advance(1000)
    origin.fail_next(1, DOWN)
    await stale.find("a")
    origin.fail_next(1, ZeroDivisionError())
    await trio.sleep(PROBED_S)
    assert not stale.namespace.outage.state.is_stale
    await stale.find("a")


@is_logged
async def test_a_clock_set_back_ends_no_indefinite_answer_and_prolongs_no_other(
    stale: Tree, origin: ScriptedOrigin, autojump_clock: trio.testing.MockClock, clock: WallClock
) -> None:
    origin.put("a", b"x")
    await stale.find("a")
    origin.down = DOWN
    clock.advance(-1e6)
    await stale.find("a")
    await stale.restart(HOUR)
    with pytest.raises(OriginUnavailableError):
        await stale.find("a")
