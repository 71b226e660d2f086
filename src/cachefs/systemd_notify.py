"""Report the daemon's state to a service manager with the protocol of sd_notify(3).

A message is one datagram of `NAME=VALUE` lines to the socket in NOTIFY_SOCKET: a path, or "@" and a
name in the abstract namespace. WATCHDOG_USEC gives how long the manager waits for a keep-alive, if
WATCHDOG_PID is missing or is this process (sd_watchdog_enabled(3)). Both man pages call the
protocol stable.
"""

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

from cachefs.foreign_numbers import whole_number

_SEND_TIMEOUT_S = 0.2
"""A manager that doesn't read must not stop the loop. A lost keep-alive is harmless, because the
next one follows."""

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

_logger = logging.getLogger(__name__)


class ServiceManager:
    """The service manager that started the daemon. Without an address, every message is dropped."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`address` is that of NOTIFY_SOCKET. After `watchdog_s` without a keep-alive, the manager
        treats the daemon as failed."""
        self._address = address
        self._watchdog_s = watchdog_s

    def ready(self, status: str) -> None:
        """Report that the mount answers. `systemctl status` shows `status`."""
        self._tell("READY=1", f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        """Report that the daemon ends, for whatever reason."""
        self._tell("STOPPING=1", "STATUS=unmounting, and storing what was fetched")

    @property
    def sign_interval_s(self) -> float | None:
        """The interval at which `alive` must be called; None without a watchdog."""
        return self._watchdog_s / 2 if self._address and self._watchdog_s else None

    def alive(self) -> None:
        """Send a keep-alive."""
        self._tell("WATCHDOG=1")

    async def feed_watchdog(self) -> None:
        """Send keep-alives as long as the event loop runs. Return at once without a watchdog."""
        if self.sign_interval_s is None:
            return
        import trio  # late, because `cachefs mount` forks before its heavy imports

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
    """Return the manager that `environment` names, and remove its variables, because children must
    not send messages in the daemon's name."""
    address, watchdog_us, watchdog_pid = (environment.pop(name, "") for name in _VARIABLES)
    if not address.startswith(("/", "@")) or len(address) < 2:
        if address:
            _logger.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract name", address)
        return NOBODY
    watchdog_number = whole_number(watchdog_us)
    if not watchdog_number or watchdog_pid not in {"", str(os.getpid())}:
        return ServiceManager(address)
    return ServiceManager(address, watchdog_number / 1e6)


def _one_line(text: str) -> str:
    return " ".join(text.split())
