"""Signals as something to poll for."""

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MOST_AT_ONCE = 64


@contextmanager
def signals_on_a_socket(wanted: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """While this lasts, the `wanted` signals do nothing but make a socket readable: see
    `read_signals`."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        old = {number: signal.signal(number, _do_nothing) for number in wanted}
        old_fd = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)


def read_signals(reader: socket.socket) -> list[signal.Signals]:
    """Those that came, in order; it is readable, so there are some."""
    return [signal.Signals(number) for number in reader.recv(_MOST_AT_ONCE)]


def _do_nothing(number: int, frame: object) -> None:
    """The number has been written to the socket."""
