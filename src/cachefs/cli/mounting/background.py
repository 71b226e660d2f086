"""Start the daemon in the background: fork, wait until it is ready, report to the user.

The fork comes before any thread and before the heavy imports. The child leads its own session
and writes to the log file. Over a pipe it sends one JSON object, `{"ready": true, "warnings":
[TEXT, ...]}` or `{"error": TEXT, "code": EXIT_CODE}`. End of file without it means that the child
has died.
"""

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cachefs.cli.output.text import say
from cachefs.errors import CachefsError, MountError, UsageError
from cachefs.log import collected_warnings
from cachefs.mounts import FSTYPE, MountHealth, check_answers, find_mount, remove_leftovers, unmount
from cachefs.trusted_path import open_file

START_TIMEOUT_S = 90.0
"""The limit for the daemon's start; its own limits on the origin are far shorter."""

MANIFEST_TIMEOUT_S = 900.0
"""The limit for a start with a manifest. Reading one takes about 10 s per million files on an idle
machine."""

STOP_TIMEOUT_S = 25.0

_MOST_WARNINGS = 5

_logger = logging.getLogger(__name__)

OnReady = Callable[..., None]
"""Takes, optionally, the warnings that other processes have logged."""

Serve = Callable[[OnReady], None]
"""Blocks until the mount ends; calls its argument once the mount answers."""


def launch(
    serve: Serve, mountpoint: Path, log_file: Path, start_timeout_s: float | None = None
) -> None:
    """Start `serve` in a daemon and return when `mountpoint` answers.

    Raises the daemon's own error (`CachefsError` or `UsageError`), or `MountError` if the daemon
    dies, hangs, or the mount doesn't answer. If this function raises, it leaves no daemon and no
    mount.
    """
    receiver, sender = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _be_daemon(serve, sender, log_file)
    os.close(sender)
    try:
        with _interruptible():
            message = _await_message(receiver, start_timeout_s or START_TIMEOUT_S)
            if message is None:
                raise MountError(_obituary(pid, log_file))
            if "error" in message:
                kind = UsageError if message.get("code") == 2 else CachefsError
                raise kind(str(message["error"]))
            _verify(mountpoint, log_file)
            for warning in message["warnings"]:
                say(f"cachefs: warning: {warning}", err=True)
    except BaseException:
        _stop(pid, mountpoint)
        raise
    finally:
        os.close(receiver)


def _be_daemon(serve: Serve, sender: int, log_file: Path) -> NoReturn:
    """Run the child: detach, serve, send the result, exit. Never returns into the caller's
    stack."""
    code = 1
    try:
        _detach(log_file)
        with collected_warnings(_MOST_WARNINGS) as warnings:

            def tell(others: Sequence[str] = ()) -> None:
                _send(sender, {"ready": True, "warnings": [*warnings, *others][:_MOST_WARNINGS]})

            serve(tell)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except CachefsError as error:
        _logger.error("%s", error)
        code = 2 if isinstance(error, UsageError) else 1
        _send(sender, {"error": str(error), "code": code})
    except BaseException as error:
        _logger.exception("the daemon failed")
        text = f"internal error: {type(error).__name__}: {error}; see {log_file}"
        _send(sender, {"error": text, "code": 1})
    finally:
        logging.shutdown()
        os._exit(code)


def _detach(log_file: Path) -> None:
    os.setsid()
    os.chdir("/")
    output = open_file(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


def _send(sender: int, message: dict[str, Any]) -> None:
    """Send the only message. A second call finds the pipe closed, and the parent may have ended;
    both are ignored."""
    try:
        os.write(sender, json.dumps(message).encode())
        os.close(sender)
    except OSError:
        _logger.debug("nobody waits for %s any more", message)


def _await_message(receiver: int, timeout_s: float) -> dict[str, Any] | None:
    """Return the daemon's message, or None if it died without one.

    Raises `MountError` after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    text = b""
    while select.select([receiver], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(receiver, 65536)
        if not chunk:
            message: dict[str, Any] | None = json.loads(text) if text else None
            return message
        text += chunk
    raise MountError(f"the daemon did not come up within {timeout_s:.0f} s")


def _obituary(pid: int, log_file: Path) -> str:
    _, status = os.waitpid(pid, 0)
    how = (
        f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        if os.WIFSIGNALED(status)
        else "ended"
    )
    return f"the daemon {how} before the mount was up; see {log_file}"


def _verify(mountpoint: Path, log_file: Path) -> None:
    mount = find_mount(mountpoint)
    is_ours = mount is not None and mount.fstype == FSTYPE
    if not is_ours or check_answers(mountpoint) is not MountHealth.ALIVE:
        raise MountError(f"{mountpoint} was mounted but does not answer; see {log_file}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the wait as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _stop(pid: int, mountpoint: Path) -> None:
    """End the daemon with SIGTERM, after `STOP_TIMEOUT_S` with SIGKILL, and remove its mount if
    it left one."""
    if not _ended(pid, 0.0):
        os.kill(pid, signal.SIGTERM)
        if not _ended(pid, STOP_TIMEOUT_S):
            os.kill(pid, signal.SIGKILL)
            _ended(pid, STOP_TIMEOUT_S)
            mount = find_mount(mountpoint)
            if mount is not None and mount.fstype == FSTYPE:
                unmount(mountpoint, lazy=True)
    remove_leftovers(mountpoint)


def _ended(pid: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for the child. Return True once it has ended, also if an earlier
    call has already reaped it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
