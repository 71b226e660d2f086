"""When the log says that a close takes long."""

import logging

import pytest
import trio
from trio.testing import MockClock

from cachefs.writes.unsent.report import UnsentFile, UnsentState
from cachefs.writes.unsent.slow_sends import SlowSends


class FakeUnsent:
    """Two files, of which some are being sent."""

    def __init__(self) -> None:
        self.sent: dict[int, bool] = {}
        self.sent_bytes = 0

    def set(self, number: int, *, is_sent: bool) -> None:
        self.sent[number] = is_sent

    def sending(self) -> list[int]:
        return [number for number, is_sent in self.sent.items() if is_sent]

    def get(self, number: int) -> UnsentFile:
        state = UnsentState.SENDING
        return UnsentFile(number, f"dir/{number}", state, 8 << 30, self.sent_bytes, "", 0.0, None)


async def test_one_line_after_ten_seconds_and_then_one_a_minute(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cachefs")
    unsent = FakeUnsent()
    nursery.start_soon(SlowSends(unsent).run)  # type: ignore[arg-type]
    unsent.set(1, is_sent=True)
    await trio.sleep(9)
    assert caplog.messages == []
    unsent.sent_bytes = 3 << 30
    await trio.sleep(3)
    assert caplog.messages == ["still sending dir/1: 3 GiB of 8 GiB after 10s"]
    unsent.set(2, is_sent=True)
    await trio.sleep(55)
    assert len(caplog.messages) == 1
    await trio.sleep(10)
    assert caplog.messages[1:] == [
        "still sending dir/1: 3 GiB of 8 GiB after 1m 10s; 1 more take as long"
    ]
    await trio.sleep(300)
    assert len(caplog.messages) == 7


async def test_quick_sends_are_not_told(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cachefs")
    unsent = FakeUnsent()
    nursery.start_soon(SlowSends(unsent).run)  # type: ignore[arg-type]
    for _ in range(30):
        unsent.set(1, is_sent=True)
        await trio.sleep(8)
        unsent.set(1, is_sent=False)
        await trio.sleep(2)
    assert caplog.messages == []
