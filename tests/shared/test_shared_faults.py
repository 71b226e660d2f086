"""Members that are dead, silent, slow, hostile or full: reads get the right bytes all the same."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import OriginUnavailableError
from cachefs.format.shared_value import SharedFormat
from cachefs.shared import admission as admission_module
from cachefs.shared import member as member_module
from cachefs.shared import members as members_module
from cachefs.shared import tier as tier_module
from cachefs.shared.member import Member
from cachefs.shared.tier import SharedTier
from cachefs.types import BLOCK_BYTES, ObjectRef
from tests.cache.harness import put, put_many
from tests.memory_origin import MemoryOrigin
from tests.servers.memcached import Memcached
from tests.shared.harness import Members, closed_port, node, pretender, read, read_ahead, until

pytestmark = pytest.mark.server

SHORT_S = 0.02


async def assert_served(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    for ref in refs:
        assert await read(cache, ref) == origin.expected(ref.path)


def only(cache: BlockCache) -> Member:
    (member,) = cache.shared.members
    return member


def key_of(origin: MemoryOrigin, ref: ObjectRef, block_index: int = 0, secret: bytes = b"") -> str:
    shared_format = SharedFormat(secret)
    name = shared_format.name(origin.identity, ref.path, ref.meta.version)
    return shared_format.key(name, block_index).decode()


async def test_nobody_listens(origin: MemoryOrigin) -> None:
    refs = put_many(origin, 20, 5000)
    async with node(origin, f"127.0.0.1:{closed_port()}") as cache:
        await assert_served(cache, origin, refs)
        member = only(cache)
        assert member.is_out
        assert member.counters.failures == 3
        assert "refused" in (member.problem or "")
        assert cache.shared.is_bypassed
        assert not cache.shared.is_on


async def test_a_silent_member_costs_three_timeouts(origin: MemoryOrigin) -> None:
    refs = put_many(origin, 20, 5000)
    asked = 0

    async def say_nothing(stream: trio.SocketStream) -> None:
        nonlocal asked
        async for _ in stream:
            asked += 1

    async with pretender(say_nothing) as address, node(origin, address, timeout_s=SHORT_S) as cache:
        # A machine that is busy just then is blamed in place of the member.
        while not only(cache).is_out:
            await assert_served(cache, origin, refs[:1])
        assert only(cache).counters.failures == 3
        before = asked
        await assert_served(cache, origin, refs)
        assert asked - before <= 1 + len(refs) // 10  # a probe, from time to time


ANSWERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "old": b"ERROR\r\n",
    "garbage": bytes(range(256)) * 20,
    "endless": b"V" * 5000,
    "closed": b"",
    "half": b"VA 5017\r\n" + b"x" * 100,
    "huge": b"VA 99999999999999999999\r\n",
    "large": b"VA 2000000\r\n" + b"x" * 1000,
    "negative": b"VA -5\r\n",
    "no size": b"VA\r\n",
    "words": b"VA 17 x\r\nnot the end",
    "more": b"VA 5017\r\n" + b"x" * 5030 + b"\r\n",
    "stored": b"STORED\r\n",
    "not utf-8": b"\xff\xfe\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_strange_answers(origin: MemoryOrigin, answer: bytes) -> None:
    refs = put_many(origin, 8, 5000)

    async def say(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)

    async with pretender(say) as address, node(origin, address) as cache:
        await assert_served(cache, origin, refs)
        member = only(cache)
        assert member.is_out
        assert member.problem is not None
        assert member.problem.isprintable()
        assert len(member.problem) < 200


WRONG_VALUES = {
    "short": b"VA 3\r\nabc\r\n",
    "other bytes": b"VA 5017\r\n\x01" + b"x" * 5016 + b"\r\n",
    "other format": b"VA 5017\r\n\x02" + b"x" * 5016 + b"\r\n",
    "no value": b"HD\r\n",
    "refused": b"SERVER_ERROR out of memory\r\n",
    "empty, no lease": b"VA 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", WRONG_VALUES.values(), ids=WRONG_VALUES)
async def test_wrong_values_are_misses(origin: MemoryOrigin, answer: bytes) -> None:
    """The member speaks the protocol, but does not tell the truth."""
    refs = put_many(origin, 8, 5000)

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            await stream.send_all(answer if request.startswith(b"mg") else b"HD\r\n")

    async with pretender(say) as address, node(origin, address) as cache:
        await assert_served(cache, origin, refs)
        assert not only(cache).is_out
        assert cache.shared.counters.hits == 0


async def test_a_block_that_was_dropped_from_the_disk_is_stored_again(
    origin: MemoryOrigin,
) -> None:
    """memcached answers EN once for such a block, and gives the lease to the next question."""
    ref = put(origin, "a", 5000)
    asked: list[bytes] = []

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            if request == b"stats\r\n":
                await stream.send_all(b"END\r\n")
                continue
            asked.append(request[:2])
            answers = {1: b"EN\r\n", 2: b"VA 0 W\r\n\r\n"}
            await stream.send_all(answers.get(len(asked), b"HD\r\n"))

    async with pretender(say) as address, node(origin, address) as cache:
        assert await read(cache, ref) == origin.expected("a")
        await cache.shared.stored()
        assert asked[:3] == [b"mg", b"mg", b"ms"]
        assert only(cache).counters.stored_blocks == 1


async def test_flipped_bytes_are_replaced(origin: MemoryOrigin, member: Members) -> None:
    ref, chance = put(origin, "a", 50_000), random.Random(3)
    async with node(origin, member.option) as cache:
        await read(cache, ref)
        await cache.shared.stored()
        value = bytearray(_value(member[0], key_of(origin, ref)))
        value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        command = f"ms {key_of(origin, ref)} {len(value)}".encode()
        assert member[0].ask(command + b"\r\n" + value) == b"HD\r\n"
        assert await read(cache, ref) == origin.expected("a")
        assert only(cache).counters.bad_values == 1
        assert not only(cache).is_out
        await cache.shared.stored()
        gets = origin.counters.gets
        assert await read(cache, ref) == origin.expected("a")
        assert origin.counters.gets == gets


def _value(member: Memcached, key: str) -> bytes:
    answer = member.ask(f"mg {key} v".encode(), b"\r\n")
    while len(answer) < 50_000:
        answer = member.ask(f"mg {key} v".encode(), answer[-2:])
    return answer.partition(b"\r\n")[2][:-2]


async def test_nodes_with_other_secrets_share_nothing(
    origin: MemoryOrigin, member: Members
) -> None:
    ref = put(origin, "a", 50_000)
    for count, secret in enumerate((b"", b"one", b"two")):
        async with node(origin, member.option, secret=secret) as cache:
            assert await read(cache, ref) == origin.expected("a")
            await cache.shared.stored()
            assert cache.shared.counters.hits == 0
            assert origin.counters.gets == count + 1
            assert await read(cache, ref) == origin.expected("a")
            assert cache.shared.counters.hits == 1


async def test_a_full_member(origin: MemoryOrigin, tmp_path: Path) -> None:
    """1 MiB of memory and no disk: most stores are refused or push others out."""
    flags = ["-m", "1", "-I", "512k"]
    refs = [*put_many(origin, 60, 100_000), put(origin, "large", 6 * BLOCK_BYTES)]
    with Memcached(tmp_path, flags) as small:
        async with node(origin, small.address) as cache:
            for _ in range(2):
                await assert_served(cache, origin, refs)
                await cache.shared.stored()
            assert not only(cache).is_out
            assert cache.shared.dropped_blocks >= 6


@pytest.mark.parametrize("free_mib", [5, 60])
async def test_a_member_whose_disk_does_not_keep_up(
    origin: MemoryOrigin, free_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would drop old blocks for new ones, so stores become slow."""
    monkeypatch.setattr(admission_module, "_MOST_BLOCKS", 1)
    refs = put_many(origin, 30, 50_000)
    stats = f"STAT limit_maxbytes 67108864\r\nSTAT slab_global_page_pool {free_mib}\r\n".encode()
    stored = 0

    async def say(stream: trio.SocketStream) -> None:
        nonlocal stored
        async for request in stream:
            if request.startswith(b"ms"):
                stored += 1
            answers = {b"stats": stats + b"STAT extstore_limit_maxbytes 1\r\nEND\r\n"}
            answers |= {b"mg": b"VA 0 W\r\n\r\n", b"ms": b"HD\r\n"}
            code = next((code for code in answers if request.startswith(code)), None)
            if code is not None:  # else the rest of a value
                await stream.send_all(answers[code])

    async with pretender(say) as address, node(origin, address) as cache:
        began_at = trio.current_time()
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        took_s = trio.current_time() - began_at
        assert stored == len(refs)
        slow_s = 29 * 50_000 / 5e6
        assert took_s >= slow_s or free_mib == 60


