"""Small objects asked for together: what comes, and what is left to `read`."""

import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3 import client
from cachefs.origin.s3.signing import signed_headers
from cachefs.types import ObjectMeta
from tests.servers.certificates import make_certificates
from tests.servers.tls_front import TlsFront
from tests.servers.told_s3 import Answer, Asked, ToldS3

_buckets = itertools.count()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


# A real server


@pytest.fixture
def weed(seaweedfs, monkeypatch):
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    return seaweedfs


@pytest.fixture
async def filled(weed):
    """A bucket with objects of odd names and sizes, and what they hold."""
    bucket = f"direct-{next(_buckets)}"
    weed.make_bucket(bucket)
    objects = {"sp ace/é%41+#": b"odd", "one": b"1", "many": os.urandom(250_000), "x": b"x" * 9000}
    for key, data in objects.items():
        weed.put(bucket, key, data)
    origin = open_origin(f"s3://{bucket}")
    yield origin, objects, weed, bucket
    await origin.aclose()


async def wanted_of(origin: Origin, objects: dict[str, bytes]) -> list[tuple[str, ObjectMeta]]:
    metas = [await origin.stat(key) for key in objects]
    assert all(isinstance(meta, ObjectMeta) for meta in metas)
    return list(zip(objects, metas, strict=True))  # type: ignore[arg-type]


async def read_many(
    origin: Origin, wanted: list[tuple[str, ObjectMeta]], at_a_time: int = 8
) -> list[memoryview | None]:
    return await origin.read_many(wanted, at_a_time, lambda: False)


async def test_each_is_asked_for_once(filled) -> None:
    origin, objects, _, _ = filled
    wanted = await wanted_of(origin, objects)
    for round_number in range(1, 4):
        found = await read_many(origin, wanted)
        assert [bytes(data) for data in found] == list(objects.values())
        assert origin.counters.gets == round_number * len(objects)
        assert origin.reads_many
    assert origin.counters.get_bytes == 3 * sum(map(len, objects.values()))
    assert origin.counters.errors == 0


async def test_replaced_and_gone_are_left_out_and_spoil_nothing(filled) -> None:
    origin, objects, weed, bucket = filled
    wanted = await wanted_of(origin, objects)
    weed.put(bucket, "one", b"2")
    wanted.insert(1, ("never there", ObjectMeta(3, 0, '"abc"')))
    found = await read_many(origin, wanted)
    assert [data and len(data) for data in found] == [3, None, None, 250_000, 9000]
    assert origin.reads_many


async def test_a_refusal_is_left_to_read(filled, monkeypatch) -> None:
    origin, objects, _, bucket = filled
    wanted = await wanted_of(origin, objects)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    stranger = open_origin(f"s3://{bucket}")
    assert await read_many(stranger, wanted) == [None] * len(wanted)
    assert not stranger.reads_many
    await stranger.aclose()


@pytest.mark.parametrize("more", [(), (("x-amz-request-payer", "requester"),)])
@pytest.mark.parametrize("token", [None, "a/session+token=="])
def test_signatures_are_botocore_s(token: str | None, more: tuple[tuple[str, str], ...]) -> None:
    keys = ReadOnlyCredentials("AKID", "se/cret+", token)
    request = AWSRequest("GET", "http://host:9000/b/sp%20ace/%C3%A9", dict(more))
    S3SigV4Auth(keys, "s3", "eu-west-1").add_auth(request)
    stamp = datetime.strptime(f"{request.context['timestamp']}+0000", "%Y%m%dT%H%M%SZ%z")
    path, now_s = "/b/sp%20ace/%C3%A9", stamp.timestamp()
    ours = signed_headers(keys, "eu-west-1", "host:9000", path, now_s, more)
    theirs = {name.lower(): value for name, value in request.headers.items()}
    assert {name.lower(): value for name, value in ours.items()} == theirs


# A server that does what it likes

SILENT_S = 30


