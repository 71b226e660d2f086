"""A real daemon behind a real kernel mount."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cachefs.cli.mounts.all_mounts import SERVING
from cachefs.control.client import ask
from cachefs.errors import CachefsError
from cachefs.mounts import find_entry, socket_path
from tests.mount.commands import server
from tests.servers.suspend import suspend

MIB = 1 << 20
CLI = (sys.executable, "-W", "error", "-c", "from cachefs.cli import main; main()")
_PLAIN_CLI = CLI
_FOR_INTERPRETERS = {"PYTHONPATH", "LD_PRELOAD"}
"""What only a new interpreter takes note of."""
DATA_PATH = os.environ.get("CACHEFS_TEST_DATA_PATH", "auto")
"""What tests mount with that don't say otherwise: the whole suite can be run on each."""
SHARED = os.environ.get("CACHEFS_TEST_SHARED")
"""The shared tier that all mounts use, such as 127.0.0.1:11211; none without it."""
LOG_TROUBLE = (" WARNING ", " ERROR ", " CRITICAL ", "Traceback")

PATIENCE_S = 180
"""How long to wait for what comes within a second on a quiet machine."""
STATUS_S = 20
"""How long to ask for a daemon's status."""
PATIENT = ("--read-timeout", "60s", "--request-timeout", "30s", "--shared-timeout", "30s")
"""For mounts whose requests are counted: on a busy machine none is sent again. Every mount of a
local directory has these options."""


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for what another process or the kernel will do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@contextlib.contextmanager
def unchangeable(directory: Path) -> Iterator[None]:
    """Let nobody make, remove or rename a file in a directory or below it, not even root."""
    places = [directory, *(place for place in directory.rglob("*") if place.is_dir())]
    subprocess.run(["chattr", "+i", *places], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *places], check=True)


@contextlib.contextmanager
def changeable(directory: Path) -> Iterator[None]:
    """Allow changes inside `unchangeable`."""
    subprocess.run(["chattr", "-i", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "+i", directory], check=True)


