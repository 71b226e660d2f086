"""The proxy that other tests believe."""

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.servers.fault_proxy import Fault, FaultProxy

BODY = bytes(range(256)) * 2


class Handler(BaseHTTPRequestHandler):
    """Answers every GET with `BODY`: with a length, or in chunks if the name says so."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Host", self.headers["Host"])
        if "chunked" in self.path:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            half = len(BODY) // 2
            for piece in (BODY[:half], BODY[half:], b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as upstream:
        upstream.daemon_threads = True
        thread = threading.Thread(target=upstream.serve_forever, args=(0.05,))
        thread.start()
        with FaultProxy(f"http://127.0.0.1:{upstream.server_address[1]}") as proxy:
            yield proxy
        upstream.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _clean(proxy: FaultProxy) -> Iterator[None]:
    yield
    proxy.clear()
    proxy.limit(None)


def ask(
    proxy: FaultProxy, target: str = "/bucket/key", method: str = "GET", timeout_s: float = 60
) -> tuple[int, bytes, dict[str, str]]:
    address = proxy.endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


@pytest.mark.parametrize("target", ["/bucket/key", "/bucket/chunked"])
def test_without_a_fault_it_changes_nothing(proxy: FaultProxy, target: str) -> None:
    status, body, headers = ask(proxy, target)
    assert (status, body) == (200, BODY)
    assert headers["X-Host"] == proxy.endpoint.removeprefix("http://"), "it is signed"
    assert ask(proxy, target, "HEAD")[:2] == (200, b"")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.REFUSE, ConnectionError),
        (Fault.SILENCE, TimeoutError),
        (Fault.RESET, ConnectionResetError),
        (Fault.CUT, http.client.IncompleteRead),
        (Fault.TRICKLE, None),
    ],
)
def test_a_fault_befalls_one_request(
    proxy: FaultProxy, fault: Fault, error: type[Exception] | None
) -> None:
    before = proxy.counts()
    proxy.fault(fault, times=1)
    began = time.monotonic()
    if error is None:
        assert ask(proxy)[1] == BODY
        assert time.monotonic() - began > 0.3
    else:
        with pytest.raises(error):
            ask(proxy, timeout_s=0.3 if fault is Fault.SILENCE else 60)
    assert ask(proxy)[1] == BODY
    after = proxy.counts()
    assert after.faults == before.faults + 1
    assert after.requests == before.requests + 2


@pytest.mark.parametrize(
    ("fault", "status", "length"),
    [(Fault.ERROR, 500, None), (Fault.BUSY, 503, None), (Fault.SHORT, 200, 256)],
)
def test_wrong_answers(proxy: FaultProxy, fault: Fault, status: int, length: int | None) -> None:
    proxy.fault(fault)
    for _ in range(2):
        found, body, headers = ask(proxy)
        assert found == status
        assert length is None or body == BODY[:length]
        assert ("Retry-After" in headers) == (fault is Fault.BUSY)
    proxy.clear()
    assert ask(proxy)[1] == BODY


def test_a_flipped_bit(proxy: FaultProxy) -> None:
    proxy.fault(Fault.FLIP, times=1)
    assert ask(proxy, "/bucket?list-type=2&prefix=x")[1] == BODY, "a listing"
    _, body, _ = ask(proxy)
    assert [a ^ b for a, b in zip(body, BODY, strict=True) if a != b] == [1]


def test_refused_for_ever_nobody_listens(proxy: FaultProxy) -> None:
    proxy.fault(Fault.REFUSE)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
    proxy.clear()
    assert ask(proxy)[1] == BODY


def test_objects_only(proxy: FaultProxy) -> None:
    proxy.fault(Fault.ERROR, objects_only=True)
    assert ask(proxy, "/bucket?list-type=2")[0] == 200
    assert ask(proxy, method="HEAD")[0] == 200
    assert ask(proxy)[0] == 500


@pytest.mark.long
def test_a_limit(proxy: FaultProxy) -> None:
    before = proxy.counts().rejected
    proxy.limit(1, latency_s=3)
    first = threading.Thread(target=ask, args=(proxy,))
    first.start()
    deadline = time.monotonic() + 60
    while not proxy.counts().in_flight:
        assert time.monotonic() < deadline
    assert ask(proxy)[0] == 503
    first.join()
    proxy.limit(1)
    assert ask(proxy)[0] == 200
    assert proxy.counts().rejected == before + 1
