"""An object store that speaks TLS: certificates that are accepted or refused, and connections."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.errors import (
    ConflictError,
    OriginUnavailableError,
    UntrustedOriginError,
    UsageError,
)
from cachefs.origin.base import Origin
from cachefs.origin.http import wire
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience
from cachefs.origin.resilience.resilient import ResilientOrigin
from cachefs.origin.writable import ABSENT
from cachefs.types import ObjectMeta
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.tls_front import ConnectProxy, TlsFront
from tests.servers.told_http import ToldHttp

LARGE = 1 << 20
RECORD = 16 << 10
SIZES = [1, 900, RECORD - 1, RECORD, RECORD + 1, 100_000, 15 * RECORD + 5, 256 << 10]
UNKNOWN_CA = r"certificate of https://\S+ is refused \(its CA is unknown\): give .* --ca-file"
OTHER_HOST = r"certificate of https://\S+ is refused \(it is for another host\): write the host"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(wire, "_KEPT_S", 3600)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "right")


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "other").ca


@pytest.fixture(scope="module")
def ca_of_another_name(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_certificates(tmp_path_factory.mktemp("tls") / "named", "named").ca.read_bytes()


@pytest.fixture(scope="module")
def bodies() -> dict[str, bytes]:
    return {f"f{size}": os.urandom(size) for size in [*SIZES, LARGE]}


@pytest.fixture(scope="module")
def store(seaweedfs: Any, bodies: dict[str, bytes]) -> Any:
    seaweedfs.make_bucket("tls")
    for name, body in bodies.items():
        seaweedfs.put("tls", f"d/{name}", body)
    return seaweedfs


@pytest.fixture
def front(
    store: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TlsFront]:
    for name, value in store.environment.items():
        if "ENDPOINT" not in name:
            monkeypatch.setenv(name, value)
    with TlsFront(certificates, int(store.endpoint.rpartition(":")[2])) as running:
        yield running


def opened(
    front: TlsFront,
    ca: Path | None,
    host: str = "127.0.0.1",
    source: str = "s3://tls/d",
    **more: Any,
) -> Origin:
    patient = {"connect_timeout_s": 60.0, "idle_timeout_s": 60.0, "total_timeout_s": 120.0}
    options = OriginOptions(
        endpoint=f"https://{host}:{front.port}", addressing="path", ca_file=ca, **patient | more
    )
    return open_origin(source, options)


@pytest.fixture
async def origin(front: TlsFront, certificates: Certificates) -> AsyncIterator[Origin]:
    found = opened(front, certificates.ca)
    yield found
    await found.aclose()


async def metas_of(origin: Origin) -> dict[str, ObjectMeta]:
    entries = [entry async for page in origin.list_dir("") for entry in page]
    return {entry.name: entry.meta for entry in entries if entry.meta is not None}


async def check_all(origin: Origin, bodies: dict[str, bytes]) -> None:
    await origin.check()
    metas = await metas_of(origin)
    assert metas.keys() == bodies.keys()
    for name, body in bodies.items():
        assert await origin.stat(name) == metas[name]
        meta, data = await origin.stat_and_read(name)
        assert meta == metas[name]
        assert bytes(data or b"") == (body if len(body) < LARGE else b"")
        assert bytes(await origin.read(name, metas[name], 0, len(body))) == body
    small = [(name, metas[name]) for name in bodies if len(bodies[name]) < LARGE]
    found = await origin.read_many(small, 4, lambda: False)
    assert [bytes(data or b"") for data in found] == [bodies[name] for name, _ in small]


async def test_the_right_ca(origin: Origin, bodies: dict[str, bytes]) -> None:
    await check_all(origin, bodies)
    assert origin.counters.errors == 0


async def test_a_bundle_in_the_environment(
    front: TlsFront,
    certificates: Certificates,
    other_ca: Path,
    bodies: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(other_ca.read_text() + certificates.ca.read_text())
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    origin = opened(front, None)
    await check_all(origin, bodies)
    await origin.aclose()


@pytest.mark.parametrize("piece_bytes", [RECORD - 30, 1000])
async def test_answers_in_pieces(
    origin: Origin, front: TlsFront, bodies: dict[str, bytes], piece_bytes: int
) -> None:
    metas = await metas_of(origin)
    front.piece_bytes, front.pause_s = piece_bytes, 0.0005
    with trio.fail_after(300):
        for size in SIZES:
            name = f"f{size}"
            assert bytes(await origin.read(name, metas[name], 0, size)) == bodies[name]


async def test_connections_are_kept_and_sessions_resumed(
    origin: Origin, front: TlsFront, bodies: dict[str, bytes]
) -> None:
    meta = (await metas_of(origin))["f900"]

    async def read() -> None:
        assert bytes(await origin.read("f900", meta, 0, 900)) == bodies["f900"]

    before = len(front.resumed)
    for _ in range(5):
        await read()
    assert len(front.resumed) == before
    for _ in range(2):
        front.hang_up()
        await read()
    assert front.resumed[-2:] == [True, True]


async def test_a_connection_that_the_server_has_closed(
    origin: Origin, front: TlsFront, bodies: dict[str, bytes]
) -> None:
    meta = (await metas_of(origin))["f900"]
    for _ in range(3):
        assert bytes(await origin.read("f900", meta, 0, 900)) == bodies["f900"]
        front.hang_up()


async def test_many_readers(origin: Origin, bodies: dict[str, bytes]) -> None:
    metas = await metas_of(origin)

    async def read(name: str) -> None:
        assert bytes(await origin.read(name, metas[name], 0, len(bodies[name]))) == bodies[name]

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                for size in SIZES:
                    nursery.start_soon(read, f"f{size}")
    assert origin.counters.errors == 0


async def refused(origin: Origin, bodies: dict[str, bytes], line: str) -> None:
    """Each way to the store fails with this line, and with no word of the libraries."""

    async def large() -> None:
        await origin.read("f", ObjectMeta(LARGE, 0, '"a"'), 0, LARGE)

    async def small() -> None:
        await origin.read("f", ObjectMeta(9, 0, '"a"'), 0, 9)

    async def look_up() -> None:
        await origin.stat_and_read("f")

    async def listing() -> None:
        await metas_of(origin)

    for act in (origin.check, listing, small, look_up, large):
        with pytest.raises(OriginUnavailableError, match=line) as caught:
            await act()
        text = str(caught.value)
        assert "\n" not in text
        assert "SSL" not in text
        assert "ecret" not in text
    wanted = [("f", ObjectMeta(9, 0, '"a"'))]
    assert await origin.read_many(wanted, 4, lambda: False) == [None]


async def test_an_unknown_ca(front: TlsFront, bodies: dict[str, bytes], other_ca: Path) -> None:
    for ca in (None, other_ca):
        origin = opened(front, ca)
        await refused(origin, bodies, UNKNOWN_CA)
        await origin.aclose()


async def test_another_host(
    front: TlsFront, bodies: dict[str, bytes], certificates: Certificates
) -> None:
    origin = opened(front, certificates.ca, "localhost")
    await refused(origin, bodies, OTHER_HOST)
    await origin.aclose()


async def test_a_refused_certificate_is_tried_once(front: TlsFront, other_ca: Path) -> None:
    inner = opened(front, other_ca)
    origin = ResilientOrigin(inner, Resilience(read_timeout_s=600.0, request_timeout_s=300.0))

    async def listing() -> None:
        async for _ in origin.list_dir(""):
            pass

    with trio.fail_after(300):
        for act in (
            origin.check,
            listing,
            partial(origin.stat, "f"),
            partial(origin.stat_and_read, "f"),
            partial(origin.read, "f", ObjectMeta(9, 0, '"a"'), 0, 9),
            partial(origin.read, "f", ObjectMeta(LARGE, 0, '"a"'), 0, LARGE),
        ):
            with pytest.raises(UntrustedOriginError, match=UNKNOWN_CA):
                await act()
    assert origin.state()["retries"] == 0
    await origin.aclose()


async def test_a_server_without_tls(store: Any, certificates: Certificates) -> None:
    endpoint = store.endpoint.replace("http://", "https://")
    options = OriginOptions(endpoint=endpoint, anonymous=True, ca_file=certificates.ca)
    origin = open_origin("s3://tls/d", options)
    for act in (origin.check(), origin.read("f", ObjectMeta(9, 0, '"a"'), 0, 9)):
        with pytest.raises(OriginUnavailableError, match=r"https://\S+ does not speak TLS: write"):
            await act
    await origin.aclose()


@pytest.fixture
def ca_dirs(tmp_path: Path, certificates: Certificates) -> str:
    """Directories with CAs, the second one with that of the server."""
    empty, hashed = tmp_path / "empty", tmp_path / "hashed"
    empty.mkdir()
    hashed.mkdir()
    shutil.copy(certificates.ca, hashed / "ca.pem")
    subprocess.run(["openssl", "rehash", hashed], check=True)
    return f"{empty}:{hashed}"


@pytest.mark.parametrize(
    ("cert_file", "has_dirs", "line"),
    [
        ("right", False, None),
        ("other", True, None),
        ("absent", True, None),
        ("large", True, None),
        ("large", False, UNKNOWN_CA),
        ("absent", False, UNKNOWN_CA),
        ("garbage", True, r"the file with the CAs for \S+ can't be read, or has none: correct it"),
    ],
)
async def test_the_variables_of_openssl(
    front: TlsFront,
    certificates: Certificates,
    ca_of_another_name: bytes,
    ca_dirs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cert_file: str,
    has_dirs: bool,
    line: str | None,
) -> None:
    """SSL_CERT_FILE and SSL_CERT_DIR both count, as for other programs."""
    contents = {
        "right": certificates.ca.read_bytes(),
        "other": ca_of_another_name,
        "large": ca_of_another_name * 100,
        "garbage": b"no PEM",
    }
    if cert_file in contents:
        (tmp_path / cert_file).write_bytes(contents[cert_file])
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / cert_file))
    monkeypatch.setenv("SSL_CERT_DIR", ca_dirs if has_dirs else "/nonexistent")
    origin = opened(front, None)
    if line is None:
        await origin.check()
    else:
        with pytest.raises(OriginUnavailableError, match=line):
            await origin.check()
    await origin.aclose()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_a_server_with_old_versions_only(front: TlsFront, certificates: Certificates) -> None:
    front.speak_only(ssl.TLSVersion.TLSv1_1)
    origin = opened(front, certificates.ca)
    with pytest.raises(
        OriginUnavailableError, match=r"https://\S+ speaks only old versions of TLS"
    ):
        await origin.check()
    await origin.aclose()


_CHECK = """
import sys
from pathlib import Path
import trio
from cachefs.origin.open_origin import OriginOptions, open_origin
endpoint, ca = sys.argv[1:]
async def check():
    options = OriginOptions(endpoint, anonymous=True, addressing="path", ca_file=Path(ca))
    await open_origin("s3://b", options).check()
