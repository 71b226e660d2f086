"""Describe the machine of a measurement, and set its halt polling."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import procfs
from bench.rig import ROOT
from cachefs.halt_polling import SETTING, halt_poll_ns
from tests.servers.seaweedfs import weed_binary

_HALT_POLL = Path("/", SETTING)


def describe(directory: Path) -> dict[str, Any]:
    """Return CPU, memory, kernel, disk and versions. `directory` contains the caches."""
    fstype, device = procfs.file_system_of(directory)
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "system": _os_name(),
        "virtualisation": _virtualisation(),
        "cache_file_system": f"{fstype} on {device}",
        "guest_halt_poll_ns_as_found": halt_poll_ns(),
        "python": platform.python_version(),
        "cachefs": importlib.metadata.version("cachefs"),
        "commit": _commit(),
        "pyfuse3": importlib.metadata.version("pyfuse3"),
        "libfuse": _libfuse(),
        "obstore": importlib.metadata.version("obstore"),
        "seaweedfs": _seaweedfs(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def can_set_halt_poll() -> bool:
    return halt_poll_ns() is not None and os.access(_HALT_POLL, os.W_OK)


def set_halt_poll(poll_ns: int | None) -> None:
    """Set the halt polling to `poll_ns` if possible; None changes nothing."""
    if poll_ns is not None and can_set_halt_poll():
        _HALT_POLL.write_text(f"{poll_ns}\n")


@contextmanager
def halt_polling(poll_ns: int | None) -> Iterator[None]:
    """Let idle virtual CPUs poll for `poll_ns` within the context; None changes nothing."""
    before = halt_poll_ns()
    try:
        set_halt_poll(poll_ns)
        yield
    finally:
        set_halt_poll(before)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown"


def _virtualisation() -> str:
    if shutil.which("systemd-detect-virt"):
        machine = _output("systemd-detect-virt", "--vm") or "none"
        container = _output("systemd-detect-virt", "--container")
        return machine if container in ("", "none") else f"{machine}, {container}"
    if "hypervisor" not in Path("/proc/cpuinfo").read_text():
        return "none"
    try:
        product = Path("/sys/class/dmi/id/product_name").read_text().strip()
    except OSError:
        product = ""
    return product or "virtual machine"


def _libfuse() -> str:
    """Return the version of the libfuse that pyfuse3 loads."""
    try:
        version = ctypes.CDLL("libfuse3.so.3").fuse_pkgversion
        version.restype = ctypes.c_char_p
        return str(version().decode())
    except (OSError, AttributeError):
        return "unknown"


def _seaweedfs() -> str:
    weed = weed_binary()
    words = _output(str(weed), "version").split() if weed else []
    return words[2] if len(words) > 2 else "unknown"


def _commit() -> str:
    git = ("git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT))
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
