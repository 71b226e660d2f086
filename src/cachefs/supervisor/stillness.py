"""Does a daemon hang, or does it only wait for the processor? What the kernel says of its loop."""

from pathlib import Path

LOOK_INTERVAL_S = 1.0
STOPPED_LOOKS = 3
"""A process that was stopped (SIGSTOP, a terminal) does not go on by itself."""
STILL_LOOKS = 10
"""More than twice the time between two signs of life."""


class Stillness:
    """Looked at once in `LOOK_INTERVAL_S`. Looks are counted, not seconds: where the whole machine
    stands still nobody is to blame."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._stat = proc / str(pid) / "stat"
        self._times = proc / str(pid) / "task" / str(pid) / "schedstat"
        self._before: tuple[str, str] | None = None
        self._count = 0

    def look(self) -> str | None:
        """What is wrong with the process: "stopped", "still", or None if nothing is or nobody can
        tell. It is still if its loop neither ran nor waited for a processor. A thread that waits
        for a disk, or that a debugger holds, is neither."""
        now = self._look()
        self._count = self._count + 1 if now == self._before else 0
        self._before = now
        if now is None:
            return None
        state, times = now
        if state == "T":
            return "stopped" if self._count >= STOPPED_LOOKS else None
        is_told = times.split()[:1] not in ([], ["0"])
        return "still" if state == "S" and is_told and self._count >= STILL_LOOKS else None

    def _look(self) -> tuple[str, str] | None:
        """The state of the main thread, which is the loop's, and how long it ran and waited."""
        try:
            state = self._stat.read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return None
        try:
            return state, self._times.read_text()
        except OSError:
            return state, ""
