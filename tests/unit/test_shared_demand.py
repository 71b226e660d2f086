"""Which share of the blocks a shared tier keeps that is smaller than the data."""

import random

import trio

from cachefs.shared.demand import Demand
from cachefs.types import BlockKey

LENGTH = 100_000


def blocks(count: int, seed: int = 1) -> list[tuple[BlockKey, float]]:
    chance = random.Random(seed)
    return [(BlockKey(chance.randbytes(16), 0), chance.random()) for _ in range(count)]


def note(demand: Demand, asked: list[tuple[BlockKey, float]], now_s: float = 0.0) -> None:
    for block, hashed in asked:
        demand.note(block, hashed, LENGTH, now_s)


async def test_without_a_limit_all_is_kept() -> None:
    demand = Demand()
    note(demand, blocks(1000))
    await demand.compute()
    assert demand.share == 1.0


async def test_the_share_is_what_fits() -> None:
    for count in (1000, 30_000):
        demand = Demand()
        demand.limit_bytes = count * LENGTH // 4
        asked = blocks(count)
        for _ in range(3):  # epochs
            random.Random(2).shuffle(asked)
            note(demand, asked)
        await demand.compute()
        assert abs(demand.share - 0.25) < 0.02


async def test_enough_room_keeps_all() -> None:
    demand = Demand()
    demand.limit_bytes = 2000 * LENGTH
    note(demand, blocks(1000))
    await demand.compute()
    assert demand.share == 1.0


async def test_blocks_of_this_node_count_once() -> None:
    """Half of the data is in the cache of the node; it asked for all of it in the first epoch."""
    demand, asked = Demand(), blocks(2000)
    local = {block for block, _ in asked[:1000]}
    demand.is_local = local.__contains__
    demand.local_bytes = lambda: 1000 * LENGTH
    demand.limit_bytes = 500 * LENGTH
    note(demand, asked)
    await demand.compute()
    assert abs(demand.share - 0.25) < 0.01


async def test_data_of_yesterday_is_forgotten() -> None:
    demand = Demand()
    demand.limit_bytes = 10_000 * LENGTH
    note(demand, blocks(20_000), now_s=0.0)
    for hour in range(25, 50):
        note(demand, blocks(10_000, seed=5), now_s=hour * 3600.0)
    await demand.compute()
    assert demand.share > 0.9


async def test_the_loop_runs_while_the_share_is_computed() -> None:
    demand = Demand()
    demand.limit_bytes = LENGTH
    note(demand, blocks(4000))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await demand.compute()
        nursery.cancel_scope.cancel()
    assert turns > 10