trio.run(check)
"""


async def test_what_libcurl_reads_itself_has_no_effect(
    certificates: Certificates, tmp_path: Path
) -> None:
    """It would write the keys of all connections to a file, and send the password of .netrc."""
    listing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password hunter2\n")
    (tmp_path / ".curlrc").write_text('insecure\nheader = "x-curlrc: 1"\n')
    (tmp_path / ".curl-hsts").touch()
    before = sorted(os.listdir(tmp_path))
    environment = os.environ | {
        "SSLKEYLOGFILE": str(tmp_path / "keys"),
        "HOME": str(tmp_path),
        "CURL_HOME": str(tmp_path),
        "NETRC": str(tmp_path / ".netrc"),
        "CURL_CA_BUNDLE": "/nonexistent",
        "CURL_SSL_BACKEND": "none",
    }
    async with trio.open_nursery() as nursery:
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(listing)}\r\n\r\n".encode()
        server = await ToldHttp(head + listing).start(nursery)
        with TlsFront(certificates, server.port) as front:
            command = [sys.executable, "-c", _CHECK, f"https://127.0.0.1:{front.port}"]
            await trio.run_process([*command, str(certificates.ca)], env=environment)
        nursery.cancel_scope.cancel()
    assert sorted(os.listdir(tmp_path)) == before
    (sent,) = server.heads
    assert b"authorization" not in sent.lower()
    assert b"x-curlrc" not in sent


@pytest.fixture
def proxied(front: TlsFront, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ConnectProxy(front.port) as proxy:
        monkeypatch.setenv("https_proxy", f"http://user:hunter2@127.0.0.1:{proxy.port}")
        yield proxy


async def test_through_a_proxy(
    proxied: ConnectProxy, front: TlsFront, certificates: Certificates, bodies: dict[str, bytes]
) -> None:
    """The proxy gets the password, and nothing of the requests. The CA file counts."""
    origin = opened(front, certificates.ca)
    await check_all(origin, bodies)
    await origin.aclose()
    connect = f"CONNECT 127.0.0.1:{front.port} HTTP/1.1".encode()
    for head in proxied.heads:
        assert head.startswith(connect)
        assert b"\r\nProxy-Authorization: Basic dXNlcjpodW50ZXIy\r\n" in head
        assert b"x-amz" not in head.lower()
    for ca, host, line in (
        (None, "127.0.0.1", UNKNOWN_CA),
        (certificates.ca, "store.example", OTHER_HOST),
    ):
        origin = opened(front, ca, host)
        await refused(origin, bodies, line)
        await origin.aclose()


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("407 Proxy Authentication Required", "the proxy refuses requests without a login"),
        ("403 Forbidden", r"does not answer through the proxy http://127\.0\.0\.1:\d+$"),
        ("502 Bad Gateway", r"does not answer through the proxy http://127\.0\.0\.1:\d+$"),
    ],
)
async def test_a_proxy_that_refuses(
    proxied: ConnectProxy, front: TlsFront, certificates: Certificates, status: str, line: str
) -> None:
    """Its answer is not that of the store."""
    proxied.refusal = f"HTTP/1.1 {status}\r\nContent-Length: 3\r\n\r\nno!".encode()
    origin = opened(front, certificates.ca)
    with pytest.raises(OriginUnavailableError, match=line):
        await origin.check()
    await origin.aclose()


async def test_through_a_proxy_with_tls(
    proxied: ConnectProxy,
    front: TlsFront,
    certificates: Certificates,
    other_ca: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TlsFront(certificates, proxied.port) as tls_proxy:
        address = f"https://127.0.0.1:{tls_proxy.port}"
        monkeypatch.setenv("https_proxy", address)
        origin = opened(front, certificates.ca)
        await origin.check()
        await origin.aclose()
        origin = opened(front, other_ca)
        line = rf"https://\S+ or its proxy {address} is refused \(its CA is unknown\)"
        with pytest.raises(UntrustedOriginError, match=line):
            await origin.check()
        await origin.aclose()
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    origin = opened(front, certificates.ca)
    with pytest.raises(
        OriginUnavailableError, match=r"the host of the proxy http://proxy\.invalid"
    ):
        await origin.check()
    await origin.aclose()


class MuteServer:
    """Accepts connections and says nothing, until `hang_up` ends its side of them."""

    def __enter__(self) -> "MuteServer":
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self._listener.getsockname()[1]
        self._accepted: list[socket.socket] = []
        self._listener.setblocking(False)
        return self

    def hang_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._accepted.append(self._listener.accept()[0])
        for connection in self._accepted:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def __exit__(self, *failure: object) -> None:
        for opened in (self._listener, *self._accepted):
            opened.close()


async def test_a_handshake_that_hangs() -> None:
    with MuteServer() as mute:
        endpoint = f"https://127.0.0.1:{mute.port}"
        hasty, patient = (
            open_origin("s3://b", OriginOptions(endpoint, anonymous=True, connect_timeout_s=limit))
            for limit in (0.3, 60.0)
        )
        for _ in range(2):
            with trio.move_on_after(0.1) as scope:
                await patient.read("f", ObjectMeta(9, 0, '"a"'), 0, 9)
            assert scope.cancelled_caught
        with pytest.raises(OriginUnavailableError, match="does not answer"):
            await hasty.read("f", ObjectMeta(9, 0, '"a"'), 0, 9)
        for origin in (hasty, patient):
            await origin.aclose()


@pytest.mark.parametrize("content", [None, b"", b"not PEM", b"\xff\xfe"])
def test_a_file_without_certificates(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    for url in ("s3://b", "oss://b"):
        with pytest.raises(UsageError, match=r"the CA file \S+ca\.pem (has no usable|can't be)"):
            open_origin(url, OriginOptions(ca_file=file, endpoint="https://h", anonymous=True))


def test_only_object_stores_take_a_ca_file(tmp_path: Path) -> None:
    for url in ("file:///", "hdfs://h/", "fsspec+s3://b"):
        with pytest.raises(UsageError, match="--ca-file is for s3:// and oss://"):
            open_origin(url, OriginOptions(ca_file=tmp_path))
    with pytest.raises(UsageError, match="ossfs has no --ca-file"):
        open_origin("oss://b", OriginOptions(ca_file=tmp_path, oss_driver="ossfs"))


async def test_writes(front, certificates, store) -> None:
    """Also of bodies of many records, which are sent in pieces."""
    origin = opened(front, certificates.ca, source="s3://tls/written")
    writer = origin.writer
    assert writer is not None
    bodies = {f"w{size}": os.urandom(size) for size in (0, 1, RECORD + 1, 300 << 10)}
    for name, body in bodies.items():
        await writer.put(name, body)
    parts = [os.urandom(5 << 20), b"end"]
    upload = await writer.start_upload("parts")
    tags = [await writer.put_part(upload, n, 0, part) for n, part in enumerate(parts, 1)]
    await writer.complete(upload, tags)
    bodies["parts"] = b"".join(parts)
    for name, body in bodies.items():
        assert store.client.get_object(Bucket="tls", Key=f"written/{name}")["Body"].read() == body
    with pytest.raises(ConflictError):
        await writer.put("w1", b"two", ABSENT)
    assert front.failures == 0
    await origin.aclose()


async def test_a_write_to_an_unknown_server_says_so(front, other_ca) -> None:
    origin = opened(front, other_ca)
    assert origin.writer is not None
    with pytest.raises(UntrustedOriginError, match=UNKNOWN_CA):
        await origin.writer.put("a", b"data")
    await origin.aclose()
