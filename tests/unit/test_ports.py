"""The ports of the servers that tests start belong to them alone."""

import contextlib
import socket

import pytest

from tests.servers.ports import answers, free_ports


def test_nobody_else_is_given_a_free_port() -> None:
    ports = set(free_ports(20))
    assert len(ports) == 20
    with contextlib.ExitStack() as stack:
        for reuse in [False, True] * 500:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            sock.bind(("127.0.0.1", 0))
            assert sock.getsockname()[1] not in ports


def test_a_server_can_listen_there_and_end_and_begin_again() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        assert not answers(port)
        with socket.create_server(("127.0.0.1", port)):
            assert answers(port)
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))
