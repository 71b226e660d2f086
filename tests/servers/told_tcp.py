"""A TCP server that answers what a function says: for answers that no real server gives.

`with ToldTcp(answer) as server: ... server.port ...`; `answer` is called with each line that a
client sends, without its end, and returns what is sent back, or None to close the connection. The
server sends until the pieces end, the client goes, or `MOST_S` are over. No pytest here.
"""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

MOST_S = 120.0

Answer = bytes | Iterable[bytes] | None


class ToldTcp:
    """Started by `with`, gone after it. `sent_bytes` counts what went to the kernel."""

    def __init__(self, answer: Callable[[bytes], Answer], greeting: bytes = b"") -> None:
        self.answer = answer
        self.greeting = greeting
        self.asked: list[bytes] = []
        self.sent_bytes = 0
        self.is_stopped = False

    @property
    def port(self) -> int:
        port: int = self._server.server_address[1]
        return port

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"told": self})
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_stopped = True
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.StreamRequestHandler):
    told: ToldTcp

    def handle(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            self._send(self.told.greeting)
            for line in self.rfile:
                self.told.asked.append(line.rstrip(b"\r\n"))
                answer = self.told.answer(line.rstrip(b"\r\n"))
                if answer is None:
                    return
                self._send(answer)

    def _send(self, answer: bytes | Iterable[bytes]) -> None:
        until = time.monotonic() + MOST_S
        for piece in [answer] if isinstance(answer, bytes) else answer:
            if self.told.is_stopped or time.monotonic() > until:
                return
            self.connection.sendall(piece)
            self.told.sent_bytes += len(piece)
