"""Finds out with which rights the process of a request may change files."""

from pathlib import Path

from cachefs.types import Caller

_ALL_CAPABILITIES = (1 << 64) - 1
_ROOT = 0


def caller_of(uid: int, gid: int, thread: int) -> Caller:
    """Return who sent a request: `uid` and `gid` are those of the request, and `thread` its thread
    (0: not visible from this PID namespace). Reads /proc/PID/status (proc(5)).

    If the thread has ended, can't be seen, or is another one by now, its supplementary groups are
    unknown, and count as none. Root then counts as root without restrictions."""
    status = _status(thread) if thread else {}
    ids = (status.get("Uid", "").split()[-1:], status.get("Gid", "").split()[-1:])
    if ids != ([str(uid)], [str(gid)]):
        return Caller(uid, gid, (), _ALL_CAPABILITIES if uid == _ROOT else 0)
    groups = tuple(map(int, status.get("Groups", "").split()))
    capabilities = 0
    if uid == _ROOT and _is_in_own_namespace(thread):
        # In a user namespace of its own, a process has capabilities that are none here.
        capabilities = int(status.get("CapEff", "0"), 16)
    return Caller(uid, gid, groups, capabilities)


def _status(thread: int) -> dict[str, str]:
    lines = _read(thread, "status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _is_in_own_namespace(thread: int) -> bool:
    """Whether a thread is in the user namespace of this process (user_namespaces(7)). Another one
    may have the same users. Without CAP_SYS_PTRACE, this process may not see which namespace a
    thread with more capabilities is in; then the users decide, which all processes may read."""
    try:
        return Path(f"/proc/{thread}/ns/user").readlink() == Path("/proc/self/ns/user").readlink()
    except OSError:
        return _read(thread, "uid_map").split() == _read("self", "uid_map").split()


def _read(thread: int | str, name: str) -> str:
    try:
        return Path(f"/proc/{thread}/{name}").read_text(errors="replace")
    except OSError:
        return ""
