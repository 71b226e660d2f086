"""Telling a service manager how the daemon is: the protocol of sd_notify(3).

One datagram of `NAME=VALUE` lines to the socket that NOTIFY_SOCKET names: a path, or a name in the
abstract namespace after "@". WATCHDOG_USEC says how long the manager waits for a sign of life, if
WATCHDOG_PID is missing or ours (sd_watchdog_enabled(3)). Both man pages call the protocol stable.
"""

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

_SEND_TIMEOUT_S = 0.2
"""A manager that doesn't read must not stop the loop; the next sign of life comes anyhow."""

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

_logger = logging.getLogger(__name__)


class ServiceManager:
    """Who started the daemon and wants to hear of it; without an address, nobody."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`address` is that of NOTIFY_SOCKET; `watchdog_s` the time after which it gives us up."""
        self._address = address
        self._watchdog_s = watchdog_s

    def ready(self, status: str) -> None:
        """The mount answers. `status` is shown by `systemctl status`."""
        self._tell("READY=1", f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        """The daemon ends, for whatever reason."""
        self._tell("STOPPING=1", "STATUS=unmounting, and storing what was fetched")

    @property
    def sign_interval_s(self) -> float | None:
        """How often `alive` is to be called; None if nobody watches."""
        return self._watchdog_s / 2 if self._address and self._watchdog_s else None

    def alive(self) -> None:
        """A sign of life."""
        self._tell("WATCHDOG=1")

    async def feed_watchdog(self) -> None:
        """Signs of life for as long as the event loop turns. Returns at once if nobody watches."""
        if self.sign_interval_s is None:
            return
        import trio  # late: `cachefs mount` forks before it loads what is heavy

        while True:
            self.alive()
            await trio.sleep(self.sign_interval_s)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.connect(address)
                sender.sendall("\n".join(lines).encode("utf-8", "surrogateescape"))
        except OSError as error:
            _logger.warning("can't tell the service manager %s: %s", lines[0], error)


NOBODY: Final = ServiceManager()


def take_over(environment: MutableMapping[str, str] = os.environ) -> ServiceManager:
    """The manager that `environment` names. Its variables are removed: children must not speak
    for the daemon."""
    address, watchdog_us, watchdog_pid = (environment.pop(name, "") for name in _VARIABLES)
    if not address.startswith(("/", "@")) or len(address) < 2:
        if address:
            _logger.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract name", address)
        return NOBODY
    watched = watchdog_pid in {"", str(os.getpid())}
    if not (watched and watchdog_us.isdecimal() and int(watchdog_us)):
        return ServiceManager(address)
    return ServiceManager(address, int(watchdog_us) / 1e6)


def _one_line(text: str) -> str:
    return " ".join(text.split())
