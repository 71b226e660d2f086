"""Says in the log which file a close waits for, if that takes long."""

import logging

import trio

from cachefs.units import format_bytes, format_duration
from cachefs.writes.unsent.report import UnsentFiles, UnsentState

_LOOK_S = 1.0
_SLOW_S = 10.0
_EVERY_S = 60.0

log = logging.getLogger(__name__)


class SlowSends:
    """Watches the files that are being sent. It logs a line when one has taken 10 s, and at most
    one line each minute, about the file that has taken longest."""

    def __init__(self, unsent: UnsentFiles) -> None:
        self._unsent = unsent
        self._since: dict[int, float] = {}
        """By number, since when each file is being sent."""
        self._silent_until = float("-inf")

    async def run(self) -> None:
        """Watch for as long as the mount. Never returns."""
        while True:
            await trio.sleep(_LOOK_S)
            self._look(trio.current_time())

    def _look(self, now: float) -> None:
        """Look once, in some 50 ns for each unsent file."""
        sending = self._unsent.sending()
        self._since = {number: self._since.get(number, now) for number in sending}
        slow = [number for number in sending if now - self._since[number] >= _SLOW_S]
        if slow and now >= self._silent_until:
            self._tell(min(slow, key=self._since.__getitem__), len(slow) - 1, now)

    def _tell(self, number: int, others: int, now: float) -> None:
        file = self._unsent.get(number)
        if file is None or file.state is not UnsentState.SENDING:
            return
        self._silent_until = now + _EVERY_S
        log.info(
            "still sending %s: %s of %s after %s%s",
            file.path,
            format_bytes(file.sent_bytes),
            format_bytes(file.size_bytes),
            format_duration(int(now - self._since[number])),
            f"; {others} more take as long" if others else "",
        )
