"""Host name look-ups in separate threads.

A DNS server that doesn't answer blocks a thread for a minute or longer, even if the caller has
given up. By default trio would use the same threads as for disk writes.
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

T = TypeVar("T")

_AT_A_TIME = 8


class HostNames(trio.abc.HostnameResolver):
    """A resolver for `trio.socket.set_custom_hostname_resolver`. At most `_AT_A_TIME` look-ups run
    at a time, including abandoned ones that still hang; further ones wait."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(_AT_A_TIME)

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> list[Any]:
        """See `socket.getaddrinfo`."""
        return await self._run(partial(socket.getaddrinfo, *args, **kwargs))

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        """See `socket.getnameinfo`."""
        return await self._run(partial(socket.getnameinfo, sockaddr, flags))

    async def _run(self, look_up: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(look_up, limiter=self._threads, abandon_on_cancel=True)
