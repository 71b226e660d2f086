"""An S3 server that answers what a function says: for answers that no real server gives.

`with ToldS3(answer) as server: ...`; `answer` is given each `Asked` and returns an `Answer`. It is
called in a thread for each request. Bodies may be iterators: the server sends until they end, the
client goes, or `MOST_BYTES` or `MOST_S` are reached. No pytest here.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

MOST_BYTES = 256 << 20
MOST_S = 120.0
DATE = "Mon, 02 Nov 2026 10:00:00 GMT"
ROW_DATE = "2026-11-02T10:00:00Z"


class Asked(NamedTuple):
    """A request. `query` has the first value of each parameter."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    target: str = ""
    """The path and query as they were sent."""

    @property
    def is_list(self) -> bool:
        return "list-type" in self.query


@dataclass
class Answer:
    """`length` is what Content-Length says: None for the truth (chunked for an iterator, nothing
    with a Transfer-Encoding of its own). It does not close the connection in an answer to a
    HEAD."""

    body: bytes | Iterable[bytes] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    breaks_after_bytes: int | None = None
    """So much of the body is sent, then the connection is closed; -1: not even the headers."""


class ToldS3:
    """Started by `with`, gone after it."""

    def __init__(self, answer: Callable[[Asked], Answer], *, keeps_bodies: bool = True) -> None:
        self.answer = answer
        self._keeps_bodies = keeps_bodies
        self.asked: list[Asked] = []
        self.sent_bytes = 0
        """Of bodies that are iterators."""
        self.connections = 0
        self.endpoint = ""
        self._stopped = False

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"told": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        serve = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        serve.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._server.shutdown()
        self._server.server_close()

    def lists(self) -> int:
        """LISTs so far."""
        return sum(asked.is_list for asked in self.asked)

    @property
    def environment(self) -> dict[str, str]:
        """With which a mount finds the server."""
        return {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *args: object) -> None:
        """A client that has gone is no news; anything else is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*args)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    told: ToldS3

    def setup(self) -> None:
        super().setup()
        self.told.connections += 1

    def do_GET(self) -> None:
        parts = urlsplit(self.path if "://" in self.path else f"//_{self.path}")
        found = parse_qs(parts.query, keep_blank_values=True)
        query = {name: values[0] for name, values in found.items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        asked = Asked(self.command, unquote(parts.path), query, headers, body, target)
        kept = asked if self.told._keeps_bodies else asked._replace(body=b"")
        self.told.asked.append(kept)
        answer = self.told.answer(asked)
        try:
            self._send(answer)
        except OSError:
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _send(self, answer: Answer) -> None:
        if answer.breaks_after_bytes == -1:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        own = {"Date": self.date_time_string()}
        body = answer.body
        if answer.length is not None:
            own["Content-Length"] = str(answer.length)
            self.close_connection |= self.command != "HEAD"
        elif isinstance(body, bytes):
            if answer.status not in (204, 304) and "Transfer-Encoding" not in answer.headers:
                own["Content-Length"] = str(len(body))
        else:
            own["Transfer-Encoding"] = "chunked"
        for name, value in (own | answer.headers).items():
            self.send_header(name, value)
        if self.command == "HEAD":
            self.end_headers()
        elif isinstance(body, bytes):
            if answer.breaks_after_bytes is not None:
                body = body[: answer.breaks_after_bytes]
                self.close_connection = True
            self._headers_buffer.append(b"\r\n" + body)  # one packet for small answers
            self.flush_headers()
        else:
            self.end_headers()
            self._send_pieces(body, "Transfer-Encoding" in own)

    def _send_pieces(self, pieces: Iterable[bytes], chunked: bool) -> None:
        ends_at = time.monotonic() + MOST_S
        sent_bytes = 0
        for piece in pieces:
            if self.told._stopped or time.monotonic() > ends_at or sent_bytes > MOST_BYTES:
                break
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            sent_bytes += len(piece)
            self.told.sent_bytes += len(piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        """Silence."""


def row(key: str, size: int | str = 4, time: str = ROW_DATE, e_tag: str = "one") -> str:
    """An object of a listing; what is empty is left out."""
    parts = {"Key": key, "Size": str(size), "LastModified": time, "ETag": e_tag}
    inner = "".join(f"<{tag}>{text}</{tag}>" for tag, text in parts.items() if text)
    return f"<Contents>{inner}</Contents>"


def page(*rows: str, more: str = "") -> Answer:
    """A LIST's answer; `more` is what stands beside the rows."""
    return Answer(f"<ListBucketResult>{more}{''.join(rows)}</ListBucketResult>".encode())


def token(value: str) -> str:
    """That a listing goes on there."""
    return f"<IsTruncated>true</IsTruncated><NextContinuationToken>{value}</NextContinuationToken>"
