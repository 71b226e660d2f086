"""A proxy between a client and an S3 server that spoils answers when told to.

`with FaultProxy(server.endpoint) as proxy: ...`; clients take `proxy.endpoint` for the server's.
Requests are passed on byte for byte, so that their signatures stay valid. It runs in a process of
its own: a test that waits for a page of a mapped file holds the GIL, and so would hold a proxy. No
pytest here.

As a script it serves one upstream, `HOST PORT`, and obeys lines of JSON on stdin, each of which it
answers with one on stdout; it ends with its stdin.
"""

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.servers.ports import reserved_port
from tests.servers.s3_server import stop_process

ROOT = Path(__file__).resolve().parents[2]
TRICKLE_BYTES_PER_S = 1024
RETRY_AFTER_S = 1

_TRICKLE_STEP_S = 0.125
_HEAD_BYTES_MAX = 1 << 16
_LINGER_NOT = struct.pack("ii", 1, 0)
"""With this a closed socket sends RST instead of FIN."""


class Fault(StrEnum):
    """What can befall a request or its answer."""

    REFUSE = "refuse"
    """No connection; one that stands is reset. For single requests: reset before any answer."""
    SILENCE = "silence"
    """Accepted and never answered, not even after the fault has been cleared."""
    RESET = "reset"
    """RST in the middle of the body."""
    ERROR = "500"
    BUSY = "503"
    """With Retry-After."""
    TRICKLE = "trickle"
    """The body comes at `TRICKLE_BYTES_PER_S`."""
    CUT = "cut"
    """The connection is closed in an orderly way in the middle of the body."""
    SHORT = "short"
    """Half of the body, with a Content-Length that agrees."""
    FLIP = "flip"
    """One bit in the middle of the body is another."""
    LOSE = "lose"
    """The server does what is asked, and its answer is lost: reset before any byte of it."""
    INSIDE = "inside"
    """Status 200, with an error in the body. The server does not get the request."""


_OF_THE_BODY = {Fault.RESET, Fault.TRICKLE, Fault.CUT, Fault.SHORT, Fault.FLIP}


@dataclass
class Counts:
    """Requests since the start."""

    requests: int = 0
    objects: int = 0
    """GETs of objects among them."""
    faults: int = 0
    """Requests that were spoilt."""
    rejected: int = 0
    """Requests above the limit."""
    in_flight: int = 0
    """At this moment."""


