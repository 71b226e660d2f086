"""The interface of every peer: mount, unmount, wipe the cache, and report the cost."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench import procfs, sandbox
from bench.case import Bench

_START_S = 30
_END_S = 20


@dataclass(frozen=True, slots=True)
class Cache:
    """The place and the size of a mount's block cache."""

    size_bytes: int = 8 << 30
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of all processes of a mount."""

    cpu_s: float
    rss_bytes: int
    cpu_s_of_threads: dict[int, float]
    """By the id of each living thread."""

    def busiest_since(self, earlier: "Usage") -> float:
        """Return the most CPU seconds that one thread has used since then."""
        return max(
            seconds - earlier.cpu_s_of_threads.get(thread, 0)
            for thread, seconds in self.cpu_s_of_threads.items()
        )


class Peer:
    """One way to read the data. The processes that start during its mount call belong to it."""

    kind: ClassVar[str]
    bucket: ClassVar[str | None] = None
    """The bucket from which it reads, for counting GETs."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Prefixes of figure keys that this peer can't have, with the reasons."""
    remarks: ClassVar[Mapping[str, str]] = {}
    """Prefixes of figure keys that mean something else for this peer, with footnotes."""

    def __init__(self, bench: Bench, options: Sequence[str] = (), name: str = "") -> None:
        """Every mount also gets `options`; `name` distinguishes two peers of a kind."""
        self.name = name or type(self).kind
        self.bench = bench
        self.options = list(options)
        self.base = bench.directory / f"peer-{self.name}"
        self._pids: set[int] = set()
        self.first_command_line = ""

    @classmethod
    def missing(cls) -> str | None:
        """Return why it can't run on this machine, and the fix; None if it can."""
        return None

    @property
    def path(self) -> Path:
        """The directory of the data sets."""
        return self.base / "mnt"

    @property
    def command_line(self) -> str:
        """The command line of the last mount, as a user would type it."""
        return ""

    def version(self) -> str:
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare the peer. Called once, before the first mount."""
        self.path.mkdir(parents=True, exist_ok=True)

    def fill(self, prefix: str) -> None:
        """Make a data set readable that is already below `local` and in the bucket."""

    def mount(self, cache: Cache | None = None) -> None:
        """Mount, keeping the content of the cache. Raises `RuntimeError` and `OSError`."""
        before = set(_all_processes())
        self._mount(cache or Cache())
        self._pids = set(_all_processes()) - before
        self.first_command_line = self.first_command_line or self.command_line

    def unmount(self) -> None:
        """Unmount and wait for the end of its processes. Does nothing if it is not mounted."""
        self._unmount()
        self._pids = set()

    def abandon(self) -> None:
        """Kill its processes and unmount lazily, whatever state they are in."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for mountpoint in procfs.mounts_below(self.base):
            sandbox.unmount(mountpoint, lazily=True)
        self._pids = set()

    def wipe(self) -> None:
        """Delete the cached data. Must not be called while mounted."""
        for directory in (self.cache_dir(in_memory=False), self.cache_dir(in_memory=True)):
            shutil.rmtree(directory, ignore_errors=True)

    @contextlib.contextmanager
    def fresh(self, cache: Cache | None = None) -> Iterator[Path]:
        """Mount with an empty cache, and unmount at the end."""
        self.wipe()
        self.mount(cache)
        yield self.path  # after a failure `abandon` unmounts
        self.unmount()

    def warm_up(self, prefix: str) -> None:
        """Load a data set into the cache with the peer's own command."""
        raise NotImplementedError

    def hits(self) -> tuple[int, int] | None:
        """Return how many bytes came from the cache and how many did not, so far, by its own
        count. None if it sends one GET per uncached file, so that GETs give the count."""
        return None

    def usage(self) -> Usage:
        """Return CPU and memory of the mount's processes until now."""
        pids = self._processes()
        memory = 0
        threads: dict[int, float] = {}
        for pid in pids:
            threads |= procfs.cpu_s_of_threads(pid)
            with contextlib.suppress(OSError):
                memory += procfs.memory_bytes(pid).get("VmRSS", 0)
        return Usage(sum(map(procfs.cpu_s, pids)), memory, threads)

    def cache_dir(self, in_memory: bool) -> Path:
        return (self.bench.directory / "memory" if in_memory else self.base) / f"cache-{self.name}"

    def _mount(self, cache: Cache) -> None:
        raise NotImplementedError

    def _unmount(self) -> None:
        raise NotImplementedError

    def _processes(self) -> list[int]:
        alive = [pid for pid in self._pids if procfs.is_alive(pid)]
        return sorted({below for pid in alive for below in (pid, *procfs.descendants(pid))})


class ForegroundPeer(Peer):
    """A peer with a mount command that serves until it receives a signal."""

    _process: subprocess.Popen[bytes] | None = None
    _command: Sequence[str] = ()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run the mount command, and return when the mount is ready."""
        self._command = command
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not self.path.is_mount():
            if time.monotonic() > deadline or self._process.poll() is not None:
                log_end = (self.base / "log").read_text(errors="replace")[-300:].strip()
                raise RuntimeError(f"{self.name} did not mount: {log_end}")
            time.sleep(0.05)

    def abandon(self) -> None:
        super().abandon()
        self._reap()

    def _unmount(self) -> None:
        if self._process is None:
            return
        sandbox.unmount(self.path)
        self._reap()
        sandbox.unmount(self.path, lazily=True)

    def _reap(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _all_processes() -> list[int]:
    """Return all descendants of the sandbox, which adopts daemons."""
    return procfs.descendants(os.getppid())
