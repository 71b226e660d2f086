"""Process a stack of items, several at a time, while processing adds more of them."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")

_AT_A_TIME = 8


async def work_off(stack: list[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Call `work` for each item of `stack`, including those that `work` adds; up to 8 at a time.

    The latest item comes first, so that a wide tree needs little memory.
    """
    busy = 0
    changed = trio.Event()

    async def take() -> None:
        nonlocal busy, changed
        while stack or busy:
            if not stack:
                await changed.wait()
                continue
            item = stack.pop()
            busy += 1
            try:
                await work(item)
            finally:
                busy -= 1
                changed.set()
                changed = trio.Event()

    async with trio.open_nursery() as nursery:
        for _ in range(_AT_A_TIME):
            nursery.start_soon(take)