class Fake(ToldS3):
    """A bucket with some objects, and what is odd about them, by key."""

    def __init__(self) -> None:
        super().__init__(self._say)
        self.bodies = {f"f{number}": os.urandom(1000 + number) for number in range(6)}
        self.headers_of: dict[str, dict[str, str]] = {}
        self.status_of: dict[str, int] = {}
        self.silent: set[str] = set()
        self.pause_s = 0.0
        self.waits_for: dict[str, threading.Event] = {}
        self.half_of: dict[str, threading.Event] = {}
        """Objects of which only one half comes before the event."""
        self.tells: dict[str, threading.Event] = {}

    def _say(self, asked: Asked) -> Answer:
        key = asked.path.removeprefix("/b/")
        if key in self.silent:
            time.sleep(SILENT_S)
            return Answer(breaks_after_bytes=-1)
        if key in self.tells:
            self.tells[key].set()
        if key in self.waits_for:
            self.waits_for[key].wait(SILENT_S)
        time.sleep(self.pause_s)
        body = self.bodies[key]
        headers = {"ETag": _e_tag(body)} | self.headers_of.get(key, {})
        answer = Answer(body, self.status_of.get(key, 200), headers)
        if key in self.half_of:
            return replace(answer, body=self._halves(key), length=len(body))
        return answer

    def _halves(self, key: str) -> Iterator[bytes]:
        half = len(self.bodies[key]) // 2
        yield self.bodies[key][:half]
        self.half_of[key].wait(SILENT_S)
        yield self.bodies[key][half:]


def _e_tag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as running:
        yield running


@pytest.fixture
async def origin(fake) -> AsyncIterator[Origin]:
    opened = opened_for(fake)
    yield opened
    await opened.aclose()


def opened_for(fake: Fake, idle_timeout_s: float = SILENT_S) -> Origin:
    options = OriginOptions(endpoint=fake.endpoint, anonymous=True, idle_timeout_s=idle_timeout_s)
    return open_origin("s3://b", options)


def wanted_from(fake: Fake) -> list[tuple[str, ObjectMeta]]:
    return [(key, ObjectMeta(len(body), 0, _e_tag(body))) for key, body in fake.bodies.items()]


async def missing(origin: Origin, fake: Fake) -> list[str]:
    """What doesn't come; the rest must be right."""
    wanted = wanted_from(fake)
    found = await read_many(origin, wanted)
    for (key, _), data in zip(wanted, found, strict=True):
        assert data is None or bytes(data) == fake.bodies[key]
    return [key for (key, _), data in zip(wanted, found, strict=True) if data is None]


async def test_connections_are_kept(fake, origin) -> None:
    for _ in range(3):
        assert await missing(origin, fake) == []
    assert fake.connections == 6


async def test_a_server_that_closes(fake, origin) -> None:
    fake.headers_of = {key: {"Connection": "close"} for key in ("f1", "f4")}
    for _ in range(3):
        assert await missing(origin, fake) == []
    assert fake.connections <= 6 + 2 + 2


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "999"},
        {"ETag": '"0123456789abcdef0123456789abcdef"'},
        {"ETag": ""},
    ],
)
async def test_another_object_never_comes_through(fake, origin, headers) -> None:
    fake.headers_of = {"f2": headers}
    assert await missing(origin, fake) == ["f2"]
    assert origin.reads_many, "it says nothing about the others"


async def test_wrong_bytes_never_come_through(fake, origin) -> None:
    good = fake.bodies["f3"]
    wanted = wanted_from(fake)
    fake.bodies["f3"] = b"?" + good[1:]
    fake.headers_of = {"f3": {"ETag": _e_tag(good)}}
    found = await read_many(origin, wanted)
    assert [data is None for data in found] == [False, False, False, True, False, False]


async def test_so_many_at_a_time(fake, origin) -> None:
    wanted = wanted_from(fake)
    found = await read_many(origin, wanted, at_a_time=2)
    assert [bytes(data) for data in found] == list(fake.bodies.values())
    assert fake.connections == 2


async def test_no_more_are_asked_for_once_stopped(fake, origin) -> None:
    wanted = wanted_from(fake)
    answers = iter([False, False, True])
    found = await origin.read_many(wanted, 2, lambda: next(answers, True))
    assert [data is not None for data in found] == [True] * 2 + [False] * 4
    assert origin.counters.gets == 2
    assert origin.reads_many, "that is no failure"


@pytest.mark.parametrize("status", [403, 429, 500, 503])
async def test_after_a_failure_it_rests(fake, origin, status, monkeypatch) -> None:
    fake.status_of = {"f5": status}
    assert await missing(origin, fake) == ["f5"]
    assert not origin.reads_many
    fake.status_of = {}
    monkeypatch.setattr(origin, "_rests_until", 0.0)
    assert await missing(origin, fake) == []


async def test_chunks_that_are_none(fake, origin) -> None:
    fake.headers_of = {"f5": {"Transfer-Encoding": "chunked"}}
    assert await missing(origin, fake) == ["f5"]


