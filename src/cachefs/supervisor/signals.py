"""Signals that a process receives by polling a socket."""

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MOST_AT_ONCE = 64


@contextmanager
def signals_on_a_socket(wanted: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """Yield a socket that the `wanted` signals make readable; see `read_signals`.

    Inside the context, these signals have no other effect. Afterwards, the old handlers return.
    Must run in the main thread.
    """
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
    """Return the signals that came, in order. The socket must be readable."""
    return [signal.Signals(number) for number in reader.recv(_MOST_AT_ONCE)]


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: Python has already written the number to the socket."""
