"""The replacements for pyfuse3's waiting: nobody starves, nobody is forgotten."""

import os
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from cachefs.fuse.loop import ReadLock, RequestWaiter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


async def test_a_pending_request_costs_no_turn_of_the_loop(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"x")
    waiter = RequestWaiter()
    with trio.testing.assert_no_checkpoints():
        await waiter.wait_readable(reader)


async def test_requests_in_endless_succession_leave_others_their_turn(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    os.write(writer, b"x")
    waiter = RequestWaiter()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(200):
            await waiter.wait_readable(reader)
        nursery.cancel_scope.cancel()
    assert turns >= 10


async def test_a_late_request_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    waiter = RequestWaiter()
    came = False

    async def wait() -> None:
        nonlocal came
        await waiter.wait_readable(reader)
        came = True

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not came
            os.write(writer, b"x")
    assert came


async def test_the_lock_is_exclusive_and_reaches_everybody() -> None:
    lock = ReadLock()
    inside = 0
    served: set[int] = set()

    async def take(number: int) -> None:
        nonlocal inside
        for _ in range(20):
            async with lock:
                inside += 1
                assert inside == 1
                if number % 2:
                    await trio.lowlevel.checkpoint()
                inside -= 1
            served.add(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(take, number)
    assert served == set(range(10))


async def test_while_the_last_reader_is_busy_another_one_reads() -> None:
    """The one who releases and then waits for something else must not take reading with it."""
    lock = ReadLock()
    second_has_it = trio.Event()

    async def first() -> None:
        async with lock:
            await trio.testing.wait_all_tasks_blocked()
        await second_has_it.wait()

    async def second() -> None:
        async with lock:
            second_has_it.set()

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(second)
    assert second_has_it.is_set()


async def test_a_cancelled_waiter_is_not_woken() -> None:
    lock = ReadLock()
    async with trio.open_nursery() as nursery:
        async with lock:
            with trio.move_on_after(0):
                await lock.__aenter__()
            done = trio.Event()

            async def wait() -> None:
                async with lock:
                    done.set()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(300):
            await done.wait()
