"""Members of a shared tier that say what a test wants, and real ones."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.shared.tier import SharedTier
from cachefs.types import BLOCK_BYTES, ObjectRef
from tests.cache.harness import PATIENCE_S, open_tier, until
from tests.memory_origin import MemoryOrigin
from tests.servers.memcached import Memcached, memcached_binary

Answer = Callable[[trio.SocketStream], Awaitable[None]]


class Members(list[Memcached]):
    """Real memcached processes."""

    @property
    def option(self) -> str:
        return ",".join(member.address for member in self)


@contextmanager
def memcacheds(directory: Path, count: int = 1) -> Iterator[Members]:
    """Start real members. Without memcached the test is skipped; in CI that is a failure."""
    if memcached_binary() is None:
        pytest.skip("memcached is missing: apt-get install memcached")
    members = Members(Memcached(directory / f"member-{number}") for number in range(count))
    try:
        for member in members:
            member.start()
        yield members
    finally:
        for member in members:
            member.stop()


@asynccontextmanager
async def pretender(answer: Answer) -> AsyncIterator[str]:
    """A member that treats each connection as `answer` says, which may end as it likes. Yields its
    address."""

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await answer(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def node(
    origin: MemoryOrigin,
    option: str,
    directory: Path | None = None,
    secret: bytes = b"",
    timeout_s: float = PATIENCE_S,
) -> AsyncIterator[BlockCache]:
    """A node: a cache with a shared tier. Without a directory it keeps no block itself. With the
    usual timeout, a busy machine changes no count of requests."""
    shared = SharedTier(origin.identity, secret, timeout_s)
    shared.members.use(option)
    tiers = [] if directory is None else [open_tier(directory)]
    cache = BlockCache(origin, tiers, "lru", shared=shared)
    async with trio.open_nursery() as nursery:
        await nursery.start(shared.run)
        await nursery.start(cache.run)
        await until(lambda: len(shared.members))
        try:
            yield cache
        finally:
            await cache.aclose()
            nursery.cancel_scope.cancel()


async def read(cache: BlockCache, ref: ObjectRef) -> bytes:
    """The whole object, block by block."""
    return b"".join(
        [
            bytes(await cache.read_block(ref, index, 0, ref.block_length(index)))
            for index in range(ref.block_count)
        ]
    )


async def read_ahead(cache: BlockCache, ref: ObjectRef) -> bytes:
    """The whole object, with requests for 8 blocks."""
    for first in range(0, ref.block_count, 8):
        cache.fetch(ref, first, 8, ahead=True)
    await cache.fetched(ref, 0, ref.block_count)
    return await read(cache, ref)


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


__all__ = ["BLOCK_BYTES", "until"]
