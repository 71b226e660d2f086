"""The body of an answer, as it comes."""

import contextlib
import threading
import time
from collections.abc import Callable

import trio

_TELL_EVERY_S = 0.1


class Body:
    """Filled by a worker thread and taken by the loop, perhaps before it is full."""

    def __init__(self, size_bytes: int, on_progress: Callable[[], None]) -> None:
        """Made on the loop, where `on_progress` is called now and then as bytes come."""
        self.size_bytes = size_bytes
        self._on_progress = on_progress
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._data = bytearray()
        self._filled = 0
        self._closed = False
        self._told_at = time.monotonic()

    def add(self, piece: memoryview) -> bool:
        """Called by the thread. False when nobody wants the rest: the bytes are taken already. The
        caller sees to it that no more come than `size_bytes`."""
        with self._lock:
            if self._closed:
                return False
            if not self._data:
                self._data = bytearray(self.size_bytes)
            end = self._filled + piece.nbytes
            self._data[self._filled : end] = piece
            self._filled = end
        now = time.monotonic()
        if now >= self._told_at + _TELL_EVERY_S:
            self._told_at = now
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._on_progress, idempotent=True)
        return True

    def take(self) -> memoryview:
        """What has come. Nothing is added any more."""
        with self._lock:
            self._closed = True
            return memoryview(self._data)[: self._filled]
