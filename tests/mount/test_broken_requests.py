"""Requests that are broken in many ways, to both servers of a mount: none ends the daemon, and
together they write little into its log."""

import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress

from cachefs.config import split_address
from cachefs.mounts import socket_path
from tests.mount.harness import Site
from tests.sizes import size

REQUESTS = size(2_000, 100_000)
MOST_LINES = 100
TIMEOUT_S = 300.0

HEAD = b"Host: 127.0.0.1\r\n"
H2C = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
WEBSOCKET = (
    HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
ODD_PATH = b"\0\0\x07\1\5\0\0\0\1\x82\x86\x04\x03/\xff\xfe"
DIGITS = b"9" * 5_000
LONE = b'{"token":"\\ud800"}'

SEEDS = [
    b"GET /healthz HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /healthz HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"
    b"GET /healthz HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /healthz HTTP/1.1\r\n" + HEAD + b"\r\n\xff\xfe junk\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\n" + HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /console/session/begin HTTP/1.1\r\n" + HEAD + b"Content-Length: " + DIGITS + b"\r\n\r\n",
    b"POST /console/session/begin HTTP/1.1\r\n" + HEAD + b"Content-Length: 5013\r\n\r\n"
    b'{"token": ' + DIGITS + b"}  ",
    b"POST /console/session/begin HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 18\r\n\r\n" + LONE,
    b"GET /console/snapshot HTTP/1.1\r\n" + HEAD + b"Origin: http://[\r\n\r\n",
    b"GET /console/snapshot HTTP/1.1\r\nHost: localhost:" + DIGITS + b"\r\n\r\n",
    b"GET /console/actions/v1/status?%ff=\xff HTTP/1.1\r\n" + HEAD + b"Authorization: \xff\r\n\r\n",
    b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"CONNECT /healthz HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\nmore",
    b"GET /healthz HTTP/1.1\r\n" + H2C + b"Upgrade: h2c\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\n" + H2C + b"Upgrade: h2c\r\n\r\n" + PREFACE + EMPTY_SETTINGS,
    PREFACE + EMPTY_SETTINGS + ODD_PATH,
    b"GET /healthz HTTP/1.1\r\n" + WEBSOCKET + b"\r\n\x81\x85\0\0\0\0hello",
    b"GET /%ff%00 HTTP/1.1\r\n" + HEAD + b"Expect: 100-continue\r\n\r\n",
    b"GET http://[/ HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"POST /v1/none HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + DIGITS,
    b"HEAD /metrics HTTP/1.0\r\n\r\n",
]


def test_no_request_ends_the_daemon(site: Site) -> None:
    site.mount("--metrics", "127.0.0.1:0")
    before = site.status()
    metrics = split_address(before["metrics"])
    control = str(socket_path(site.mountpoint))
    lines = site.log.read_text().count("\n")
    chance = random.Random(7)
    for number in range(REQUESTS):
        seed = SEEDS[number // 2 % len(SEEDS)]
        request = seed if number < 2 * len(SEEDS) else _broken(seed, chance)
        connect = (lambda: _tcp(metrics)) if number % 2 else (lambda: _unix(control))
        _send(connect, request, waits=chance.random() < 0.8)
    assert site.status()["pid"] == before["pid"]
    assert os.listdir(site.mountpoint) == []
    added = site.log.read_text().splitlines()[lines:]
    assert len(added) <= MOST_LINES, added[:MOST_LINES]
    assert not any("Traceback" in line for line in added), added


def test_only_http_1_is_spoken(site: Site) -> None:
    """Who wishes for another protocol is answered in HTTP/1.1, or refused."""
    site.mount("--metrics", "127.0.0.1:0")
    metrics = split_address(site.status()["metrics"])
    for head, status in [
        (b"GET /healthz HTTP/1.1\r\n" + H2C + b"Upgrade: h2c\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\n" + WEBSOCKET + b"\r\n", b"200"),
        (PREFACE, b"501"),
        (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + HEAD + b"\r\n", b"501"),
    ]:
        answer = _send(lambda: _tcp(metrics), head, waits=True)
        assert answer.startswith(b"HTTP/1.1 " + status), (head, answer)


def _broken(request: bytes, chance: random.Random) -> bytes:
    """`request` with some bytes changed, removed, repeated or added, or cut, or with another one
    behind it."""
    broken = bytearray(request)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(broken) + 1)
        match chance.randrange(5):
            case 0:
                broken[at : at + 1] = chance.randbytes(1)
            case 1:
                del broken[at : at + chance.randrange(1, 20)]
            case 2:
                broken[at:at] = broken[at : at + chance.randrange(1, 40)]
            case 3:
                broken[at:at] = chance.choice([b"\r\n", b"\0", b":", b" ", b"\xff", b"\r\n\r\n"])
            case _:
                broken += chance.choice(SEEDS)
    return bytes(broken)


def _send(connect: Callable[[], socket.socket], request: bytes, *, waits: bool) -> bytes:
    """Return the answer to what is sent; nothing if the client leaves without waiting for it."""
    answer = b""
    with connect() as client, suppress(ConnectionError):
        client.settimeout(TIMEOUT_S)
        client.sendall(request)
        if waits:
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                answer += piece
    return answer


def _tcp(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def _unix(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client
