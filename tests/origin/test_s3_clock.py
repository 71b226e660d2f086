"""A clock that is off is said to be off, and denies nobody what is cached."""

import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from cachefs.errors import AccessDeniedError, OriginUnavailableError
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import ObjectMeta
from tests.origin.listing import list_all
from tests.servers.told_s3 import Answer, Asked, ToldS3

DAY_S = 86_400
MOST_SKEW_S = 900
MIB = 1 << 20


class Strict:
    """Refuses what was signed by a clock that is off from its own, as S3 does. Everything else is
    denied as well, in another way."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def answer(self, asked: Asked) -> Answer:
        now_s = time.time() + self._ahead_s
        headers = {"Date": formatdate(now_s, usegmt=True)}
        signed = datetime.strptime(asked.headers["x-amz-date"] + "+0000", "%Y%m%dT%H%M%SZ%z")
        is_off = abs(now_s - signed.timestamp()) > MOST_SKEW_S
        code = "RequestTimeTooSkewed" if is_off else "AccessDenied"
        told = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = f"<Error><Code>{code}</Code><ServerTime>{told}</ServerTime></Error>"
        return Answer(body.encode(), 403, headers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldS3]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ToldS3(lambda asked: Answer(status=404)) as told:
        for name, value in told.environment.items():
            monkeypatch.setenv(name, value)
        yield told


@pytest.fixture
async def origin(server: ToldS3) -> AsyncIterator[Origin]:
    opened = open_origin("s3://b", OriginOptions())
    yield opened
    await opened.aclose()


async def ask(origin: Origin, request: str) -> None:
    if request == "check":
        await origin.check()
    elif request == "stat":
        await origin.stat("f")
    elif request == "list":
        await list_all(origin)
    else:
        size = 4 if request == "read small" else MIB
        await origin.read("f", ObjectMeta(size, 0, '"one"'), 0, size)


REQUESTS = ["check", "stat", "list", "read small", "read large"]


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(("ahead_s", "where"), [(DAY_S, "behind"), (-DAY_S, "ahead of")])
async def test_a_clock_that_is_off_is_no_denial(
    server: ToldS3, origin: Origin, request_: str, ahead_s: float, where: str
) -> None:
    server.answer = Strict(ahead_s).answer
    for _ in range(3):
        with pytest.raises(OriginUnavailableError, match=f"clock of this machine is .* {where}"):
            await ask(origin, request_)


@pytest.mark.parametrize("request_", REQUESTS)
async def test_a_denial_is_one(server: ToldS3, origin: Origin, request_: str) -> None:
    server.answer = Strict(60).answer
    for _ in range(3):
        with pytest.raises(AccessDeniedError):
            await ask(origin, request_)
    # After a denied look-up, a LIST shows whether there is such a name.
    assert len(server.asked) <= (7 if request_ == "stat" else 4)
