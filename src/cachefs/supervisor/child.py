"""One daemon, as its supervisor sees it."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cachefs.supervisor.channel import Channel, pair
from cachefs.supervisor.stillness import LOOK_INTERVAL_S, Stillness

_CRASHES = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


class Child:
    """A daemon that was started, from then until it is `reaped`. Times are monotonic."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command` gets the number of its end of the channel as last argument. Raises `OSError`.

        A process group of its own: Ctrl-C is for the supervisor, which ends it in good order.
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
        """When `hangs` is due."""
        self._stillness = Stillness(self.pid)
        self.version: str | None = None
        """Once it has said hello."""
        self.was_told_to_start = False
        self.is_ready = False
        self.ready_s = 0.0
        self.failure: tuple[str, int] | None = None
        """Why it can't begin, and the exit code that this means."""
        self.fall_back: str | None = None
        """Why the relay can't be used."""
        self.has_crashed = False
        """Once it is reaped: a signal that it has caused itself, and nobody has sent, ended it."""
        self.ends_by_s: float | None = None
        """It was asked to end, and is killed then."""

    @property
    def owes_signs_of_life(self) -> bool:
        """While it waits to be told to start, it sleeps."""
        return self.version is None or self.was_told_to_start

    def hangs(self) -> str | None:
        """See `Stillness.look`."""
        self.look_at_s = time.monotonic() + LOOK_INTERVAL_S
        return self._stillness.look()

    def start(self, message: Mapping[str, object], table_fd: int) -> None:
        """After its hello."""
        self.was_told_to_start = True
        self.heard_s = time.monotonic()
        self.channel.send({"start": message}, [table_fd])

    def end(self, patience_s: float) -> None:
        """Ask it to end; after `patience_s` `kill` is due. Asked again: now."""
        if self.ends_by_s is None:
            self.ends_by_s = time.monotonic() + patience_s
            self._signal(signal.SIGTERM)
        else:
            self.ends_by_s = time.monotonic()

    def abort(self, patience_s: float) -> None:
        """Have it show where it stands, and end."""
        self.ends_by_s = time.monotonic() + patience_s
        self._signal(signal.SIGABRT)

    def kill(self) -> None:
        """At once."""
        self._signal(signal.SIGKILL)

    def reap(self) -> str:
        """How it ended. Waits for that."""
        code = self._process.wait()
        os.close(self.pidfd)
        self.channel.close()
        self.has_crashed = -code in _CRASHES and self.ends_by_s is None
        if code < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}" if code else "ended"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