class FaultProxy:
    """Started by `with`, gone after it. All methods may be called from any thread."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self.endpoint = ""

    def __enter__(self) -> Self:
        upstream = self._upstream
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, upstream.hostname or "", str(upstream.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for the one who started us
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{json.loads(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def fault(
        self,
        fault: Fault,
        times: int | None = None,
        objects_only: bool = False,
        method: str = "",
        text: str = "",
    ) -> None:
        """Spoil the next `times` requests, all of them for None. Replaces what was told before.
        Bodies are flipped in objects only: nothing could notice it in a listing. Only requests with
        this `method` and with `text` in their path or query, if these are given."""
        objects_only = objects_only or fault is Fault.FLIP
        self._tell(fault=fault, times=times, objects_only=objects_only, method=method, text=text)

    def clear(self) -> None:
        """Be a faithful proxy again."""
        self._tell(fault=None)

    def limit(self, in_flight: int | None, latency_s: float = 0) -> None:
        """Answer 503, without Retry-After, above `in_flight` requests at one time; keep every other
        one waiting for `latency_s` before it is passed on."""
        self._tell(limit=in_flight, latency_s=latency_s)

    def counts(self) -> Counts:
        return Counts(**self._tell())

    def _tell(self, **order: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


# -- in the proxy's own process ----------------------------------------------------------------


@dataclass
class _Head:
    """The first line and the headers of a request or an answer, as they came."""

    raw: bytes

    @property
    def first_line(self) -> list[str]:
        return self.raw.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)

    def header(self, name: str) -> str:
        for line in self.raw.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode("latin-1").lower() == name:
                return value.decode("latin-1").strip()
        return ""

    @property
    def is_object_get(self) -> bool:
        method, target, _ = self.first_line
        path, _, query = target.partition("?")
        return method == "GET" and "list-type=" not in query and path.count("/") > 1

    @property
    def closes(self) -> bool:
        return self.header("connection").lower() == "close"

    def with_length(self, length: int) -> bytes:
        """The same head for a body of `length` bytes in one piece."""
        dropped = (b"content-length:", b"transfer-encoding:")
        lines = [ln for ln in self.raw.split(b"\r\n") if not ln.lower().startswith(dropped)]
        return b"\r\n".join([*lines[:-2], b"Content-Length: %d" % length, b"", b""])


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """None when the other side has gone."""
    try:
        return _Head(await reader.readuntil(b"\r\n\r\n"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _read_body(reader: asyncio.StreamReader, head: _Head) -> bytes:
    if head.header("transfer-encoding").lower() == "chunked":
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            chunks.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return b"".join(chunks)
    if length := head.header("content-length"):
        return await reader.readexactly(int(length))
    return await reader.read()


class _Upstream:
    """A connection to the server, opened when it is needed and kept."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, head: _Head, body: bytes) -> tuple[_Head, bytes]:
        """The answer to one request, once more over a new connection if a kept one has gone."""
        kept = self._streams is not None
        try:
            return await self._ask(head, body)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            if not kept:
                raise
            return await self._ask(head, body)

    async def _ask(self, head: _Head, body: bytes) -> tuple[_Head, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=_HEAD_BYTES_MAX)
        reader, writer = self._streams
        writer.write(head.raw + body)
        answer = _Head(await reader.readuntil(b"\r\n\r\n"))
        no_body = head.first_line[0] == "HEAD" or answer.first_line[1] in {"204", "304"}
        data = b"" if no_body else await _read_body(reader, answer)
        if answer.closes:
            self.close()
        return answer, data

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class _Server:
    """The listening side: at most one fault and one limit at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._counts = Counts()
        self._clients: set[asyncio.StreamWriter] = set()
        self._fault: Fault | None = None
        self._times: int | None = None
        self._objects_only = False
        self._method = self._text = ""
        self._limit: int | None = None
        self._latency_s = 0.0
        self._listener: asyncio.Server | None = None
        self._reserved = reserved_port()
        self._port = self._reserved.getsockname()[1]

    async def run(self) -> None:
        await self._listen()
        print(self._port, flush=True)
        stdin = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
        )
        while line := await stdin.readline():
            await self._obey(json.loads(line))
            print(json.dumps(asdict(self._counts)), flush=True)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._serve, "127.0.0.1", self._port, limit=_HEAD_BYTES_MAX, backlog=1024
            )

    async def _obey(self, order: dict[str, Any]) -> None:
        if "limit" in order:
            self._limit, self._latency_s = order["limit"], order["latency_s"]
        if "fault" not in order:
            return
        self._fault = order["fault"] and Fault(order["fault"])
        self._times = order.get("times")
        self._objects_only = order.get("objects_only", False)
        self._method, self._text = order.get("method", ""), order.get("text", "")
        is_for_all = self._times is None and not (self._objects_only or self._method or self._text)
        if self._fault is Fault.REFUSE and is_for_all:
            assert self._listener is not None
            self._listener.close()
            self._listener = None
            for writer in list(self._clients):
                _reset(writer)
        else:
            await self._listen()

    def _take_fault(self, head: _Head) -> Fault | None:
        """What this request is to suffer."""
        fault = self._fault
        if fault is None or (self._objects_only and not head.is_object_get):
            return None
        method, target, _ = head.first_line
        if self._method not in ("", method) or self._text not in target:
            return None
        if fault in _OF_THE_BODY and head.first_line[0] != "GET":
            return None
        if self._times is not None:
            self._times -= 1
            if not self._times:
                self._fault = None
        self._counts.faults += 1
        return fault

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = _Upstream(*self._address)
        self._clients.add(writer)
        try:
            while (head := await _read_head(reader)) is not None:
                length = int(head.header("content-length") or 0)
                body = await reader.readexactly(length) if length else b""
                self._counts.requests += 1
                self._counts.objects += head.is_object_get
                self._counts.in_flight += 1
                try:
                    await self._answer(head, body, upstream, reader, writer)
                finally:
                    self._counts.in_flight -= 1
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        finally:
            self._clients.discard(writer)
            upstream.close()
            writer.close()

    async def _answer(
        self,
        head: _Head,
        body: bytes,
        upstream: _Upstream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        fault = self._take_fault(head)
        if fault is Fault.REFUSE:
            _reset(writer)
            return
        if fault is Fault.SILENCE:
            while await reader.read(_HEAD_BYTES_MAX):
                pass
            return
        if fault is Fault.ERROR:
            await _send(writer, _error(head, "500 Internal Server Error", "InternalError"))
            return
        if fault is Fault.BUSY:
            again = f"Retry-After: {RETRY_AFTER_S}\r\n"
            await _send(writer, _error(head, "503 Slow Down", "SlowDown", again))
            return
        if fault is Fault.INSIDE:
            await _send(writer, _error(head, "200 OK", "InternalError"))
            return
        if fault is Fault.LOSE:
            await upstream.ask(head, body)
            _reset(writer)
            return
        if self._limit is not None and self._counts.in_flight > self._limit:
            self._counts.rejected += 1
            await _send(writer, _error(head, "503 Slow Down", "SlowDown"))
            return
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        answer, data = await upstream.ask(head, body)
        if head.first_line[0] == "HEAD" or not data:
            await _send(writer, answer.raw)
        elif fault is None:
            await _send(writer, answer.with_length(len(data)) + data)
        else:
            await _send_spoilt(writer, answer, data, fault)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _send_spoilt(
    writer: asyncio.StreamWriter, answer: _Head, data: bytes, fault: Fault
) -> None:
    whole, half = answer.with_length(len(data)), len(data) // 2
    if fault is Fault.SHORT:
        await _send(writer, answer.with_length(half) + data[:half])
    elif fault is Fault.FLIP:
        flipped = bytearray(data)
        flipped[half] ^= 1
        await _send(writer, whole + flipped)
    elif fault is Fault.TRICKLE:
        await _send(writer, whole)
        step = int(TRICKLE_BYTES_PER_S * _TRICKLE_STEP_S)
        for start in range(0, len(data), step):
            await asyncio.sleep(_TRICKLE_STEP_S)
            await _send(writer, data[start : start + step])
    else:
        await _send(writer, whole + data[:half])
        await asyncio.sleep(_TRICKLE_STEP_S)  # what was sent shall arrive
        if fault is Fault.RESET:
            _reset(writer)
        else:
            writer.close()


def _error(head: _Head, status: str, code: str, headers: str = "") -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>"
    answer = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\n{headers}"
    answer += f"Content-Length: {len(body)}\r\n\r\n"
    return (answer if head.first_line[0] == "HEAD" else answer + body).encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(_Server(sys.argv[1], int(sys.argv[2])).run())
