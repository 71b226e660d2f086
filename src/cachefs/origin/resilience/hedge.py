"""Hedging: send a second request when the first is late."""

from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import OriginError
from cachefs.origin.resilience.limiter import RequestSlots
from cachefs.types import Buffer


async def hedged(
    read: Callable[[], Awaitable[Buffer]],
    after_s: float,
    slots: RequestSlots,
    on_second: Callable[[], None],
) -> Buffer:
    """Call `read`, and a second time after `after_s` if a slot is free. Return the first answer
    and cancel the other request. `on_second` is called when the second request starts.

    Raises the `OriginError` of the first request to fail if the other does not succeed.
    """
    answers: list[Buffer] = []
    errors: list[OriginError] = []
    one_failed = trio.Event()

    async def ask() -> None:
        try:
            answers.append(await read())
            nursery.cancel_scope.cancel()
        except OriginError as error:
            errors.append(error)
            one_failed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        with trio.move_on_after(after_s):
            await one_failed.wait()
        if not errors and slots.try_take():
            try:
                on_second()
                await ask()
            finally:
                slots.release()
    if answers:
        return answers[0]
    raise errors[0]