async def test_the_lease_of_a_killed_node(
    origin: MemoryOrigin, member: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for a moment, then ask the origin, and store nothing."""
    monkeypatch.setattr(tier_module, "_MOST_WAIT_S", 0.1)
    ref = put(origin, "a", 50_000)
    member[0].ask(f"mg {key_of(origin, ref)} v N1000".encode(), b"\r\n\r\n")
    async with node(origin, member.option) as cache:
        assert await read(cache, ref) == origin.expected("a")
        await cache.shared.stored()
        assert cache.shared.counters.waited == 1
        assert only(cache).counters.stored_blocks == 0


async def test_a_lease_whose_answer_came_too_late(origin: MemoryOrigin, member: Members) -> None:
    """Nobody else stores the block, so the node that did not hear of its lease does."""
    ref = put(origin, "a", 50_000)
    # The store may take 50 timeouts. With shorter ones, a busy machine would not store in time.
    async with node(origin, member.option, timeout_s=10 * SHORT_S) as cache:
        member[0].pause()
        assert await read(cache, ref) == origin.expected("a")
        assert only(cache).counters.misses == 1
        member[0].go_on()
        await cache.shared.stored()
    async with node(origin, member.option) as other:
        gets = origin.counters.gets
        assert await read(other, ref) == origin.expected("a")
        assert origin.counters.gets == gets


async def test_a_member_that_becomes_slower_is_waited_for(origin: MemoryOrigin) -> None:
    """From a tenth of a millisecond to a third of the timeout, as from memory to a disk."""
    refs, is_slow = put_many(origin, 60, 5000), False

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            if request == b"stats\r\n":
                await stream.send_all(b"END\r\n")
                continue
            if is_slow and request.startswith(b"mg"):
                await trio.sleep(0.3)
            await stream.send_all(b"SERVER_ERROR\r\n" if request[:2] == b"mg" else b"NS\r\n")

    async with pretender(say) as address, node(origin, address, timeout_s=1.0) as cache:
        await assert_served(cache, origin, refs)
        is_slow = True
        before = only(cache).counters.failures
        for ref in refs[:8]:
            await assert_served(cache, origin, [ref])
        assert only(cache).counters.failures <= before + 2
        assert not only(cache).is_out


async def test_a_slow_member_that_stores_is_out_all_the_same(origin: MemoryOrigin) -> None:
    """Stores have more time. That they succeed does not mean that readers get answers in time."""
    ref = put(origin, "a", 5000)

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            await trio.sleep(0.1)
            answers = {b"mg": b"VA 0 W\r\n\r\n", b"ms": b"HD\r\n", b"st": b"END\r\n"}
            await stream.send_all(answers.get(request[:2], b""))

    async with pretender(say) as address, node(origin, address, timeout_s=SHORT_S) as cache:
        # A machine that is busy just then is blamed in place of the member.
        while not only(cache).is_out:
            await assert_served(cache, origin, [ref])
            await cache.shared.stored()
        assert only(cache).counters.failures <= 4


async def test_one_pause_is_one_failure(
    origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests are under way."""
    # A loop that is late itself excuses the member, and a busy machine makes it late.
    monkeypatch.setattr(member_module, "_LATE_S", 1e9)
    refs, is_paused = put_many(origin, 40, 5000), trio.Event()

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            if request[:2] == b"mg" and not is_paused.is_set():
                await is_paused.wait()
            await stream.send_all(b"SERVER_ERROR\r\n" if request[:2] == b"mg" else b"END\r\n")

    async with pretender(say) as address, node(origin, address, timeout_s=0.5) as cache:
        async with trio.open_nursery() as nursery:
            for ref in refs[:8]:
                nursery.start_soon(read, cache, ref)
        is_paused.set()
        assert only(cache).counters.failures >= 2
        assert not only(cache).is_out
        await assert_served(cache, origin, refs)
        assert not only(cache).is_out


async def test_our_own_lease_after_a_failed_get(origin: MemoryOrigin, member: Members) -> None:
    """The next read does not wait for ourselves, and stores the block."""
    ref = put(origin, "a", 50_000)
    async with node(origin, member.option) as cache:
        origin.fail_next(1, OriginUnavailableError("away"))
        with pytest.raises(OriginUnavailableError):
            await read(cache, ref)
        assert await read(cache, ref) == origin.expected("a")
        await cache.shared.stored()
        assert cache.shared.counters.waited == 0
        assert only(cache).counters.stored_blocks == 1


async def test_leases_of_dropped_blocks_are_given_back(
    origin: MemoryOrigin, member: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_ADMISSION_BYTES", 100_000)
    first, second = put(origin, "first", 90_000), put(origin, "second", 90_000)
    is_dropped, store = trio.Event(), Member.store

    async def store_late(target: Member, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        await is_dropped.wait()  # else one could be stored before the other is offered
        return await store(target, blocks)

    monkeypatch.setattr(Member, "store", store_late)
    async with node(origin, member.option) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cache, first)
            nursery.start_soon(read, cache, second)
        await until(lambda: cache.shared.dropped_blocks == 1)
        is_dropped.set()
        await cache.shared.stored()
        assert cache.shared.dropped_blocks == 1
        stored, dropped = first, second
        if await cache.shared.count_blocks(first, 1) == 0:
            stored, dropped = second, first
        assert await cache.shared.count_blocks(stored, 1) == 1
        key = key_of(origin, dropped)
        await until(lambda: member[0].ask(f"mg {key} s".encode()) == b"EN\r\n")


async def test_a_member_that_leaves_keeps_no_blocks(origin: MemoryOrigin, member: Members) -> None:
    """What waits for it is dropped, and its counts remain in the sums."""
    refs = put_many(origin, 20, 50_000)
    async with node(origin, member.option) as cache:
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        before = cache.shared.members.totals()
        assert before.stored_blocks == 20
        cache.shared.members.use("off")
        await until(lambda: len(cache.shared.members) == 0)
        await cache.shared.stored()
        assert cache.shared.members.totals() == before


async def test_without_its_secret_it_is_never_used(origin: MemoryOrigin, member: Members) -> None:
    shared = SharedTier(origin.identity, obstacle="the secret can't be read")
    shared.members.use(member.option)
    async with trio.open_nursery() as nursery:
        await nursery.start(shared.run)
        await until(lambda: len(shared.members))
        assert not shared.is_on
        assert shared.problem == "the secret can't be read"
        nursery.cancel_scope.cancel()


async def test_a_member_that_only_answers_probes_is_out_for_longer(origin: MemoryOrigin) -> None:
    refs = put_many(origin, 10, 5000)

    async def say(stream: trio.SocketStream) -> None:
        async for request in stream:
            if b"cachefs-probe" in request:
                await stream.send_all(b"EN\r\n")

    async with pretender(say) as address, node(origin, address, timeout_s=SHORT_S) as cache:
        member, times = only(cache), []
        for _ in range(2):
            while not member.is_out:
                await assert_served(cache, origin, refs[:1])
            out_at = trio.current_time()
            await until(lambda: not member.is_out)
            times.append(trio.current_time() - out_at)
        assert times[0] >= 1.0
        assert times[1] >= 2.0


@pytest.mark.usefixtures("_patient_with_holders")
async def test_a_lease_that_ends_while_we_wait_is_ours(
    origin: MemoryOrigin, member: Members
) -> None:
    ref = put(origin, "a", 50_000)
    member[0].ask(f"mg {key_of(origin, ref)} v N1".encode(), b"\r\n\r\n")
    async with node(origin, member.option) as cache:
        assert await read(cache, ref) == origin.expected("a")
        await cache.shared.stored()
        assert only(cache).counters.stored_blocks == 1


async def test_a_member_that_is_started_anew(origin: MemoryOrigin, member: Members) -> None:
    """Idle connections have been closed: no failure, only misses."""
    refs = put_many(origin, 10, 5000)
    async with node(origin, member.option) as cache:
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        member[0].stop()
        member[0].start()
        await assert_served(cache, origin, refs)
        assert only(cache).counters.failures == 0


async def test_a_member_dies_and_comes_back(origin: MemoryOrigin, members: Members) -> None:
    refs = put_many(origin, 60, 5000)
    async with node(origin, members.option) as cache:
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        members[1].kill()
        gets = origin.counters.gets
        await assert_served(cache, origin, refs)
        (dead,) = [each for each in cache.shared.members if each.is_out]
        assert dead.address == members[1].address
        shares = cache.shared.members.shares()
        assert origin.counters.gets - gets < 60 * shares[dead.address] + 15
        assert not cache.shared.is_bypassed
        members[1].start()
        await until(lambda: not dead.is_out)
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        gets = origin.counters.gets
        await assert_served(cache, origin, refs)
        assert origin.counters.gets == gets


async def test_the_blocks_of_a_lost_member_move(
    origin: MemoryOrigin, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "_REPLACED_S", 0.2)
    refs = put_many(origin, 60, 5000)
    async with node(origin, members.option) as cache:
        members[1].kill()
        await assert_served(cache, origin, refs)
        await until(lambda: members[1].address not in cache.shared.members.shares())
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        gets = origin.counters.gets
        await assert_served(cache, origin, refs)
        assert origin.counters.gets == gets
        members[1].start()
        await until(lambda: members[1].address in cache.shared.members.shares())


async def test_most_members_are_out(origin: MemoryOrigin, members: Members) -> None:
    refs = put_many(origin, 60, 5000)
    async with node(origin, members.option) as cache:
        for member in members[:2]:
            member.kill()
        await assert_served(cache, origin, refs)
        assert cache.shared.is_bypassed
        for member in members[:2]:
            member.start()
        await until(lambda: cache.shared.is_on)


async def test_a_tier_that_is_slower_than_the_origin(origin: MemoryOrigin) -> None:
    refs = put_many(origin, 100, 100)

    async def take_time(stream: trio.SocketStream) -> None:
        async for _ in stream:
            await trio.sleep(0.05)
            await stream.send_all(b"EN\r\n")

    async with pretender(take_time) as address, node(origin, address, timeout_s=0.15) as cache:
        for ref in refs:
            await read(cache, ref)
            if cache.shared.is_bypassed:
                break
        assert cache.shared.is_bypassed
        assert not cache.shared.is_on
        await until(lambda: cache.shared.is_on)


async def test_a_stopped_member_in_the_middle_of_a_run(
    origin: MemoryOrigin, members: Members
) -> None:
    """SIGSTOP: what other members have still comes from them."""
    ref = put(origin, "large", 64 * BLOCK_BYTES)
    async with node(origin, members.option, timeout_s=SHORT_S) as cache:
        await read_ahead(cache, ref)
        await cache.shared.stored()
        members[0].pause()
        assert await read_ahead(cache, ref) == origin.expected("large")
        members[0].go_on()


async def test_a_reader_that_gives_up_leaves_no_wrong_answer(
    origin: MemoryOrigin, member: Members
) -> None:
    """A request that is cancelled half-way closes its connection."""
    refs = put_many(origin, 30, 200_000)
    async with node(origin, member.option) as cache:
        await assert_served(cache, origin, refs)
        await cache.shared.stored()
        fetch = cache.shared.read
        for number, ref in enumerate(refs):

            async def never(offset: int, length: int) -> memoryview:
                raise AssertionError

            with trio.move_on_after(number * 0.0002):
                await fetch(ref, 0, 1, never)
        await assert_served(cache, origin, refs)
        assert only(cache).counters.bad_values == 0
