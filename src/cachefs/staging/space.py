"""How much the spool holds, and who waits for room in it.

A file keeps its bytes in the spool until it is closed, so several files that fit alone could fill
the spool and wait for one another. Then one of them, the one that has waited longest, may go on
beyond the bound. So the spool has at most twice `limit_bytes`.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from cachefs.errors import SpoolFullError
from cachefs.staging.disk import SpoolDisk
from cachefs.units import format_bytes

_LEFT_FREE_BYTES = 16 << 20
"""What writes leave free on the disk, for the journal."""
_LOOK_AGAIN_S = 0.2
"""How often a waiting writer looks whether the disk has room."""
_STUCK_S = 1.0
"""When no room was made for so long, the first waiting file may exceed the bound."""
_IDLE_S = 5.0
"""A file that may exceed the bound, and was not written for so long, gives way to another one."""


class Holder(Protocol):
    """A file in the spool."""

    @property
    def charged_bytes(self) -> int:
        """How much of the spool it has; 0 when it has ended."""
        ...


class SpoolSpace:
    """The bound of a spool in bytes, and the free space of its disk. Loop thread only."""

    def __init__(self, root: Path, limit_bytes: int, disk: SpoolDisk) -> None:
        self.root = root
        self._disk = disk
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """The bytes of all staged files, as they are charged."""
        self._waiting: OrderedDict[object, None] = OrderedDict()
        """The calls of `reserve` that wait, in order of arrival."""
        self.on_full: Callable[[], None] = lambda: None
        """Called again and again while a writer waits: it may make room."""
        self._freed = trio.lowlevel.ParkingLot()
        self._freed_at = 0.0
        self._favoured: Holder | None = None
        """The one file that may exceed the bound."""
        self._favoured_at = 0.0
        """When it was written last."""

    def charge(self, more_bytes: int) -> None:
        """Count bytes that were written, or with a negative number bytes that went."""
        self.used_bytes += more_bytes
        if more_bytes < 0 and self._waiting:
            self._freed_at = trio.current_time()
            self._freed.unpark_all()

    @property
    def is_wanted(self) -> bool:
        """Whether a writer waits for room."""
        return bool(self._waiting)

    def has_room(self, more_bytes: int) -> bool:
        """Whether `more_bytes` can be written at once. False while earlier callers of `reserve`
        wait. One system call, `statvfs`."""
        return not self._waiting and self._fits(more_bytes)

    def _fits(self, more_bytes: int) -> bool:
        return self.used_bytes + more_bytes <= self.limit_bytes and self._disk_has(more_bytes)

    def _disk_has(self, more_bytes: int) -> bool:
        return self._disk.free_bytes(self.root) >= more_bytes + _LEFT_FREE_BYTES

    def _may_exceed(self, more_bytes: int, file: Holder | None) -> bool:
        """Whether the file is the one that may exceed the bound, and has room."""
        if file is None or file is not self._favoured:
            return False
        self._favoured_at = trio.current_time()
        return (
            file.charged_bytes + more_bytes <= self.limit_bytes
            and self.used_bytes + more_bytes <= 2 * self.limit_bytes
            and self._disk_has(more_bytes)
        )

    def _favour(self, file: Holder | None) -> None:
        """Let the file exceed the bound, unless another one does."""
        former, now = self._favoured, trio.current_time()
        is_free = former is None or not former.charged_bytes or now - self._favoured_at > _IDLE_S
        if file is not None and is_free:
            self._favoured, self._favoured_at = file, now

    async def reserve(
        self,
        more_bytes: int,
        patience_s: float,
        file: Holder | None = None,
        *,
        shrinks: bool = False,
    ) -> None:
        """Wait until `more_bytes` can be written to a file. Callers get room in the order of their
        calls, except the one file that may exceed the bound.

        The caller must write before its next await: nothing is set aside. Raises `SpoolFullError`
        when no room was made for `patience_s`, and at once if a wait can't help: a file that does
        not shrink (`shrinks` is false) needs more than the bound for itself."""
        if self.has_room(more_bytes) or self._may_exceed(more_bytes, file):
            return
        own_bytes = 0 if shrinks or file is None else file.charged_bytes
        if own_bytes + more_bytes <= self.limit_bytes:
            turn = object()
            self._waiting[turn] = None
            try:
                if await self._wait_for_room(turn, more_bytes, patience_s, file):
                    return
            finally:
                del self._waiting[turn]
                self._freed.unpark_all()  # the next one is the first now
        raise SpoolFullError(
            f"the spool {self.root} is full ({format_bytes(self.used_bytes)} of "
            f"{format_bytes(self.limit_bytes)}, {format_bytes(self._disk.free_bytes(self.root))} "
            "free on its disk): wait for uploads, or give it more room with --spool-size"
        )

    async def _wait_for_room(
        self, turn: object, more_bytes: int, patience_s: float, file: Holder | None
    ) -> bool:
        """Return whether there is room now: False if none was made for `patience_s`."""
        began_at = trio.current_time()
        while True:
            is_first = next(iter(self._waiting)) is turn
            if (is_first and self._fits(more_bytes)) or self._may_exceed(more_bytes, file):
                return True
            waited_s = trio.current_time() - max(began_at, self._freed_at)
            if waited_s >= patience_s:
                return False
            if is_first and waited_s >= _STUCK_S:
                self._favour(file)
            if is_first:
                self.on_full()
            with trio.move_on_after(_LOOK_AGAIN_S):
                await self._freed.park()
