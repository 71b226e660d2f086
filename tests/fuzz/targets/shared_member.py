"""Answers of a member of the shared tier (shared/connection.py, wire.py)."""

import socket
from functools import partial

import trio

from cachefs.format.shared_value import SharedFormat
from cachefs.shared import wire
from cachefs.shared.connection import AskedBlock, MemberConnection, Value
from cachefs.shared.wire import Answer, ProtocolError

BODY = b"x" * 100
FORMAT = SharedFormat(b"")
KEY = FORMAT.key(FORMAT.name("s3://b", "a", "v"), 0)
VALUE = FORMAT.prefix(KEY, BODY) + BODY


async def _ask(data: bytes) -> None:
    """Somebody has sent `data` and hung up. `@` stands for a right value: no fuzzer guesses one."""
    data = data.replace(b"@", b"VA %d\r\n%b\r\n" % (len(VALUE), VALUE))[:65536]
    asked = [
        AskedBlock(KEY, 0, 0, len(BODY), partial(memoryview, bytearray(len(BODY))))
        for _ in range(3)
    ]
    mine, peer = socket.socketpair()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    connection = MemberConnection(mine)
    try:
        with trio.fail_after(300):
            try:
                await connection.ask(asked, FORMAT, lambda: None)
                await connection.heads([wire.PROBE])
                await connection.store([Value(KEY, VALUE[:17], memoryview(BODY))])
                await connection.delete([KEY])
            except (ProtocolError, OSError, EOFError):
                pass
        for block in asked:
            assert (block.answer is Answer.HIT) == (block.data is not None)
            assert block.data is None or bytes(block.data) == BODY
    finally:
        connection.close()
        peer.close()


GROWING = {
    "one line": lambda count: b"x" * count,
    "words": lambda count: b"VA" + b" 1" * (count // 2),
    "flags": lambda count: b"HD" + b" s1" * (count // 3) + b"\r\n",
    "empty lines": lambda count: b"\r\n" * (count // 2),
    "dropped": lambda count: b"EN\r\n" * (count // 4),
    "a value": lambda count: b"VA %d\r\n" % count + b"x" * count + b"\r\n",
}
MOST_BYTES = 1 << 16
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    trio.run(_ask, data)
