"""How much the spool holds, and who waits for room in it."""

from pathlib import Path

import trio

from cachefs.errors import SpoolFullError
from cachefs.staging.disk import SpoolDisk
from cachefs.units import format_bytes

_LEFT_FREE_BYTES = 16 << 20
"""What writes leave free on the disk, for the journal."""
_LOOK_AGAIN_S = 0.2
"""How often a waiting writer looks whether the disk has room."""


class SpoolSpace:
    """The bound of a spool in bytes, and the free space of its disk. Loop thread only."""

    def __init__(self, root: Path, limit_bytes: int, disk: SpoolDisk) -> None:
        self.root = root
        self._disk = disk
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """The bytes of all staged files, as they are charged."""
        self._turn = trio.Lock()
        """Held by the caller of `reserve` that gets room next. It passes on in order of arrival."""
        self._freed = trio.lowlevel.ParkingLot()

    def charge(self, more_bytes: int) -> None:
        """Count bytes that were written, or with a negative number bytes that went."""
        self.used_bytes += more_bytes
        if more_bytes < 0:
            self._freed.unpark_all()

    def has_room(self, more_bytes: int) -> bool:
        """Whether `more_bytes` can be written at once. False while earlier callers of `reserve`
        wait. One system call, `statvfs`."""
        return not self._turn.locked() and self._fits(more_bytes)

    def _fits(self, more_bytes: int) -> bool:
        if self.used_bytes + more_bytes > self.limit_bytes:
            return False
        return self._disk.free_bytes(self.root) >= more_bytes + _LEFT_FREE_BYTES

    async def reserve(self, more_bytes: int, timeout_s: float) -> None:
        """Wait until `more_bytes` can be written. Callers get room in the order of their calls.

        The caller must write before its next await: nothing is set aside. Raises `SpoolFullError`
        after `timeout_s`, and at once for more bytes than the bound."""
        if self.has_room(more_bytes):
            return
        with trio.move_on_after(timeout_s if more_bytes <= self.limit_bytes else 0):
            async with self._turn:
                while not self._fits(more_bytes):
                    with trio.move_on_after(_LOOK_AGAIN_S):
                        await self._freed.park()
                return
        raise SpoolFullError(
            f"the spool {self.root} is full ({format_bytes(self.used_bytes)} of "
            f"{format_bytes(self.limit_bytes)}, {format_bytes(self._disk.free_bytes(self.root))} "
            "free on its disk): wait for uploads, or give it more room with --spool-size"
        )
