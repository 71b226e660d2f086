"""A TLS server in front of a plain one: it passes all bytes on, in both directions. And a proxy,
which does so after a request CONNECT.

    with TlsFront(certificates, port) as front: ... front.port ...
    with ConnectProxy(port) as proxy: ... proxy.port ...

No pytest here.
"""

import contextlib
import socket
import ssl
import threading
import time
from typing import Self

from tests.servers.certificates import Certificates


class _Front:
    """Started by `with`, gone after it. `piece_bytes` and `pause_s`: answers go out in such pieces,
    with such pauses."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: set[socket.socket] = set()
        self.failures = 0
        self.piece_bytes = 1 << 20
        self.pause_s = 0.0

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            client = self._begin(raw)
        except OSError:
            self.failures += 1
            raw.close()
            return
        with client, socket.create_connection(("127.0.0.1", self._upstream_port)) as upstream:
            ends = {client, upstream}
            self._open |= ends
            upwards = threading.Thread(target=self._pump, args=(client, upstream), daemon=True)
            upwards.start()
            self._pump(upstream, client)
            upwards.join()
            self._open -= ends

    def _begin(self, raw: socket.socket) -> socket.socket:
        """Return the connection whose bytes are passed on. Raises `OSError`."""
        raise NotImplementedError

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(256 << 10):
                for start in range(0, len(data), self.piece_bytes):
                    sink.sendall(data[start : start + self.piece_bytes])
                    if self.pause_s:
                        time.sleep(self.pause_s)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class TlsFront(_Front):
    """`resumed` has for each handshake whether it resumed a session."""

    def __init__(self, certificates: Certificates, upstream_port: int) -> None:
        super().__init__(upstream_port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.server, certificates.key)
        self.resumed: list[bool] = []

    def speak_only(self, version: ssl.TLSVersion) -> None:
        """Accept no other version of TLS, even if this one is too old for OpenSSL's defaults."""
        self._context.set_ciphers("ALL:@SECLEVEL=0")
        self._context.minimum_version = self._context.maximum_version = version

    def _begin(self, raw: socket.socket) -> socket.socket:
        client = self._context.wrap_socket(raw, server_side=True)
        self.resumed.append(bool(client.session_reused))
        return client


class ConnectProxy(_Front):
    """Connects to the one server that it has, whatever host a request names. `heads` has the
    requests, and `refusal` is what they are answered with, if anything."""

    def __init__(self, upstream_port: int) -> None:
        super().__init__(upstream_port)
        self.heads: list[bytes] = []
        self.refusal = b""

    def _begin(self, raw: socket.socket) -> socket.socket:
        head = b""
        while b"\r\n\r\n" not in head:
            more = raw.recv(1)
            if not more:
                raise ConnectionError("the request is not complete")
            head += more
        self.heads.append(head)
        if self.refusal:
            raw.sendall(self.refusal)
            raise ConnectionError("the request is refused")
        raw.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        return raw
