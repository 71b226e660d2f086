"""One HTTP request and its answer, on connections of its own: everything that is not sent on the
event loop or by `DirectReader`.

A PUT of 100 KB costs 1.1 ms of CPU in urllib3, 650 us in http.client and 480 us here (16 threads,
SeaweedFS on the same two cores).

A request that nobody waits for any more must not be executed later, when its bytes could replace
newer ones. So `Exchange.give_up` breaks the connection at once. The server drops a request whose
body is incomplete.

All functions here but `Exchange.give_up` block and must be called in worker threads.
"""

import contextlib
import io
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from botocore.awsrequest import AWSPreparedRequest
from botocore.httpsession import URLLib3Session

from cachefs.foreign_numbers import whole_number
from cachefs.origin.options import OriginOptions
from cachefs.origin.proxies import proxy_for
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.tls import TlsConnector, address_of, connect_tcp
from cachefs.origin.writable import Content

PIECE_BYTES = 256 << 10
"""A body of at most this size is sent together with its head."""
REUSED_S = 3.0
"""A connection that was idle for longer may have been closed by the server."""
_LINE_BYTES = 16 << 10
_HEAD_LINES = 100
"""The most lines of a head, and of the trailers behind the chunks of a body."""
_MOST_CHUNKS = 10_000
MOST_INTERIM = 10
"""The most heads with a status of 1xx, which may stand before the answer."""
_MOST_BYTES = 4 << 20
"""A longer answer to a write is refused. The longest names 1,000 keys of 1,024 bytes."""
_MOST_IDLE = 64


class BrokenAnswerError(Exception):
    """The answer can't be understood, or it is incomplete."""


class TooLongAnswerError(BrokenAnswerError):
    """The answer has more bytes than the request allows."""


class GivenUpError(Exception):
    """Nobody waits for the answer any more."""


class Answer(NamedTuple):
    """The answer to a request. `headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes


class Request(NamedTuple):
    """A signed request. `path` and `query` are quoted; `headers` lack Host and Content-Length."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    content: Content
    most_bytes: int = _MOST_BYTES
    """A longer answer is refused."""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


def head_of(request: Request, host: str) -> bytes:
    """Return the head of a request on the wire. Raises `ValueError` for a header that is not
    printable."""
    lines = [f"{request.method} {request.target} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    if request.content.size_bytes or request.method in ("PUT", "POST"):
        lines.append(f"content-length: {request.content.size_bytes}")
    if not "".join(lines).isprintable():
        raise ValueError("a header of the request is not printable")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


class Exchange:
    """The connection that a request uses at present, so that the loop can break it. `_lock`
    protects both fields."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._given_up = False

    def use(self, used: socket.socket | None) -> None:
        """Name the connection. Raises `GivenUpError`."""
        with self._lock:
            self._socket = used
            if self._given_up and used is not None:
                raise GivenUpError

    def check(self) -> None:
        """Raise `GivenUpError` if `give_up` has been called."""
        if self._given_up:
            raise GivenUpError

    def give_up(self) -> None:
        """Break the connection, now and if there is one later. Does not block."""
        with self._lock:
            self._given_up = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not the method of `SSLSocket`, which would stop to encrypt first.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Received(io.RawIOBase):
    """The bytes that a socket receives. Raises `TimeoutError` if none comes for its timeout."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def readinto(self, room: Any) -> int:
        """Receive bytes."""
        return self._socket.recv_into(room)


class _Connection:
    """An HTTP/1.1 connection for one request at a time. It owns its socket."""

    def __init__(self, opened: socket.socket, tls: TlsConnector | None, idle_s: float) -> None:
        self.socket = opened
        self._tls = tls
        opened.settimeout(idle_s)
        self._answers = io.BufferedReader(_Received(opened))
        self.used_at = time.monotonic()
        self.is_idle = False
        self.has_answered = False
        """A byte of the answer to the present request has arrived."""

    def ask(self, head: bytes, request: Request, exchange: Exchange) -> Answer:
        self.is_idle = self.has_answered = False
        failure: OSError | None = None
        try:
            self._send(head, request.content, exchange)
        except OSError as error:  # perhaps the server has answered early and closed
            failure = error
        try:
            return self._answer(request)
        except (OSError, BrokenAnswerError) as error:
            raise failure or error from None

    def _send(self, head: bytes, content: Content, exchange: Exchange) -> None:
        size_bytes = content.size_bytes
        if size_bytes <= PIECE_BYTES:
            body = content.read(0, size_bytes) if size_bytes else b""
            exchange.check()
            self.socket.sendall(b"".join((head, body)))
            return
        self.socket.sendall(head)
        for offset in range(0, size_bytes, PIECE_BYTES):
            piece = content.read(offset, min(PIECE_BYTES, size_bytes - offset))
            exchange.check()
            self.socket.sendall(piece)

    def _answer(self, request: Request) -> Answer:
        for _ in range(1 + MOST_INTERIM):
            status, headers = self._head()
            if not 100 <= status < 200:
                break
        else:
            raise BrokenAnswerError
        body, is_whole = b"", True
        if request.method != "HEAD" and status not in (204, 304):
            try:
                body, is_whole = self._body(headers, request.most_bytes)
            except TooLongAnswerError:
                if status < 300:
                    raise
                is_whole = False  # the status of an error says enough
        self.is_idle = is_whole and headers.get("connection", "").lower() != "close"
        return Answer(status, headers, body)

    def _head(self) -> tuple[int, dict[str, str]]:
        version, _, rest = self._line().partition(b" ")
        self.has_answered = True
        status = whole_number(rest[:3])
        if not version.startswith(b"HTTP/1.") or status is None:
            raise BrokenAnswerError
        headers: dict[str, str] = {}
        for _ in range(_HEAD_LINES):
            line = self._line()
            if not line:
                return status, headers
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        raise BrokenAnswerError

    def _body(self, headers: dict[str, str], most_bytes: int) -> tuple[bytes, bool]:
        """Return the body, and whether the connection can be used again."""
        if _is_chunked(headers):
            pieces = bytearray()
            for number, length in enumerate(self._chunks()):
                if len(pieces) + length > most_bytes or number >= _MOST_CHUNKS:
                    raise TooLongAnswerError
                pieces += self._exactly(length)
            return bytes(pieces), True
        if "content-length" in headers:
            known = whole_number(headers["content-length"])
            if known is None:
                raise BrokenAnswerError
            if known > most_bytes:
                raise TooLongAnswerError
            return self._exactly(known), True
        body = bytearray()
        while piece := self._answers.read1(_LINE_BYTES):
            body += piece
            if len(body) > most_bytes:
                raise TooLongAnswerError
        return bytes(body), False

    def _chunks(self) -> Iterator[int]:
        """Return the length of each chunk, whose bytes the caller reads before it asks for the
        next one. Read what follows the last one."""
        while length := self._chunk_bytes():
            yield length
            self._line()
        for _ in range(_HEAD_LINES):
            if not self._line():
                return
        raise BrokenAnswerError

    def _chunk_bytes(self) -> int:
        length = whole_number(self._line().partition(b";")[0], 16)
        if length is None:
            raise BrokenAnswerError
        return length

    def _exactly(self, length: int) -> bytes:
        data = self._answers.read(length)
        if len(data) != length:
            raise BrokenAnswerError
        return data

    def _line(self) -> bytes:
        line = self._answers.readline(_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise BrokenAnswerError
        return line.rstrip(b"\r\n")

    def close(self) -> None:
        if self._tls is not None:
            self._tls.remember(self.socket)
        self._answers.close()
        self.socket.close()


def _is_chunked(headers: dict[str, str]) -> bool:
    return headers.get("transfer-encoding", "").lower() == "chunked"


class Exchanges:
    """Sends requests to the host of one bucket. Thread-safe. It owns the idle connections."""

    def __init__(
        self,
        target: S3Target,
        options: OriginOptions,
        tls: TlsConnector | None,
    ) -> None:
        address = urlsplit(target.base_url)
        self.base = f"{address.scheme}://{address.netloc}"
        self.host = address.netloc
        self._host, self._port = address_of(target)
        self._options = options
        self._tls = tls
        self._idle: deque[_Connection] = deque()
        self._closed = False
        proxy = proxy_for(target.base_url)
        self._proxied = None
        if proxy is not None:
            self._proxied = URLLib3Session(
                verify=target.ca_file or True,
                proxies={address.scheme: proxy.url},
                timeout=(options.connect_timeout_s, options.idle_timeout_s),
                max_pool_connections=options.max_threads,
            )

    def send(self, request: Request, exchange: Exchange) -> Answer:
        """Return the answer. A request on a connection that the server has closed meanwhile is sent
        once more. Raises `OSError`, `BrokenAnswerError`, `GivenUpError`, and any exception of
        urllib3."""
        if self._proxied is not None:
            return self._send_to_proxy(self._proxied, request, exchange)
        head = head_of(request, self.host)
        connection = self._idle_connection()
        if connection is not None:
            try:
                return self._ask(connection, head, request, exchange)
            except (ConnectionError, BrokenAnswerError):
                if connection.has_answered:
                    raise
                exchange.check()
        return self._ask(self._opened(), head, request, exchange)

    def _ask(
        self, connection: _Connection, head: bytes, request: Request, exchange: Exchange
    ) -> Answer:
        try:
            exchange.use(connection.socket)
            return connection.ask(head, request, exchange)
        finally:
            exchange.use(None)
            self._give_back(connection)

    def _opened(self) -> _Connection:
        connect_s = self._options.connect_timeout_s
        opened: socket.socket
        if self._tls is not None:
            opened = self._tls.connect(connect_s)
        else:
            opened = connect_tcp(self._host, self._port, connect_s)
        return _Connection(opened, self._tls, self._options.idle_timeout_s)

    def _idle_connection(self) -> _Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - connection.used_at <= REUSED_S:
                return connection
            connection.close()

    def _give_back(self, connection: _Connection) -> None:
        if not connection.is_idle or len(self._idle) >= _MOST_IDLE:
            connection.close()
            return
        connection.used_at = time.monotonic()
        self._idle.append(connection)
        if self._closed:  # looked at last, so that either this thread or `close` closes it
            self.close()

    def _send_to_proxy(self, proxied: Any, request: Request, exchange: Exchange) -> Answer:
        headers = dict(request.headers)
        if request.content.size_bytes or request.method in ("PUT", "POST"):
            headers["content-length"] = str(request.content.size_bytes)
        body = _Body(request.content, exchange) if request.content.size_bytes else b""
        url = f"{self.base}{request.target}"
        answer = proxied.send(
            AWSPreparedRequest(request.method, url, headers, body, stream_output=True)
        )
        found = {name.lower(): value for name, value in answer.headers.items()}
        status = answer.status_code
        data = bytearray()
        try:
            while piece := answer.raw.read1(PIECE_BYTES):
                exchange.check()
                data += piece
                if len(data) > request.most_bytes:
                    if status < 300:
                        raise TooLongAnswerError
                    break
        except BaseException:
            answer.raw.close()
            raise
        answer.raw.release_conn()
        return Answer(status, found, bytes(data))

    def close(self) -> None:
        """Close idle connections now, and the others when they are given back."""
        self._closed = True
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                break
        if self._proxied is not None:
            self._proxied.close()


class _Body(io.RawIOBase):
    """A `Content` as a file for urllib3."""

    def __init__(self, content: Content, exchange: Exchange) -> None:
        self._content = content
        self._exchange = exchange
        self._offset = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        self._exchange.check()
        left = self._content.size_bytes - self._offset
        length = left if size < 0 else min(size, left)
        data = bytes(self._content.read(self._offset, length)) if length else b""
        self._offset += length
        return data
