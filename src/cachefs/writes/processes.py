"""Whether processes of this machine still live."""

from pathlib import Path

import trio

from cachefs.errors import ObjectChangedError

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
