"""`ResilientWriter` over a writer in memory, on a clock that jumps."""

import errno
import os
import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from cachefs.errors import (
    ConflictError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    SpoolError,
)
from cachefs.origin.resilience import Resilience, ResilientOrigin, writing
from cachefs.origin.resilience.writing import ResilientWriter
from cachefs.origin.writable import (
    NO_ATTRIBUTES,
    Attributes,
    BufferContent,
    Condition,
    Content,
    Guarantees,
    WritableOrigin,
    content_of,
)
from cachefs.types import Buffer, ObjectMeta
from tests.memory_origin import MemoryOrigin

DOWN = OriginUnavailableError("down")
PIECES = 100
SETTINGS = Resilience(write_timeout_s=60, write_request_s=20)


class Writer(WritableOrigin):
    """Only `put`, and it does what `on_put` does."""

    def __init__(self) -> None:
        self.guarantees = Guarantees()
        self.write_ids: list[str | None] = []
        self.on_put: Callable[[Content], Awaitable[None]] | None = None

    async def put(
        self,
        path: str,
        body: Buffer | Content,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        self.write_ids.append(write_id)
        await trio.sleep(0.01)
        if self.on_put is not None:
            await self.on_put(content_of(body))
        return ObjectMeta(content_of(body).size_bytes, 0, "v")


Writer.__abstractmethods__ = frozenset()


class Store(MemoryOrigin):
    def __init__(self) -> None:
        super().__init__(delay_s=0.01)
        self._writer = Writer()  # type: ignore[abstract]
        self.is_down = False

    @property
    def writer(self) -> Writer:
        return self._writer

    async def _request(self) -> None:
        if self.is_down:
            raise DOWN
        await super()._request()


def resilient(store: Store) -> ResilientOrigin:
    return ResilientOrigin(store, SETTINGS, random.Random(1))


def writer_of(origin: ResilientOrigin) -> ResilientWriter:
    assert origin.writer is not None
    return origin.writer


@pytest.mark.parametrize("error", [DOWN, OriginBusyError("busy")])
async def test_tries_have_one_id(error: OriginError, autojump_clock: MockClock) -> None:
    store = Store()
    failures = [error] * 3

    async def fail(_: Content) -> None:
        if failures:
            raise failures.pop()

    store.writer.on_put = fail
    await writer_of(resilient(store)).put("a", b"data")
    assert len(store.writer.write_ids) == 4
    assert len(set(store.writer.write_ids)) == 1
    assert store.writer.write_ids[0]


@pytest.mark.parametrize("error", [ConflictError("changed"), OriginError("refused")])
async def test_definite_answers_are_not_tried_again(
    error: OriginError, autojump_clock: MockClock
) -> None:
    store = Store()

    async def fail(_: Content) -> None:
        raise error

    store.writer.on_put = fail
    with pytest.raises(type(error)):
        await writer_of(resilient(store)).put("a", b"data")
    assert len(store.writer.write_ids) == 1


async def test_silence_ends_a_write(autojump_clock: MockClock) -> None:
    store = Store()

    async def be_silent(_: Content) -> None:
        await trio.sleep_forever()

    store.writer.on_put = be_silent
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError, match=r"can't be written: no answer within 20.0 s"):
        await writer_of(resilient(store)).put("a", b"data")
    assert 50 < trio.current_time() - began_at < 90
    assert len(store.writer.write_ids) >= 3


async def test_a_write_ends_whose_bytes_are_taken_each_time(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes the body, and then fails or loses the answer."""
    monkeypatch.setattr(writing, "_TELL_EVERY_S", -1.0)  # real time stands still here
    store = Store()

    async def take_and_fail(content: Content) -> None:
        await trio.sleep(0.1)
        content.read(0, content.size_bytes)
        await trio.sleep(0.1)
        raise DOWN

    store.writer.on_put = take_and_fail
    began_at = trio.current_time()
    with trio.fail_after(600), pytest.raises(OriginUnavailableError):
        await writer_of(resilient(store)).put("a", b"data")
    assert 50 < trio.current_time() - began_at < 90


async def test_bytes_that_are_sent_postpone_the_deadlines(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_TELL_EVERY_S", -1.0)  # real time stands still here
    store = Store()

    async def send_slowly(content: Content) -> None:
        for offset in range(PIECES):
            content.read(offset, 1)
            await trio.sleep(15)

    store.writer.on_put = send_slowly
    await writer_of(resilient(store)).put("a", bytes(PIECES))
    assert len(store.writer.write_ids) == 1


@pytest.mark.expect_log("does not answer; what is not cached fails at once")
@pytest.mark.expect_log("answers again")
async def test_a_write_outlasts_an_outage(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    meta = store.put("f", b"data")

    async def fail_if_down(_: Content) -> None:
        if store.is_down:
            raise DOWN

    store.writer.on_put = fail_if_down
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        store.is_down = True
        with pytest.raises(OriginUnavailableError):
            await origin.read("f", meta, 0, 4)
        await trio.sleep(5)
        assert origin.is_down

        async def recover() -> None:
            await trio.sleep(30)
            store.is_down = False

        nursery.start_soon(recover)
        began_at = trio.current_time()
        await writer_of(origin).put("a", b"data")
        assert trio.current_time() - began_at > 20
        nursery.cancel_scope.cancel()


@pytest.mark.expect_log("does not answer; what is not cached fails at once")
async def test_a_write_fails_in_a_long_outage(autojump_clock: MockClock) -> None:
    store = Store()
    origin = resilient(store)
    meta = store.put("f", b"data")
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        store.is_down = True
        with pytest.raises(OriginUnavailableError):
            await origin.read("f", meta, 0, 4)
        await trio.sleep(5)
        assert origin.is_down
        began_at = trio.current_time()
        with pytest.raises(OriginUnavailableError, match=r"does not answer \(since"):
            await writer_of(origin).put("a", b"data")
        assert 50 < trio.current_time() - began_at < 90
        nursery.cancel_scope.cancel()


async def test_a_disk_that_can_not_be_read_is_no_outage(autojump_clock: MockClock) -> None:
    class OnBadDisk(BufferContent):
        def read(self, offset: int, length: int) -> Buffer:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def read_all(content: Content) -> None:
        content.read(0, content.size_bytes)

    store = Store()
    store.writer.on_put = read_all
    with pytest.raises(SpoolError, match="spool's disk: Input/output error"):
        await writer_of(resilient(store)).put("a", OnBadDisk(b"data"))
    assert len(store.writer.write_ids) == 1


async def test_bytes_that_are_sent_long_after_they_were_read(autojump_clock: MockClock) -> None:
    async def send(content: Content) -> None:
        content.read(0, content.size_bytes)
        for _ in range(PIECES):
            await trio.sleep(SETTINGS.write_request_s / 2)
            content.note_sent()

    store = Store()
    store.writer.on_put = send
    await writer_of(resilient(store)).put("a", b"data")
    assert len(store.writer.write_ids) == 1
