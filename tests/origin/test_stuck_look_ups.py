"""Look-ups of credentials and of hosts that never end keep no thread from anybody else."""

import socket
import threading
from collections.abc import Iterator

import pytest
import trio

from cachefs.origin.host_names import HostNames
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.origin.s3.client import ObjectStoreOrigin
from cachefs.origin.s3.credentials import CredentialProvider, CredentialSource
from cachefs.types import ObjectMeta

_MORE_THAN_TRIO_HAS = 60


class StuckSource(CredentialSource):
    """A command that says nothing."""

    advice = "wait"

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def find(self) -> None:
        self._released.wait()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def give_up_one_after_the_other(origin: ObjectStoreOrigin) -> None:
    for _ in range(_MORE_THAN_TRIO_HAS):
        with trio.move_on_after(0.01):
            await origin.read("a", ObjectMeta(3, 0, '"e"'), 0, 3)


async def threads_are_free() -> None:
    assert trio.to_thread.current_default_thread_limiter().available_tokens > 30
    with trio.fail_after(300):
        await trio.to_thread.run_sync(lambda: None)


async def test_credentials(released: threading.Event) -> None:
    origin = open_origin("s3://b", OriginOptions("http://127.0.0.1:9", anonymous=True))
    origin._reader.credentials.provider = CredentialProvider(StuckSource(released))
    await give_up_one_after_the_other(origin)
    await threads_are_free()
    released.set()
    await origin.aclose()


async def test_hosts(released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*args: object, **kwargs: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            released.wait()
        raise socket.gaierror(socket.EAI_NONAME, "no number")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    trio.socket.set_custom_hostname_resolver(HostNames())
    for _ in range(_MORE_THAN_TRIO_HAS):
        with trio.move_on_after(0.01):
            await trio.open_tcp_stream("no.such.host", 80)
    await threads_are_free()
    released.set()
