"""Names that the kernel must drop: sent in order, and before the session is freed."""

import socket
import threading
import types

import pytest
import trio

from cachefs.fuse import session
from cachefs.fuse.notices import NameNotices

LIMIT = "cachefs.fuse.notices._LAST_NOTICES_S"
NAMES = [(1, f"{number}".encode()) for number in range(100)]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notice is lost because the machine is busy."""
    monkeypatch.setattr(LIMIT, 100.0)


def test_notices_are_sent_in_their_order_until_the_last() -> None:
    sent: list[tuple[int, bytes]] = []
    notices = NameNotices(lambda parent, name: sent.append((parent, name)))
    for notice in NAMES:
        notices.put(*notice)
    notices.finish()
    assert sent == NAMES


def test_unknown_names_and_an_ended_mount_are_no_errors() -> None:
    sent: list[bytes] = []

    def send(parent: int, name: bytes) -> None:
        sent.append(name)
        raise FileNotFoundError if parent == 1 else OSError(22, "no session")

    notices = NameNotices(send)
    for parent in (1, 2, 1):
        notices.put(parent, b"name")
    notices.finish()
    assert len(sent) == 3


def test_a_kernel_that_keeps_the_sender_waiting_does_not_stop_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIMIT, 0.01)
    answered = threading.Event()

    def send(parent: int, name: bytes) -> None:
        answered.wait()

    notices = NameNotices(send)
    notices.put(1, b"name")
    notices.finish()
    answered.set()


def test_the_end_without_a_notice() -> None:
    NameNotices(lambda parent, name: None).finish()


def test_the_session_is_freed_after_the_last_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    may_send = threading.Event()

    def invalidate_entry(parent: int, name: bytes) -> None:
        may_send.wait()
        done.append(name)

    fake = types.SimpleNamespace(
        invalidate_entry=invalidate_entry, close=lambda unmount: done.append("freed")
    )
    monkeypatch.setattr(session, "pyfuse3", fake)
    session._begin_notices()
    session.invalidate_entry(1, b"a")
    session.invalidate_entry(1, b"b")
    threading.Timer(0.1, may_send.set).start()
    session.unmount()
    session.invalidate_entry(1, b"late")
    assert done == [b"a", b"b", "freed"]


async def test_names_are_dropped_when_the_supervisor_has_passed_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a notice when it has passed on the one before."""
    daemon, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed_on: list[bytes] = []
    may_pass = threading.Event()

    def pass_on() -> None:
        while taken := supervisor.recv(100):
            may_pass.wait()
            passed_on.append(taken)

    fake = types.SimpleNamespace(
        invalidate_entry=lambda parent, name: daemon.send(name), close=lambda unmount: None
    )
    monkeypatch.setattr(session, "pyfuse3", fake)
    monkeypatch.setattr(session, "_notices_fd", daemon.fileno())
    monkeypatch.setattr(session, "_NOTICES_REACH_S", 100.0)
    relay = threading.Thread(target=pass_on)
    with daemon, supervisor:
        relay.start()
        session._begin_notices()
        for name in (b"a", b"b"):
            session.invalidate_entry(1, name)
        threading.Timer(0.1, may_pass.set).start()
        await session.names_dropped()
        assert passed_on[:2] == [b"a", b"b"]
        session.unmount()
        daemon.shutdown(socket.SHUT_RDWR)
        relay.join()


async def test_nobody_waits_for_ever_for_a_kernel_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    fake = types.SimpleNamespace(
        invalidate_entry=lambda parent, name: answered.wait(), close=lambda unmount: None
    )
    monkeypatch.setattr(session, "pyfuse3", fake)
    monkeypatch.setattr(session, "_NOTICES_REACH_S", 0.01)
    session._begin_notices()
    session.invalidate_entry(1, b"a")
    with trio.fail_after(100):
        await session.names_dropped()
    answered.set()
    session.unmount()


async def test_names_are_dropped_before_a_mount_too() -> None:
    await session.names_dropped()
