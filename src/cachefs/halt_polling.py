"""Whether an idle virtual CPU polls for work before it halts.

A halted virtual CPU wakes only when the hypervisor lets it run, which takes some 50 us. A read
through a userspace file system pays that twice. The driver `haltpoll` (Linux 5.4) exists only in
virtual machines, and then only the guest polls, not the host. Its governor has the same name. Where
idle CPUs have another driver, or none, the host may poll for the guest, and nothing here can tell.
"""

from pathlib import Path

SETTING = Path("sys/module/haltpoll/parameters/guest_halt_poll_ns")
"""How long an idle CPU polls at most, in ns. It exists also where the governor is not in use. This
and the other paths are relative to the root of the file system."""
POLL_NS = 200_000
"""A time that covers the pause between two requests of one reader. It is the kernel's default."""
_CPUIDLE = Path("sys/devices/system/cpu/cpuidle")
_GOVERNOR = _CPUIDLE / "current_governor"


def halt_poll_ns(root: Path = Path("/")) -> int | None:
    """Return how long an idle virtual CPU polls before it halts, in ns; None if the machine has no
    such setting."""
    try:
        return int(_text(root / SETTING))
    except ValueError:
        return None


def advice(root: Path = Path("/")) -> str | None:
    """Return one line with what to do if this is a virtual machine whose halt polling is off.
    Return None if it is on, or if that is not known."""
    if _text(root / _CPUIDLE / "current_driver") != "haltpoll":
        return None
    if _text(root / _GOVERNOR) not in ("", "haltpoll"):
        command = f"echo haltpoll > /{_GOVERNOR}"
    elif halt_poll_ns(root) == 0:
        command = f"echo {POLL_NS} > /{SETTING}"
    else:
        return None
    return (
        "this virtual machine halts idle CPUs at once, which can double the time of small reads; "
        f"as root: {command}"
    )


def _text(path: Path) -> str:
    """Return the text of a small file, or "" if it can't be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
