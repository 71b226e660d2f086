"""TLS connections: the trusted CAs, handshakes, and the session that the next handshake resumes.

A full handshake takes 1.5 ms of CPU, a resumed one .9 ms, and the certificates of the system take
50 ms to load. So all of this happens in worker threads, also for connections of the loop.
"""

import socket
import ssl
import threading
from urllib.parse import urlsplit

from cachefs.origin.s3.config import S3Target


def address_of(target: S3Target) -> tuple[str, int]:
    """Return the host and the port of the bucket."""
    address = urlsplit(target.base_url)
    return str(address.hostname), address.port or (443 if address.scheme == "https" else 80)


class TlsConnector:
    """Opens TLS connections to one host. Verifies its certificate and its name. `connect` and
    `remember` are thread-safe. `_lock` protects the creation of `_context`."""

    def __init__(self, host: str, port: int, ca_file: str | None) -> None:
        self._host = host
        self._port = port
        self._ca_file = ca_file
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._session: ssl.SSLSession | None = None

    def connect(self, timeout_s: float) -> ssl.SSLSocket:
        """Return a new connection. Blocks. Each step may take `timeout_s`: the connection to each
        address, and the handshake. Raises `OSError`, also as `ssl.SSLError`."""
        context = self._trusting()  # first, because a server does not wait long for a handshake
        opened: socket.socket = connect_tcp(self._host, self._port, timeout_s)
        try:
            # For a connection that the server has reset already, `wrap_socket` makes no handshake
            # and reports no error. `do_handshake` raises one.
            opened = found = context.wrap_socket(
                opened,
                server_hostname=self._host,
                session=self._session,
                do_handshake_on_connect=False,
            )
            found.do_handshake()
        except BaseException:
            opened.close()
            raise
        return found

    def remember(self, connection: socket.socket) -> None:
        """Resume the session of a connection that will be closed in later handshakes. In TLS 1.3
        the session arrives with the first answer."""
        if isinstance(connection, ssl.SSLSocket) and connection.session is not None:
            self._session = connection.session

    def _trusting(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context(cafile=self._ca_file)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.set_alpn_protocols(["http/1.1"])
                self._context = context
            return self._context


def connect_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a new blocking connection. Each address may take `timeout_s`. Raises `OSError`."""
    opened = socket.create_connection((host, port), timeout_s)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened
