"""Idle connections, for clients that handle only the usual case and have no proxies."""

import socket
import time
from collections import deque
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from cachefs.origin.options import OriginOptions
from cachefs.origin.proxies import proxy_for
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.fast_path.tls import TlsConnector

_REST_S = 10.0
"""The cooldown after a failure: `is_usable` is false for so long."""
REUSED_S = 3.0
"""A connection that was idle for longer may have been closed by the server."""


class Connection:
    """An HTTP/1.1 connection for one request at a time. It owns the socket, which `tls` has opened
    if it is not None."""

    def __init__(self, opened: socket.socket, tls: TlsConnector | None) -> None:
        self._socket = opened
        self._tls = tls
        self.used_at = time.monotonic()
        self.is_idle = False
        """The last answer has been read completely, and the server accepts another request."""

    def close(self) -> None:
        """Close the socket. Remember its TLS session for later connections."""
        if self._tls is not None:
            self._tls.remember(self._socket)
        self._socket.close()


def address_of(target: S3Target) -> tuple[str, int]:
    """Return the host and the port of the bucket."""
    address = urlsplit(target.base_url)
    return str(address.hostname), address.port or (443 if address.scheme == "https" else 80)


C = TypeVar("C", bound=Connection)


class SmallReader(Generic[C]):
    """Reads small objects of one bucket, and owns the connections for this."""

    def __init__(
        self,
        target: S3Target,
        provider: CredentialProvider,
        options: OriginOptions,
        tls: TlsConnector | None,
    ) -> None:
        """`tls` opens the connections to the address `target`; None means plain HTTP."""
        self._target = target
        self._provider = provider
        self._options = options
        self._tls = tls
        self._host, self._port = address_of(target)
        self._fits = proxy_for(target.base_url) is None
        """Whether the bucket can be read this way at all."""
        self._idle: deque[C] = deque()
        """Idle connections; the most recently used one is at the end."""
        self._rests_until = float("-inf")
        self._closed = False

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent this way at present."""
        return self._fits and not self._closed and time.monotonic() >= self._rests_until

    def close(self) -> None:
        """Close idle connections now, and the others when they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _rest(self) -> None:
        self._rests_until = time.monotonic() + _REST_S

    def _idle_connection(self) -> C | None:
        """Take an idle connection that the server has hardly closed yet; close older ones."""
        now = time.monotonic()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:  # other threads also take idle connections
                return None
            if now - connection.used_at <= REUSED_S:
                return connection
            connection.close()
