"""A connection to one member of the shared tier."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from cachefs.format.shared_value import PREFIX_BYTES, SharedFormat
from cachefs.loop_socket import LoopSocket
from cachefs.shared import wire
from cachefs.shared.wire import Answer, Head, ProtocolError
from cachefs.types import Buffer

_PIECE_BYTES = 4096
_MOST_AWAITED_BYTES = 256 << 10
"""The kernel has no room for more unread bytes of one connection, or may have none."""


class AskedBlock:
    """One block that is asked for, and what has come of it."""

    __slots__ = ("answer", "block_index", "data", "group", "key", "length", "memory")

    def __init__(
        self,
        key: bytes,
        group: int,
        block_index: int,
        length: int,
        memory: Callable[[], memoryview],
    ) -> None:
        """`group` decides which member has the block (`ObjectName.group`). `memory` returns where
        the bytes go; it is called only if they come."""
        self.key = key
        self.group = group
        self.block_index = block_index
        self.length = length
        self.memory = memory
        self.answer = Answer.MISSED
        self.data: memoryview | None = None
        """The bytes of a hit."""


class Value(NamedTuple):
    """A block to store. The prefix and the data are the value."""

    key: bytes
    prefix: bytes
    data: memoryview


class MemberConnection(LoopSocket):
    """Sends one batch of commands at a time and reads the answers. After an error it must be
    closed: the answers still on their way would be taken for those of the next commands."""

    def __init__(self, opened: socket.socket) -> None:
        super().__init__(opened)
        self._begun = b""
        """Bytes that have been received and not been used yet."""
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self.is_in_order = True
        """All answers have been read."""
        self.has_answered = False
        """A byte of the answers to the present commands has arrived."""

    async def ask(
        self,
        asked: Sequence[AskedBlock],
        shared_format: SharedFormat,
        on_first: Callable[[], None],
    ) -> None:
        """Ask for blocks and fill in the answers, in order. Calls `on_first` when the first answer
        begins. Raises `OSError`, `EOFError` and `ProtocolError`; the answers until then hold."""
        await self._ask_once(asked, shared_format, on_first)
        dropped = [block for block in asked if block.answer is Answer.DROPPED]
        if dropped:
            await self._ask_once(dropped, shared_format, lambda: None)

    async def _ask_once(
        self,
        asked: Sequence[AskedBlock],
        shared_format: SharedFormat,
        on_first: Callable[[], None],
    ) -> None:
        await self._send(b"".join([wire.ask(block.key) for block in asked]))
        for number, block in enumerate(asked):
            head = wire.read_head(await self._line())
            if not number:
                on_first()
            if head.value_bytes is None:
                block.answer = head.answer if head.answer is not Answer.HIT else Answer.MISSED
            else:
                block.answer = await self._value(block, head, shared_format)
        self.is_in_order = not self._begun

    async def _value(self, block: AskedBlock, head: Head, shared_format: SharedFormat) -> Answer:
        assert head.value_bytes is not None
        if head.answer is not Answer.HIT:
            await self._skip(head.value_bytes)
            return head.answer
        if head.value_bytes != PREFIX_BYTES + block.length:
            await self._skip(head.value_bytes)
            return Answer.BAD
        prefix = bytearray(PREFIX_BYTES)
        await self._fill(memoryview(prefix))
        data = block.memory()
        await self._fill(data)
        await self._end_of_value()
        if not shared_format.is_valid(block.key, prefix, data):
            return Answer.BAD
        block.data = data
        return Answer.HIT

    async def heads(self, commands: Sequence[bytes]) -> list[Head]:
        """Send commands whose answers have no values, and return the answers. Raises as
        `ask`."""
        await self._send(b"".join(commands))
        heads = [wire.read_head(await self._line()) for _ in commands]
        self.is_in_order = not self._begun
        return heads

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Delete values and return how many were there. Raises as `ask`."""
        await self._send(b"".join([wire.delete(key) for key in keys]))
        deleted = sum([wire.is_done(await self._line()) for _ in keys])
        self.is_in_order = not self._begun
        return deleted

    async def store(self, values: Sequence[Value]) -> list[bool]:
        """Store blocks. Return for each whether the member has taken it. Raises as `ask`."""
        pieces: list[Buffer] = []
        for key, prefix, data in values:
            line = wire.store(key, len(prefix) + data.nbytes)
            pieces += (line + prefix, data, b"\r\n")
        await self._send(*pieces)
        stored = [wire.is_done(await self._line()) for _ in values]
        self.is_in_order = not self._begun
        return stored

    async def stats(self) -> dict[bytes, int]:
        """Return the numbers that the member says of itself. Raises as `ask`."""
        await self._send(wire.STATS)
        lines: list[bytes] = []
        while (line := await self._line()) != b"END":
            lines.append(line)
            if not line.startswith(b"STAT ") or len(lines) > wire.MOST_STATS:
                raise ProtocolError(f"it said {wire.shown(line)} about itself")
        self.is_in_order = not self._begun
        return wire.read_stats(lines)

    async def _send(self, *pieces: Buffer) -> None:
        self.is_in_order = self.has_answered = False
        await self.send_all(*(memoryview(piece).cast("B") for piece in pieces))

    async def _line(self) -> bytes:
        """Return the next line without its end."""
        while (end := self._begun.find(b"\r\n")) < 0:
            if len(self._begun) > wire.LINE_BYTES:
                raise ProtocolError(f"it said {wire.shown(self._begun)} and more in one line")
            await self.await_bytes(1)
            self._begun += self._piece[: self.receive(self._piece)]
            self.has_answered = True
        line, self._begun = self._begun[:end], self._begun[end + 2 :]
        return line

    async def _fill(self, into: memoryview) -> None:
        filled = min(len(self._begun), len(into))
        into[:filled] = self._begun[:filled]
        self._begun = self._begun[filled:]
        while filled < len(into):
            count = self.receive(into[filled:])
            filled += count
            if not count:
                await self.await_bytes(min(len(into) - filled, _MOST_AWAITED_BYTES))

    async def _skip(self, size_bytes: int) -> None:
        await self._fill(memoryview(bytearray(size_bytes)))
        await self._end_of_value()

    async def _end_of_value(self) -> None:
        end = bytearray(2)
        await self._fill(memoryview(end))
        if end != b"\r\n":
            raise ProtocolError("a value is longer than it said")


async def connect(host: str, port: int) -> MemberConnection:
    """Connect to an IP address. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = opened.connect_ex((host, port))
        if code == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(opened)
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        opened.close()
        raise
    return MemberConnection(opened)
