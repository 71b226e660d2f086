"""Blocks that nodes share, on real memcached processes."""

import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import OriginUnavailableError
from cachefs.shared.tier import SharedTier
from cachefs.types import BLOCK_BYTES, ObjectRef
from tests.cache.harness import put, put_many
from tests.memory_origin import MemoryOrigin
from tests.shared.harness import Members, node, read, read_ahead, until

pytestmark = pytest.mark.server


@asynccontextmanager
async def nodes(
    origin: MemoryOrigin, members: Members, count: int
) -> AsyncIterator[list[BlockCache]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node(origin, members.option)) for _ in range(count)]


async def read_all(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    for ref in refs:
        assert await read(cache, ref) == origin.expected(ref.path)


async def test_the_second_node_needs_no_origin(origin: MemoryOrigin, members: Members) -> None:
    refs = [*put_many(origin, 30, 50_000), put(origin, "large", 9 * BLOCK_BYTES + 5)]
    async with nodes(origin, members, 2) as (first, second):
        await read_all(first, origin, refs)
        await first.shared.stored()
        gets = origin.counters.gets
        await read_all(second, origin, refs)
        assert origin.counters.gets == gets
        assert second.shared.counters.hits == 30 + 10
        assert second.shared.counters.hit_bytes == 30 * 50_000 + 9 * BLOCK_BYTES + 5
        assert second.counters.fetches == 0
        assert second.counters.fetched_bytes == 0


@pytest.mark.usefixtures("_patient_with_holders")
async def test_each_block_is_fetched_once_by_all_nodes(
    origin: MemoryOrigin, members: Members
) -> None:
    origin.delay_s = 0.02
    refs = put_many(origin, 60, 30_000)

    async def epoch(cache: BlockCache, seed: int) -> None:
        order = list(refs)
        random.Random(seed).shuffle(order)
        await read_all(cache, origin, order)

    async with nodes(origin, members, 4) as caches:
        async with trio.open_nursery() as nursery:
            for seed, cache in enumerate(caches):
                nursery.start_soon(epoch, cache, seed)
        assert origin.counters.gets == len(refs)


@pytest.mark.usefixtures("_patient_with_holders")
async def test_one_node_fetches_what_all_want_at_once(
    origin: MemoryOrigin, member: Members
) -> None:
    origin.delay_s = 0.2
    ref = put(origin, "large", 5 * BLOCK_BYTES)
    async with nodes(origin, member, 5) as caches:
        async with trio.open_nursery() as nursery:
            for cache in caches:
                nursery.start_soon(read_ahead, cache, ref)
        # If two nodes ask at the same time, each may get the leases of some of the blocks.
        assert origin.counters.get_bytes == 5 * BLOCK_BYTES
        assert sum(cache.shared.counters.waited for cache in caches) == 4 * 5


async def test_runs_with_gaps_come_from_both(origin: MemoryOrigin, members: Members) -> None:
    """The tier has every third block: one request for each gap, and the bytes are in order."""
    ref = put(origin, "large", 24 * BLOCK_BYTES + 77)
    async with nodes(origin, members, 2) as (first, second):
        for index in range(0, 24, 3):
            await first.read_block(ref, index, 0, BLOCK_BYTES)
        await first.shared.stored()
        gets = origin.counters.gets
        assert await read_ahead(second, ref) == origin.expected("large")
        assert second.shared.counters.hits == 8
        assert origin.counters.gets - gets == 9 + 1  # 3 requests of 8 blocks have 10 gaps
        await second.shared.stored()
    async with node(origin, members.option) as third:
        gets = origin.counters.gets
        assert await read_ahead(third, ref) == origin.expected("large")
        assert origin.counters.gets == gets


async def test_files_together(origin: MemoryOrigin, members: Members) -> None:
    """A load asks for many small files with one call."""
    origin.reads_many = True
    refs = put_many(origin, 32, 40_000)
    async with nodes(origin, members, 2) as (first, second):
        assert await first.fetch_together(refs, 8) == []
        assert first.counters.fetches == 32
        await first.shared.stored()
        gets = origin.counters.gets
        assert await second.fetch_together(refs, 8) == []
        assert origin.counters.gets == gets
        assert second.counters.fetches == 0
        assert second.shared.counters.hits == 32


async def test_another_version_is_another_block(origin: MemoryOrigin, member: Members) -> None:
    old = put(origin, "a", 50_000)
    async with nodes(origin, member, 2) as (first, second):
        await read(first, old)
        await first.shared.stored()
        new = put(origin, "a", 50_000, seed=1)
        assert await read(second, new) == origin.expected("a")
        assert second.shared.counters.hits == 0


async def test_blocks_that_a_look_up_brought_are_stored(
    origin: MemoryOrigin, member: Members
) -> None:
    ref = put(origin, "a", 50_000)
    async with nodes(origin, member, 2) as (first, second):
        first.put_ahead(ref, origin.expected("a"))
        await first.shared.stored()
        assert await read(second, ref) == origin.expected("a")
        assert origin.counters.gets == 0
        second.put_ahead(ref, origin.expected("a"))
        await second.shared.stored()
        assert sum(each.counters.stored_blocks for each in second.shared.members) == 0


async def test_look_ups_bring_nothing_while_the_tier_has_most(
    origin: MemoryOrigin, member: Members
) -> None:
    refs = put_many(origin, 40, 1000)
    async with nodes(origin, member, 2) as (first, second):
        await read_all(first, origin, refs)
        assert not first.shared.serves_most
        await first.shared.stored()
        await read_all(second, origin, refs)
        assert second.shared.serves_most


async def test_an_origin_that_is_away(origin: MemoryOrigin, member: Members) -> None:
    """What the tier has is served; the rest fails as without it, and nothing is left behind."""
    here, away = put(origin, "here", 60_000), put(origin, "away", 3 * BLOCK_BYTES)
    async with nodes(origin, member, 2) as (first, second):
        await read(first, here)
        await first.read_block(away, 1, 0, BLOCK_BYTES)
        await first.shared.stored()
        origin.fail_next(1000, OriginUnavailableError("away"))
        assert await read(second, here) == origin.expected("here")
        with pytest.raises(OriginUnavailableError, match="away"):
            await read_ahead(second, away)
        second.fetch(away, 0, 3, ahead=True)
        with pytest.raises(OriginUnavailableError, match="away"):
            await second.read_block(away, 0, 0, BLOCK_BYTES)
        second.fetch(away, 0, 3, ahead=True)
        found = await second.read_block(away, 1, 0, BLOCK_BYTES)
        assert found == origin.expected("away")[BLOCK_BYTES : 2 * BLOCK_BYTES]
        origin.heal()
        assert await read(second, away) == origin.expected("away")


async def test_blocks_are_counted(origin: MemoryOrigin, members: Members) -> None:
    ref = put(origin, "a", 20 * BLOCK_BYTES)
    async with node(origin, members.option) as cache:
        assert await cache.shared.count_blocks(ref, 1000) == 0
        await read_ahead(cache, ref)
        await cache.shared.stored()
        assert await cache.shared.count_blocks(ref, 1000) == 20
        assert await cache.shared.count_blocks(ref, 3) == 3


async def test_smaller_than_the_data(origin: MemoryOrigin, members: Members) -> None:
    refs = put_many(origin, 400, 2000)
    async with nodes(origin, members, 2) as caches:
        for cache in caches:
            cache.shared.demand.limit_bytes = 400 * 2000 // 4
        for cache in caches:
            await read_all(cache, origin, refs[:200])
            await cache.shared.demand.compute()
            await read_all(cache, origin, refs[200:])
            await cache.shared.demand.compute()
            assert 0.2 < cache.shared.demand.share < 0.32
            await cache.shared.stored()
        async with node(origin, members.option) as third:
            third.shared.demand.limit_bytes = 1
            third.shared.demand.share = caches[0].shared.demand.share
            await read_all(third, origin, refs)
            hits = third.shared.counters.hits
            assert 0.15 * 400 < hits < 0.35 * 400
            assert hits + third.counters.fetches == 400


async def test_members_change_while_it_is_used(
    origin: MemoryOrigin, members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = put_many(origin, 60, 5000)
    file = tmp_path / "members"
    file.write_text(f"# the first two\n{members[0].address}\n{members[1].address}  # and this\n")
    async with node(origin, str(file)) as cache:
        assert [each.address for each in cache.shared.members] == sorted(
            member.address for member in members[:2]
        )
        await read_all(cache, origin, refs)
        kept = {each.address: each for each in cache.shared.members}
        cache.shared.members.use(members.option)
        await until(lambda: len(cache.shared.members) == 3)
        assert all(kept.get(each.address) in (each, None) for each in cache.shared.members)
        await read_all(cache, origin, refs)
        cache.shared.members.use("off")
        await until(lambda: len(cache.shared.members) == 0)
        assert not cache.shared.is_on
        await read_all(cache, origin, refs)


@pytest.mark.expect_log("the members can't be read from .*No such file")
@pytest.mark.expect_log("names no members")
async def test_a_file_of_members_that_vanishes(
    origin: MemoryOrigin, member: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachefs.shared import members as module

    monkeypatch.setattr(module, "_READ_AGAIN_S", 0.05)
    file = tmp_path / "members"
    file.write_text(member.option)
    async with node(origin, str(file)) as cache:
        file.unlink()
        await until(lambda: cache.shared.members.problem)
        assert len(cache.shared.members) == 1
        file.write_text("")
        await until(lambda: "names no members" in str(cache.shared.members.problem))
        assert len(cache.shared.members) == 1
        file.write_text(f"{member.option}\n127.0.0.1:1\n")
        await until(lambda: len(cache.shared.members) == 2)
        assert cache.shared.members.problem is None


async def test_a_dns_name(origin: MemoryOrigin, member: Members) -> None:
    async with node(origin, f"dns:localhost:{member[0].port}") as cache:
        addresses = [each.address for each in cache.shared.members]
        assert f"127.0.0.1:{member[0].port}" in addresses


@pytest.mark.expect_log("nowhere.invalid.: no answer")
async def test_a_name_that_can_not_be_resolved_for_a_while(
    origin: MemoryOrigin, member: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member stays, and others are found."""
    from cachefs.shared import discovery
    from cachefs.shared import members as module

    monkeypatch.setattr(module, "_READ_AGAIN_S", 0.05)
    hosts = {"nowhere.invalid": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}

    async def resolve(name: str, port: int) -> list[str]:
        await trio.lowlevel.checkpoint()
        if not hosts[name]:
            raise OSError("no answer")
        return hosts[name]

    monkeypatch.setattr(discovery, "_resolve", resolve)
    port = member[0].port
    async with node(origin, f"127.0.0.1:{port},nowhere.invalid:{port}") as cache:
        before = list(cache.shared.members)
        assert len(before) == 2
        hosts["nowhere.invalid"] = []
        await until(lambda: cache.shared.members.problem)
        assert list(cache.shared.members) == before
        hosts["nowhere.invalid"] = ["127.0.0.2"]
        await until(lambda: cache.shared.members.problem is None)
        assert len(cache.shared.members) == 2
        assert list(cache.shared.members) != before


@pytest.mark.expect_log("it is no host name")
async def test_one_bad_name_does_not_hide_the_other_members(
    origin: MemoryOrigin, member: Members
) -> None:
    async with node(origin, f"{member.option},a..b:2") as cache:
        assert [each.address for each in cache.shared.members] == [member[0].address]


@pytest.mark.expect_log("is a FIFO, not a regular file")
async def test_a_fifo_in_the_place_of_the_file(origin: MemoryOrigin, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    shared = SharedTier(origin.identity)
    shared.members.use(str(tmp_path / "fifo"))
    async with trio.open_nursery() as nursery:
        await nursery.start(shared.run)
        await until(lambda: shared.problem)
        nursery.cancel_scope.cancel()
