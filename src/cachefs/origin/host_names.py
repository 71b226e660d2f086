"""Looking up the names of hosts in threads of their own.

A DNS server that doesn't answer keeps a thread for a minute and longer, whoever gives up meanwhile.
trio would take these threads from those that write to disks.
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

T = TypeVar("T")

_AT_A_TIME = 8


class HostNames(trio.abc.HostnameResolver):
    """For `trio.socket.set_custom_hostname_resolver`. A look-up waits while too many hang."""

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
