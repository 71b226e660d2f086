"""Limits how many requests a server answers each second, so that no client, and no number of them,
takes the loop away from readers."""

import math

import trio
from starlette.types import ASGIApp, Receive, Scope, Send

_BURST_S = 1.0


class Paced:
    """Lets `per_s` requests through each second, after a pause also those of a second at once.
    Others wait, in the order of their arrival. One that is given up meanwhile costs nothing."""

    def __init__(self, app: ASGIApp, per_s: float) -> None:
        self._app = app
        self._interval_s = 1.0 / per_s
        self._turn = trio.Lock()
        self._next_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn:
            await trio.sleep_until(self._next_at)
            began_at = max(self._next_at, trio.current_time() - _BURST_S)
            self._next_at = began_at + self._interval_s
        await self._app(scope, receive, send)
