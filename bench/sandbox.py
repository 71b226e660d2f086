"""Run work that starts servers and mounts, and leave nothing behind, however the work ends.

A child process does the work. The parent only waits, with all signals blocked, so that no signal
can interrupt it at any moment. It takes Ctrl-C and SIGTERM from a queue, ends the child, and cleans
up everything that it finds, without relying on records:

- every process that descends from it (it is a "subreaper": daemons that detach themselves become
  its children, not init's),
- every mount below its temporary directory, the directory, and what those processes left outside.

The child has its own session. The terminal's Ctrl-C therefore reaches only the parent, and the
server can still answer during the unmount.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bench import procfs

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_AWAITED = _ENDING | {signal.SIGCHLD}

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MNT_DETACH = 2
_KILL_AFTER_S = 8.0
_LAZY_AFTER_S = 3.0
_SERVERS = {"weed"}
"""The servers, which are killed after the mounts are gone. A normal stop takes half a minute, to
store data that is removed next."""

_libc = ctypes.CDLL(None, use_errno=True)


def run(
    name: str, work: Callable[[Path], int], undo: Callable[[], None] = lambda: None
) -> NoReturn:
    """Run `work(directory)` and exit with its result, 128 + N after signal N, 1 after an exception.

    `directory` is temporary, under $TMPDIR or /var/tmp (/tmp may be in memory). `undo` reverts
    changes that `work` may have made elsewhere. Call this first, before the process has threads.
    """
    directory = Path(os.environ.get("TMPDIR") or _default_base()) / (
        f"cachefs-{name}-{os.getpid()}-{secrets.token_hex(3)}"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the default would not be queued
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become_child(work, directory)
    code, interrupted = _wait(child)
    if interrupted:
        _say(f"\n{name}: interrupted; cleaning up")
    left = clean_up(directory)
    undo()
    for problem in left:
        _say(f"{name}: left behind: {problem}")
    # Don't return through Python's exit: a queued Ctrl-C must not garble the last line.
    sys.stdout.flush()
    os._exit(code or bool(left))


def _default_base() -> str:
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


def _become_child(work: Callable[[Path], int], directory: Path) -> NoReturn:
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        directory.mkdir(mode=0o700)
        code = work(directory)
    except (BrokenPipeError, SystemExit):
        pass  # from `make demo | head`; rich raises SystemExit for it
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> tuple[int, bool]:
    """Wait for the child. Return the exit code, and whether a signal ended the wait (the child may
    then still run)."""
    while True:
        number = signal.sigwait(_AWAITED)
        if number in _ENDING:
            return 128 + number, True
        for pid, status in _reap():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return (code if code >= 0 else 128 - code), False


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def clean_up(directory: Path) -> list[str]:
    """End all descendants of this process, unmount everything below `directory` and remove it.

    Returns what it could not clean up. It may be called again. Takes about 10 s at most.
    """
    _restore_terminal()
    sockets: set[Path] = set()
    _end_clients(directory, sockets)
    for _ in range(3):
        for pid in procfs.descendants(os.getpid()):
            sockets |= end_process(pid)
        _reap()
    for mount in procfs.mounts_below(directory):
        unmount(mount, lazily=True)
    _remove_outside(directory, sockets)
    if not procfs.mounts_below(directory):
        _remove_tree(directory)
    return _leftovers(directory)


def _end_clients(directory: Path, sockets: set[Path]) -> None:
    """End all processes except the servers, first with SIGTERM, on which a daemon unmounts."""
    began = time.monotonic()
    told: set[int] = set()
    while True:
        waited_s = time.monotonic() - began
        alive = [p for p in procfs.descendants(os.getpid()) if procfs.command(p) not in _SERVERS]
        mounts = procfs.mounts_below(directory)
        if not alive and not mounts:
            return
        for pid in alive:
            sockets.update(procfs.bound_sockets(pid))
            if waited_s > _KILL_AFTER_S or pid not in told:
                told.add(pid)
                _send(pid, signal.SIGKILL if waited_s > _KILL_AFTER_S else signal.SIGTERM)
        if waited_s > _LAZY_AFTER_S or not alive:
            for mount in mounts:
                unmount(mount, lazily=waited_s > _LAZY_AFTER_S)
        if waited_s > _KILL_AFTER_S + 3:
            return
        _reap()
        time.sleep(0.05)


def end_process(pid: int) -> set[Path]:
    """Kill a process of this sandbox and remove its listening socket files. Its parent, which may
    be this process, must reap it."""
    sockets = set(procfs.bound_sockets(pid))
    _send(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while procfs.is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    _unlink(sockets)
    return sockets


def unmount(mountpoint: Path, lazily: bool = False) -> None:
    """Unmount if possible. Ignores errors."""
    if os.geteuid() == 0:
        _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH if lazily else 0)
        return
    options = ["-u", "-q", *(["-z"] if lazily else [])]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["fusermount3", *options, str(mountpoint)], check=False, capture_output=True, timeout=5
        )


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _runtime_dirs() -> list[Path]:
    """Return the directories of the daemons' runtime files (cachefs.mounts)."""
    uid = os.geteuid()
    candidates = [Path("/run/cachefs"), Path(f"/tmp/cachefs-{uid}")]
    if xdg := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(xdg) / "cachefs")
    return [path for path in candidates if os.access(path, os.W_OK)]


def _remove_outside(directory: Path, sockets: set[Path]) -> None:
    """Remove socket files of ended processes, and the runtime files of killed daemons."""
    _unlink(sockets)
    for runtime in _runtime_dirs():
        for entry in runtime.glob("*.json"):
            with contextlib.suppress(OSError):
                if f'"{directory}/' in entry.read_text(errors="replace"):
                    _unlink({entry, entry.with_suffix(".sock")})


def _unlink(paths: set[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _remove_tree(directory: Path) -> None:
    for _ in range(3):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.2)


def _leftovers(directory: Path) -> list[str]:
    left = [f"mount {path}" for path in procfs.mounts_below(directory)]
    left += [f"process {p} ({procfs.command(p)})" for p in procfs.descendants(os.getpid())]
    if os.path.lexists(directory):
        left.append(str(directory))
    return left


def _restore_terminal() -> None:
    """Show the cursor again, because a progress bar may have hidden it."""
    with contextlib.suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
