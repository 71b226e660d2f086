"""One daemon process, as its supervisor sees it."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from cachefs.errors import CachefsError, MountError, RelayUnusableError, UsageError
from cachefs.supervisor.channel import Channel, pair
from cachefs.supervisor.hang_detection import LOOK_INTERVAL_S, HangDetector

SILENCE_LIMIT_S = 60.0
"""A ready daemon that sends no message for this long counts as hanging. `hang_detection` detects
most of them sooner."""
START_SILENCE_LIMIT_S = 180.0
"""The same before it is ready, when a slow disk may block its loop for a while."""

_CRASHES = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


class StartFailure(NamedTuple):
    """Why a daemon can't begin, and the exit code for this error."""

    reason: str
    exit_code: int


class Child:
    """A daemon process from its start until `reap`. All times are monotonic.

    The object owns the process, its pidfd, and the supervisor's end of the channel.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start `command` with its channel's descriptor number as the last argument.

        The daemon gets its own process group, so Ctrl-C reaches only the supervisor, which then
        ends the daemon in order. Raises `OSError`.
        """
        ours, its = pair()
        try:
            with its:
                self._process = subprocess.Popen(
                    [*command, str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    process_group=0,
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self.channel = Channel(ours)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.began_s = self.heard_s = time.monotonic()
        self.look_at_s = self.began_s + LOOK_INTERVAL_S
        """When `hangs` must be called next."""
        self._hang_detector = HangDetector(self.pid)
        self.version: str | None = None
        """The daemon's version; None until its hello."""
        self.was_told_to_start = False
        self.is_ready = False
        self.ready_s = 0.0
        self.failure: StartFailure | None = None
        self.fall_back: str | None = None
        """Why the relay can't be used; None if it can."""
        self.has_crashed = False
        """Set by `reap`: a crash signal such as SIGSEGV ended it, without `end` or `abort`."""
        self.ends_by_s: float | None = None
        """When the daemon gets SIGKILL; None unless it was told to end."""

    @property
    def owes_signs_of_life(self) -> bool:
        """Whether the daemon must send signs of life. Between hello and start it only waits."""
        return self.version is None or self.was_told_to_start

    @property
    def silent_by_s(self) -> float:
        """When the daemon counts as hanging, unless it sends a message before."""
        return self.heard_s + (SILENCE_LIMIT_S if self.is_ready else START_SILENCE_LIMIT_S)

    @property
    def next_deadline_s(self) -> float | None:
        """When the supervisor must look at the daemon; None if nothing is due."""
        if self.ends_by_s is not None:
            return self.ends_by_s
        return min(self.silent_by_s, self.look_at_s) if self.owes_signs_of_life else None

    def hangs(self) -> str | None:
        """Return the result of `HangDetector.look`, and schedule the next call."""
        self.look_at_s = time.monotonic() + LOOK_INTERVAL_S
        return self._hang_detector.look()

    def excuse(self, gap_s: float) -> None:
        """Give the daemon more time: for `gap_s` the supervisor did not run, so perhaps it could
        not run either."""
        self.heard_s += gap_s
        if self.ends_by_s is not None:
            self.ends_by_s += gap_s
        self.look_at_s = time.monotonic() + LOOK_INTERVAL_S
        self._hang_detector.forget()

    def start(self, message: Mapping[str, object], table_fd: int) -> None:
        """Tell the daemon to begin. It must have sent its hello. `table_fd` stays the caller's."""
        self.was_told_to_start = True
        self.heard_s = time.monotonic()
        self.channel.send({"start": message}, [table_fd])

    def end(self, kill_delay_s: float) -> None:
        """Send SIGTERM; `kill` is due after `kill_delay_s`, or at once after a second call."""
        if self.ends_by_s is None:
            self.ends_by_s = time.monotonic() + kill_delay_s
            self._signal(signal.SIGTERM)
        else:
            self.ends_by_s = time.monotonic()

    def abort(self, kill_delay_s: float) -> None:
        """Send SIGABRT, so that the daemon logs its stacks. `kill` is due after `kill_delay_s`."""
        self.ends_by_s = time.monotonic() + kill_delay_s
        self._signal(signal.SIGABRT)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def reap(self) -> str:
        """Wait for the daemon's end, free its descriptors, and return how it ended."""
        code = self._process.wait()
        os.close(self.pidfd)
        self.channel.close()
        self.has_crashed = -code in _CRASHES and self.ends_by_s is None
        if code < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}" if code else "ended"

    def start_error(self, how: str, log_name: str) -> CachefsError:
        """Return the error for a first daemon that could not begin. `how` is the result of `reap`.

        `log_name` says where the user finds the daemon's log.
        """
        if self.fall_back is not None:
            return RelayUnusableError(self.fall_back)
        if self.failure is None:
            return MountError(f"the daemon {how} before the mount was up; see {log_name}")
        kind = UsageError if self.failure.exit_code == 2 else CachefsError
        return kind(self.failure.reason)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
