"""Detects a daemon that hangs, as opposed to one that waits for the processor, from /proc."""

from pathlib import Path

LOOK_INTERVAL_S = 1.0
STOPPED_LOOKS = 3
"""Looks that show a stopped process. After SIGSTOP, a process does not continue by itself."""
STILL_LOOKS = 10
"""Looks that show an idle loop: at least two intervals between signs of life."""


class HangDetector:
    """Observes one process; `look` must be called once in each `LOOK_INTERVAL_S`.

    The object counts looks, not seconds, so a pause of the whole machine does not count.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._stat = proc / str(pid) / "stat"
        self._times = proc / str(pid) / "task" / str(pid) / "schedstat"
        self._before: tuple[str, str] | None = None
        self._count = 0

    def forget(self) -> None:
        """Begin anew: the machine, or this process, did not run for a while."""
        self._before, self._count = None, 0

    def look(self) -> str | None:
        """Return "stopped", "still", or None if the process is healthy or its state is unknown.

        "still": the loop's thread slept for `STILL_LOOKS` looks, and neither ran nor waited for a
        processor. A thread that waits for a disk, or that a debugger holds, is neither.
        """
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
        """Return the main thread's state and its run and wait times, as text.

        The main thread runs the loop. The times are "" if they are unknown; None if the process is
        gone.
        """
        try:
            state = self._stat.read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return None
        try:
            return state, self._times.read_text()
        except OSError:
            return state, ""
