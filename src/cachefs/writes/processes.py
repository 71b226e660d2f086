"""The processes that change files: which still live, and which must be told of a conflict."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from cachefs.errors import CachefsError, ConflictError, ObjectChangedError
from cachefs.writes.written_file import Marks

_SIGKILL = 1 << 8
_SHORT_S = 0.1
"""After a longer wait, the process of a change may have been killed."""


def check_alive(process: int, began_at: float) -> None:
    """Raise `ObjectChangedError` if a change had to wait since `began_at`, and its process (0:
    unknown) was killed meanwhile: the kernel has given up the request, and another process may have
    changed the file since."""
    if process and trio.current_time() > began_at + _SHORT_S and has_ended(process):
        raise ObjectChangedError("the process that changes the file was killed")


def has_ended(process: int) -> bool:
    """Return whether a process has ended, or has been told to and can't refuse. Reads
    `/proc/PID/status` (see proc(5)). An unreadable process counts as living."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if status.get("State", "").lstrip()[:1] in ("Z", "X"):
        return True
    pending = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd"))
    return any(signals & _SIGKILL for signals in pending)


class Untold:
    """The processes whose changes the origin refused while none of their closes or fsyncs waited.
    Their next one fails. Loop thread only."""

    def __init__(self, marks: Marks | None) -> None:
        self._marks = marks
        self._writers: dict[int, tuple[set[int], str]] = {}

    def add(self, ino: int, writers: set[int], reason: str) -> None:
        """Note that the origin refused the changes of these processes (0: all) because of
        `reason`. The relay passes on the closes of the file from now on."""
        if not writers:
            return
        if ino not in self._writers and self._marks is not None:
            self._marks.mark_unsent(ino, True)
        self._writers[ino] = set(writers), reason

    @contextmanager
    def telling(self, ino: int, process: int) -> Iterator[None]:
        """Surround a close or fsync by a process (0: unknown). Raises `ConflictError` if it must be
        told. An error that is raised inside tells it, too."""
        reason = self._take(ino, process)
        if reason is not None:
            raise ConflictError(reason)
        try:
            yield
        except CachefsError:
            self._take(ino, process)
            raise

    def forget(self, ino: int) -> None:
        """Note that no process has the file open any more."""
        if self._writers.pop(ino, None) is not None and self._marks is not None:
            self._marks.mark_unsent(ino, False)

    def _take(self, ino: int, process: int) -> str | None:
        """Return the reason if the process must be told, and remove the process."""
        writers, reason = self._writers.get(ino, (set(), ""))
        if not writers or (process and not writers & {process, 0}):
            return None
        writers -= {process, 0} if process else set(writers)
        if not writers:
            self.forget(ino)
        return reason
