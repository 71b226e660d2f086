"""Read from /proc about processes, mounts and sockets. This module needs nothing else."""

import contextlib
import os
import re
from pathlib import Path

_PROC = Path("/proc")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def descendants(ancestor: int) -> list[int]:
    """Return the living descendants of `ancestor`, parents before children."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := _state_and_parent(entry)) is not None:
            state, parent = found
            children.setdefault(parent, []).append(int(entry.name))
            if state in "ZX":
                dead.add(int(entry.name))
    below = []
    queue = [ancestor]
    while queue:
        # A zombie has children, too, while some of its threads are still ending.
        found_pids = children.get(queue.pop(0), [])
        below += [pid for pid in found_pids if pid not in dead]
        queue += found_pids
    return below


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    found = _state_and_parent(_PROC / str(pid))
    return found is not None and found[0] not in "ZX"


def command(pid: int) -> str:
    """Return the name of the program that `pid` runs, or "" if the process has ended."""
    try:
        return Path(_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def mounts_below(directory: Path) -> list[Path]:
    """Return the mountpoints below `directory`, the last mounted first."""
    found = []
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        path = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if path != directory and path.is_relative_to(directory):
            found.append(path)
    return found[::-1]


def file_system_of(directory: Path) -> tuple[str, str]:
    """Return type and device of the file system that contains `directory`."""
    best, found = -1, ("unknown", "unknown")
    resolved = directory.resolve()
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        path = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4]))
        if resolved.is_relative_to(path) and len(path.parts) >= best:
            best = len(path.parts)
            fstype, device, *_ = right.split(" ")
            found = (fstype, device)
    return found


def bound_sockets(pid: int) -> list[Path]:
    """Return the socket files on which `pid` listens. A killed server leaves them behind."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in (_PROC / "net/unix").read_text().splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
            found.add(Path(fields[7]))
    return sorted(found)


def memory_bytes(pid: int) -> dict[str, int]:
    """Return `VmRSS` of a process and its parts, `RssAnon`, `RssFile` and `RssShmem`, in bytes."""
    found = {}
    for line in Path(_PROC / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its reaped children; 0 if the process is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    times = stat[stat.rindex(")") + 2 :].split(" ")[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def cpu_s_of_threads(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each living thread of a process, by its id; nothing if the process
    is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def _state_and_parent(entry: Path) -> tuple[str, int] | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return None
    state, parent, *_ = stat[stat.rindex(")") + 2 :].split(" ")
    return state, int(parent)