@pytest.mark.parametrize("status", [404, 412])
@pytest.mark.parametrize("size_bytes", [0, 300])
@pytest.mark.parametrize("chunked", [False, True])
async def test_refusals_of_one_object_keep_the_connection(
    fake, origin, status: int, size_bytes: int, chunked: bool
) -> None:
    fake.status_of = {"f2": status, "f4": status}
    wanted = wanted_from(fake)
    error = b"<Error>\n" * (size_bytes // 8)
    if chunked:
        chunk = b"%x;x=y\r\n%s\r\n" % (len(error), error) if error else b""
        error = chunk + b"0\r\n\r\n"
        fake.headers_of = {key: {"Transfer-Encoding": "chunked"} for key in fake.status_of}
    fake.bodies |= dict.fromkeys(fake.status_of, error)
    for _ in range(3):
        found = await read_many(origin, wanted)
        assert [data is None for data in found] == [False, False, True, False, True, False]
        assert origin.reads_many
    assert fake.connections == 6


async def test_a_long_refusal_costs_the_connection_only(fake, origin) -> None:
    wanted = wanted_from(fake)
    fake.status_of = {"f2": 404}
    fake.bodies["f2"] = b"x" * 70_000
    for _ in range(3):
        found = await read_many(origin, wanted)
        assert [data is None for data in found] == [False, False, True, False, False, False]
        assert origin.reads_many
    assert fake.connections <= 8


async def test_the_first_answer_tells_how_far_the_origin_is(fake, origin) -> None:
    fake.pause_s = 0.5
    assert await missing(origin, fake) == []
    assert origin.quickest_s >= 0.5
    fake.pause_s = 0.0
    for _ in range(20):
        assert await missing(origin, fake) == []
    assert 0.0 < origin.quickest_s < 0.5


async def test_answers_are_read_as_they_come(fake, origin) -> None:
    """The first object comes only when the last one has been asked for."""
    last_was_asked = threading.Event()
    fake.waits_for = {"f0": last_was_asked}
    fake.tells = {"f5": last_was_asked}
    found = await read_many(origin, wanted_from(fake), at_a_time=2)
    assert [bytes(data) for data in found] == list(fake.bodies.values())
    assert fake.connections == 2


@pytest.mark.long
async def test_one_silence_costs_the_others_nothing(fake, monkeypatch) -> None:
    monkeypatch.setattr(client, "_LITTLE_S", SILENT_S)  # the server may be slow, too
    origin = opened_for(fake, idle_timeout_s=8)
    fake.silent = {"f0"}
    began = time.monotonic()
    assert await missing(origin, fake) == ["f0"]
    assert time.monotonic() - began < SILENT_S
    assert not origin.reads_many
    await origin.aclose()


async def test_a_body_that_stops_halfway(fake) -> None:
    origin = opened_for(fake, idle_timeout_s=1)
    fake.half_of = {"f0": threading.Event()}
    began = time.monotonic()
    assert "f0" in await missing(origin, fake)
    assert time.monotonic() - began < SILENT_S
    assert not origin.reads_many
    fake.half_of["f0"].set()
    await origin.aclose()


async def test_a_body_in_two_parts(fake, origin) -> None:
    last_was_asked = threading.Event()
    fake.half_of = {"f0": last_was_asked}
    fake.tells = {"f1": last_was_asked}
    assert await missing(origin, fake) == []


async def test_e_tags_that_cant_be_asked_for(fake, origin) -> None:
    meta = ObjectMeta(1000, 0, f"W/{_e_tag(fake.bodies['f0'])}")
    assert await read_many(origin, [("f0", meta)]) == [None]
    broken = ObjectMeta(1000, 0, '"a\r\nX-Evil: 1"')
    assert await read_many(origin, [("f0", broken)]) == [None]


async def test_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{sock.getsockname()[1]}"
        origin = open_origin("s3://b", OriginOptions(endpoint=endpoint, anonymous=True))
        assert await read_many(origin, [("f", ObjectMeta(1, 0, '"a"'))]) == [None]
        assert not origin.reads_many
        await origin.aclose()


async def test_tls(fake, tmp_path, monkeypatch) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with TlsFront(certificates, int(fake.endpoint.rpartition(":")[2])) as front:
        options = OriginOptions(endpoint=f"https://127.0.0.1:{front.port}", anonymous=True)
        stranger = open_origin("s3://b", options)
        assert await read_many(stranger, wanted_from(fake)) == [None] * 6
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.ca))
        origin = open_origin("s3://b", options)
        for _ in range(2):
            assert await missing(origin, fake) == []
        for opened in (stranger, origin):
            await opened.aclose()
