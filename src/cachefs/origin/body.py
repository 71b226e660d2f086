"""The body of an answer while it arrives."""

import contextlib
import threading
import time
from collections.abc import Callable

import trio

_TELL_EVERY_S = 0.1


class Body:
    """A buffer that a worker thread fills and the loop takes, perhaps before it is full. `_lock`
    protects `_data`, `_filled` and `_closed`."""

    def __init__(self, size_bytes: int, on_progress: Callable[[], None]) -> None:
        """Must be called on the loop. The loop calls `on_progress` while bytes arrive, at most once
        per `_TELL_EVERY_S`."""
        self.size_bytes = size_bytes
        self._on_progress = on_progress
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._data = bytearray()
        self._filled = 0
        self._closed = False
        self._told_at = time.monotonic()

    def room(self, most_bytes: int) -> memoryview | None:
        """Return where the next bytes go, at most `most_bytes` of them; None if the body has been
        taken, so that the rest is not needed. The worker thread calls this."""
        with self._lock:
            if self._closed:
                return None
            if not self._data:
                self._data = bytearray(self.size_bytes)
            return memoryview(self._data)[self._filled : self._filled + most_bytes]

    def filled(self, count: int) -> None:
        """Note that so many bytes have been written to `room`."""
        with self._lock:
            self._filled += 0 if self._closed else count
        now = time.monotonic()
        if now >= self._told_at + _TELL_EVERY_S:
            self._told_at = now
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._on_progress, idempotent=True)

    def reject(self) -> None:
        """Let `take` return no bytes from now on, because they don't have the expected digest."""
        with self._lock:
            self._closed = True
            self._filled = 0

    def take(self) -> memoryview:
        """Return the bytes that have arrived, and refuse any further ones."""
        with self._lock:
            self._closed = True
            return memoryview(self._data)[: self._filled]
