"""The body of an answer while it arrives."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachefs.origin.http._engine import Room  # needs libcurl, which some sources do without


class Body:
    """A buffer that is filled meanwhile, and that the loop may take before it is full. All methods
    run on the loop."""

    def __init__(self, size_bytes: int, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called from time to time while bytes arrive."""
        self.size_bytes = size_bytes
        self._on_progress = on_progress
        self._data: Room | None = None
        self._count: Callable[[], int] = _nothing
        self._closed = False

    def room(self) -> "Room":
        """Return where the bytes go, from the first one on."""
        if self._data is None:
            from cachefs.origin.http._engine import Room

            self._data = Room(self.size_bytes)
        return self._data

    def follow(self, count: Callable[[], int]) -> Callable[[], None]:
        """`count` returns how many bytes have come by now. Return what is to be called from time to
        time when more have come."""
        if not self._closed:
            self._count = count
        return self._moved

    def _moved(self) -> None:
        if not self._closed:
            self._on_progress()

    def reject(self) -> None:
        """Let `take` return no bytes from now on, because they don't have the expected digest."""
        self._closed = True
        self._count = _nothing

    def take(self) -> memoryview:
        """Return the bytes that have arrived, and refuse any further ones."""
        self._closed = True
        return memoryview(self._data or b"")[: self._count()]


def _nothing() -> int:
    return 0