def crash(pid: int) -> None:
    """SIGKILL for the process that a mount belongs to and, if it is a supervisor, for its daemon,
    before that can do anything about it. Like the kernel's when memory is short."""
    suspend(pid)
    children = children_of(pid)
    for process in (*children, pid):
        os.kill(process, signal.SIGKILL)
    for child in children:
        eventually(lambda child=child: not is_running(child))  # type: ignore[misc]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """False also for a zombie: not every container has an init that reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Site:
    """A source (a directory, unless told otherwise), a mountpoint, a cache directory, a log."""

    def __init__(self, root: Path, source: str | None = None) -> None:
        self.files = root / "source"
        self.mountpoint = root / "mnt"
        self.cache = root / "cache"
        self.log = root / "log"
        self.files.mkdir()
        self.mountpoint.mkdir()
        self.source = source or f"file://{self.files}"
        self.environment: dict[str, str] = {}
        self.expected_trouble: tuple[str, ...] = ()
        """Parts of log lines that are meant to be there."""
        self.options: tuple[str, ...] = ()
        """What it is always mounted with."""

    def _run(self, *args: object) -> subprocess.CompletedProcess[str]:
        words = [str(arg) for arg in args]
        if CLI is _PLAIN_CLI and not _FOR_INTERPRETERS & self.environment.keys():
            return server().run(words, os.environ | self.environment, 2 * PATIENCE_S)
        return subprocess.run(
            [*CLI, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE_S,
            env=os.environ | self.environment,
        )

    def cli(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self._run(*args)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr + done.stdout
        return done

    def mount(self, *options: object, code: int = 0) -> str:
        """Returns what was said on stderr."""
        return self.cli(
            "mount",
            self.source,
            self.mountpoint,
            *("--cache-dir", self.cache, "--cache-size", "256MiB", "--free-space-ratio", "0"),
            *("--log-file", self.log, "--data-path", DATA_PATH),
            *(PATIENT if self.source.startswith("file://") else ()),
            *(("--shared", SHARED) if SHARED else ()),
            *self.options,
            *options,
            code=code,
        ).stderr

    def let_daemons_stand_still(self) -> None:
        """Before `mount`: a daemon that the test stops is not replaced for that."""
        self.customize(
            "from cachefs.supervisor import hang_detection as s\n"
            "s.STOPPED_LOOKS = s.STILL_LOOKS = 1 << 30\n"
        )

    def let_only_closes_send(self) -> None:
        """Before `mount`: no file is sent because nobody has changed it for a while. On a busy
        machine this while passes between any two steps of a test."""
        self.customize(
            "from cachefs.fuse.relay import _relay  # before libfuse\n"
            "from cachefs.writes import background\n"
            "background._QUIET_S = 1e9\n"
        )

    def customize(self, code: str) -> None:
        """Before `mount`: what daemons and supervisors run first."""
        directory = self.files.parent / "customized"
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(code)
        self.environment = self.environment | {"PYTHONPATH": str(directory)}

    def umount(self) -> None:
        done = self._run("umount", self.mountpoint)
        if "has not ended within" in done.stderr:  # a busy machine takes longer
            eventually(lambda: not self.is_running())
        else:
            assert done.returncode == 0, (done.stdout, done.stderr)

    def refused(self, *options: object, code: int = 1) -> str:
        """Mounting fails with one line that says so, and leaves nothing behind."""
        self.expected_trouble += (" cachefs.cli.mounting.background: ",)  # it logs why it ended
        said = self.mount(*options, code=code)
        assert said.startswith("cachefs: error: "), said
        assert said.count("\n") == 1, said
        return said

    def status(self) -> dict[str, Any]:
        """What `cachefs status --json` prints of this mount: asked for without the command, which
        takes longer than all else that tests do, and asks all mounts of the machine. Fails if no
        daemon answers for `STATUS_S`."""
        deadline = time.monotonic() + STATUS_S
        while True:
            try:
                return {"state": SERVING, **ask(socket_path(self.mountpoint))}
            except CachefsError as error:
                if time.monotonic() > deadline:
                    raise AssertionError("no daemon answers") from error
            time.sleep(0.02)

    def origin(self) -> dict[str, int]:
        """Requests sent to the origin since the daemon was started."""
        counters: dict[str, int] = self.status()["origin"]
        return counters

    def fetched(self) -> int:
        """How often blocks have come from elsewhere: GETs, and hits in a shared tier."""
        status = self.status()
        return int(status["origin"]["gets"]) + int(status.get("shared", {}).get("hits", 0))

    def wait_until_stored(self, blocks: int) -> None:
        """Until the tiers hold so many blocks: they are stored behind the readers' backs, and
        served from memory until then."""
        eventually(lambda: stored_blocks(self.status()) >= blocks)

    def read_requests(self) -> int:
        """READs that the kernel has sent, at the least."""
        reads = self.status()["reads"]
        return int(reads["hits"]) + int(reads["misses"])

    def pid(self) -> int:
        """Of the process that the mount belongs to: the daemon, or its supervisor."""
        entry = find_entry(self.mountpoint)
        assert entry is not None
        return entry.pid

    def is_running(self) -> bool:
        entry = find_entry(self.mountpoint)
        return entry is not None and entry.alive

    def daemon_pid(self) -> int:
        """Of the daemon, supervised or not."""
        pid: int = self.status()["pid"]
        return pid

    def signal(self, number: signal.Signals) -> None:
        """Send it, and wait until the daemon has ended."""
        os.kill(self.pid(), number)
        eventually(lambda: not self.is_running())

    def crash(self) -> None:
        """The end of all its processes. A dead mount is left."""
        crash(self.pid())
        eventually(lambda: not self.is_running())

    def is_mounted(self) -> bool:
        return f" {self.mountpoint} " in Path("/proc/self/mountinfo").read_text()

    def tear_down(self) -> None:
        """Whatever the test did: no mount and no daemon stay behind."""
        entry = find_entry(self.mountpoint)
        if self.is_mounted():
            subprocess.run(["fusermount3", "-uz", str(self.mountpoint)], check=False)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.is_running(), 30)
        if entry is not None and self.is_running():  # a mount namespace may still have the mount
            os.kill(entry.pid, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.is_running())
        if entry is not None and self.is_running():
            os.kill(entry.pid, signal.SIGKILL)
        text = self.log.read_text() if self.log.exists() else ""
        print(f"--- log of the daemon on {self.mountpoint}\n{text}---")  # shown on failure
        lines = [line for line in text.splitlines() if any(word in line for word in LOG_TROUBLE)]
        # /tmp may be in memory, and mounts of other users in other tests may have the usual port.
        # A test that gets an error sees it itself.
        general = ("is in memory: a reboot loses it", "metrics are on", " gave E")
        known = (*self.expected_trouble, *general)
        unexpected = [ln for ln in lines if not any(part in ln for part in known)]
        assert not unexpected, unexpected


def stored_blocks(status: dict[str, Any]) -> int:
    """How many blocks the tiers hold."""
    return sum(tier["cached_blocks"] for tier in status["tiers"])


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process is stopped, and goes on afterwards."""
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def drop_pages(path: Path) -> None:
    """Make the kernel forget what it has of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def kill_daemon(site: Site) -> None:
    """And wait for the next."""
    (daemon,) = children_of(site.pid())
    os.kill(daemon, signal.SIGKILL)
    logged = site.log.read_text().count(" serves on, after ")
    eventually(lambda: site.log.read_text().count(" serves on, after ") > logged)
