"""A line that is slow, or breaks, is no origin that is away: what comes counts, and stays."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
import trio

from cachefs.errors import OriginUnavailableError
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import ObjectMeta
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3

MIB = 1 << 20
PIECE = 8192
DATA = random.Random(1).randbytes(8 * MIB)
META = ObjectMeta(len(DATA), 1_793_613_600_000_000_000, '"one"')


class Line:
    """What all answers share. `cut_after`: bytes of each answer after which it ends."""

    def __init__(self, bytes_per_s: float, cut_after: int | None = None) -> None:
        self._s_per_byte = 1 / bytes_per_s
        self._cut_after = cut_after
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.starts: list[int] = []

    def answer(self, asked: Asked) -> Answer:
        start, end = 0, len(DATA)
        headers = {"Last-Modified": DATE, "ETag": '"one"'}
        status = 200
        if "range" in asked.headers:
            first, last = asked.headers["range"].removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1
            headers["Content-Range"] = f"bytes {first}-{last}/{len(DATA)}"
            status = 206
        self.starts.append(start)
        return Answer(self._pieces(start, end), status, headers, end - start)

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        for at in range(start, end, PIECE):
            if self._cut_after is not None and at - start >= self._cut_after:
                return
            piece = DATA[at : min(at + PIECE, end)]
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(piece) * self._s_per_byte
                wait_s = self._free_at - now
            time.sleep(wait_s)
            yield piece


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ToldS3(lambda asked: Answer(status=404)) as told:
        yield told


def through(server: ToldS3, **settings: float) -> ResilientOrigin:
    timeouts = Resilience(**settings)  # type: ignore[arg-type]
    options = OriginOptions(
        endpoint=server.endpoint,
        anonymous=True,
        connect_timeout_s=timeouts.request_timeout_s,
        idle_timeout_s=timeouts.request_timeout_s,
        total_timeout_s=timeouts.read_timeout_s + 10,
    )
    return ResilientOrigin(open_origin("s3://b", options), timeouts)


@pytest.mark.long
async def test_four_readers_share_a_slow_line(server: ToldS3) -> None:
    line = Line(4_000_000)
    server.answer = line.answer
    origin = through(server)
    found: list[bytes] = []

    async def read() -> None:
        found.append(bytes(await origin.read("f", META, 0, len(DATA))))

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read)
    assert found == [DATA] * 4
    assert server.sent_bytes < 12 * len(DATA)
    assert origin.best_read_bytes < len(DATA)
    assert not origin.is_down
    await origin.aclose()


async def test_what_has_come_before_a_line_breaks_is_not_asked_for_again(server: ToldS3) -> None:
    line = Line(100_000_000, cut_after=3 * MIB)
    server.answer = line.answer
    origin = through(server)
    with trio.fail_after(300):
        assert bytes(await origin.read("f", META, 0, len(DATA))) == DATA
    assert line.starts == sorted(line.starts)
    assert max(line.starts) > 5 * MIB
    await origin.aclose()


@pytest.mark.long
async def test_a_line_that_hardly_moves_is_an_error(server: ToldS3) -> None:
    server.answer = Line(2000).answer
    origin = through(server, read_timeout_s=2.0, request_timeout_s=0.8)
    began_at = trio.current_time()
    with pytest.raises(OriginUnavailableError):
        await origin.read("f", META, 0, MIB + 1)
    assert trio.current_time() - began_at < 30
    await origin.aclose()
