"""The supervisor owns the mount and the relay, and keeps a daemon running.

It has one thread with one loop; the relay's threads are in C. It must import nothing large, and
nothing after its start, because an upgrade may have replaced the files of this version.
"""

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from cachefs.errors import MountError, reason_of
from cachefs.mounts import prepare_mountpoint
from cachefs.supervisor.channel import PROTOCOL, Message
from cachefs.supervisor.child import Child, StartFailure
from cachefs.supervisor.kept_mount import KeptMount
from cachefs.supervisor.link import Start
from cachefs.supervisor.open_files import raise_file_limit
from cachefs.supervisor.relayed_mount import RelayedMount
from cachefs.supervisor.restarts import (
    MOST_FAILURES,
    RecentFailures,
    pause_after_crash_s,
    pause_after_end_s,
    pause_after_failure_s,
)
from cachefs.supervisor.signals import read_signals, signals_on_a_socket
from cachefs.supervisor.task import Task
from cachefs.systemd_notify import NOBODY, ServiceManager

STOP_S = 25.0
"""Time for a daemon to store fetched blocks before SIGKILL."""
DRAIN_S = 5.0
"""Time for a daemon to answer all requests, if the kernel can't send them to the next one."""
_DRAIN_LOOK_S = 0.02
_GAP_S = 2.0
"""If this process wakes later by this, the machine or its container did not run."""
_ABORT_S = 5.0
"""Time for a daemon that hangs to log its stacks before SIGKILL."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_logger = logging.getLogger(__name__)

OnReady = Callable[[Sequence[str]], None]
"""Called with the warnings that the daemon has logged so far."""


class Supervisor:
    """The owner of one mount, from before its first daemon to after its last.

    It has at most one daemon, and during an upgrade a successor. All methods run in one thread.
    """

    def __init__(
        self,
        task: Task,
        on_ready: OnReady,
        manager: ServiceManager = NOBODY,
        on_upgrade_failed: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`on_ready` is called once, when the first daemon is ready. `manager` gets
        readiness, signs of life, and the end. `on_upgrade_failed` gets the reason."""
        self._task = task
        self._on_ready = on_ready
        self._on_upgrade_failed = on_upgrade_failed
        self._manager = manager
        self._selector = selectors.DefaultSelector()
        self._mount = RelayedMount(task.mountpoint, self._watch_mount)
        self._kept = KeptMount(
            task.keeper,
            task.view,
            task.mountpoint,
            self._mount,
            self._watch,
            self._selector.unregister,
        )
        self._daemon: Child | None = None
        self._successor: Child | None = None
        """The next daemon of an upgrade. It loads its code, then waits for the daemon's end."""
        self._was_ready = False
        self._is_ending = False
        self._is_leaving = False
        """The mount stays with the keeper. `_is_ending` is then True, too."""
        self._drained_by_s: float | None = None
        """Until then the daemon may answer requests before it is ended."""
        self._failure: BaseException | None = None
        self._start_at_s: float | None = None
        self._down_since_s = 0.0
        self._failures, self._crashes = RecentFailures(), RecentFailures()
        self._next_start = Start(task.config, os.getpid())
        """The parameters of the next daemon."""
        self._watchdog_at_s = 0.0
        self._terminal = next((fd for fd in (0, 2) if os.isatty(fd)), None)

    def run(self) -> None:
        """Serve until the mount ends, or until SIGTERM or SIGINT. SIGHUP starts an upgrade.

        SIGTERM leaves a mount to the keeper, if there is one.

        Raises `CachefsError` if the first daemon could not begin or the mount was given up,
        `RelayUnusableError` if the mount must be served without a relay, and `KeyboardInterrupt`
        if SIGINT came before the mount was up.
        """
        raise_file_limit()  # the relay, too, has the slabs open
        if self._kept.take():
            self._note_end("was in another container or service, which has ended")
            self._note_restart()
        else:
            prepare_mountpoint(self._task.mountpoint, self._task.nonempty)
        with signals_on_a_socket(_SIGNALS) as signals:
            self._watch(signals.fileno(), partial(self._on_signals, signals))
            try:
                self._start_daemon()
                while not self._is_over():
                    self._turn()
            finally:
                self._leave_nothing()
        if self._failure is not None:
            raise self._failure

    # -- the loop --------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._is_ending and self._daemon is None and self._successor is None

    def _turn(self) -> None:
        pause_s, began_s = self._pause_s(), time.monotonic()
        ready = self._selector.select(pause_s)
        gap_s = time.monotonic() - began_s - (pause_s or 0.0)
        if pause_s is not None and gap_s >= _GAP_S:  # paused, moved, or its lid was closed
            for child in self._children():
                child.excuse(gap_s)
        for key, _ in ready:
            # An earlier callback may have unregistered it, and registered another file that has the
            # same number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._look_at_the_clock()

    def _children(self) -> list[Child]:
        return [child for child in (self._daemon, self._successor) if child is not None]

    def _pause_s(self) -> float | None:
        """Return the seconds until the next deadline; None if there is none."""
        times = [] if self._start_at_s is None else [self._start_at_s]
        for child in self._children():
            if child.next_deadline_s is not None:
                times.append(child.next_deadline_s)
        if self._manager.sign_interval_s is not None:
            times.append(self._watchdog_at_s)
        if self._kept.next_try_s is not None:
            times.append(self._kept.next_try_s)
        if self._drained_by_s is not None:
            times.append(time.monotonic() + _DRAIN_LOOK_S)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _look_at_the_clock(self) -> None:
        """Do everything whose deadline has passed."""
        now_s = time.monotonic()
        interval_s = self._manager.sign_interval_s
        if interval_s is not None and now_s >= self._watchdog_at_s:
            self._manager.alive()
            self._watchdog_at_s = now_s + interval_s
        if self._start_at_s is not None and now_s >= self._start_at_s:
            self._start_at_s = None
            self._start_daemon()
        self._kept.look_at_the_clock(now_s)
        until_s = self._drained_by_s
        if until_s is not None and (now_s >= until_s or self._mount.unanswered() == 0):
            self._let_daemons_end()
        for child in self._children():
            if child.ends_by_s is not None:
                if now_s >= child.ends_by_s:
                    child.kill()
                    child.ends_by_s = now_s + STOP_S
            elif child.owes_signs_of_life:
                self._look_after(child, now_s)

    def _look_after(self, child: Child, now_s: float) -> None:
        """End a daemon that hangs, but not one that only waits for the processor."""
        found = child.hangs() if now_s >= child.look_at_s else None
        if found == "stopped":
            _logger.error("the daemon (process %d) was stopped; it is killed", child.pid)
            child.end(0.0)  # a stopped process handles no SIGABRT
        elif found is not None or now_s >= child.silent_by_s:
            _logger.error(
                "the daemon (process %d) has sent no heartbeat for %.0f s; it is ended",
                child.pid,
                now_s - child.heard_s,
            )
            child.abort(_ABORT_S)

    # -- signals ---------------------------------------------------------------------------------

    def _on_signals(self, reader: socket.socket) -> None:
        for number in read_signals(reader):
            self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        is_hung_up = self._terminal is not None and not os.isatty(self._terminal)
        if number == signal.SIGHUP and is_hung_up:
            number = signal.SIGTERM  # the terminal is gone; this is no request for an upgrade
        if number == signal.SIGHUP:
            self._upgrade()
        elif number == signal.SIGTERM and self._kept.is_kept:
            _logger.info("SIGTERM: leaving the mount to the keeper")
            self._leave()
        elif number in {signal.SIGTERM, signal.SIGINT}:
            _logger.info("%s: unmounting", number.name)
            if number == signal.SIGINT and not self._mount.is_made and not self._is_ending:
                self._failure = KeyboardInterrupt()
            self._end()

    # -- daemons ---------------------------------------------------------------------------------

    def _spawn(self) -> Child:
        """Start a daemon process, and watch its channel and its end. Raises `OSError`."""
        child = Child(self._task.command)
        self._watch(child.channel.fileno(), partial(self._receive, child))
        self._watch(child.pidfd, partial(self._bury, child))
        return child

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _start_daemon(self) -> None:
        try:
            self._daemon = self._spawn()
        except OSError as error:
            self._note_failure(f"it could not be started: {reason_of(error)}")

    def _receive(self, child: Child) -> None:
        """Handle all messages that a daemon has sent."""
        while True:
            try:
                received = child.channel.receive()
            except BlockingIOError:
                return
            if received is None:
                self._selector.unregister(child.channel.fileno())
                return
            child.heard_s = time.monotonic()
            message, fds = received
            try:
                self._understand(child, message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _understand(self, child: Child, message: Message, fds: list[int]) -> None:
        """Handle one message. Descriptors that it keeps are removed from `fds`."""
        match message:
            case {"hello": protocol, "version": version}:
                self._greet(child, protocol, str(version))
            case {"mount": _} if self._is_ending:  # it would not be unmounted again
                child.channel.send({"error": "the mount ends"})
            case {"mount": {"source": source, "allow_other": allow_other} as wanted}:
                writable = bool(wanted.get("writable"))
                passthrough = bool(wanted.get("passthrough"))
                self._mount.give_to(child, str(source), bool(allow_other), writable, passthrough)
            case {"drop_files": _}:
                self._mount.drop_files()
                child.channel.send({"dropped": True})
            case {"file": number, "waits": waits} if fds:
                self._mount.set_file(number, fds.pop(), waits)
            case {"close_file": number}:
                self._mount.close_file(number)
            case {"changes": dict(changes)}:
                self._next_start = replace(self._next_start, changes=changes)
            case {"ready": _}:
                self._note_ready(child, message.get("warnings", []))
            case {"error": text, "code": code}:
                child.failure = StartFailure(str(text), code)
            case {"fall_back": reason}:
                child.fall_back = str(reason)

    def _greet(self, child: Child, protocol: object, version: str) -> None:
        """Handle a hello: tell the daemon to start, or end the daemon before its successor."""
        if protocol != PROTOCOL:
            text = (
                f"cachefs {version} can't take over a mount of this version; unmount and mount "
                "again"
            )
            child.failure = StartFailure(text, 1)
            child.end(0.0)
            return
        child.version = version
        if child is self._daemon:
            self._tell_to_start(child)
        elif self._daemon is not None and not self._is_ending:
            _logger.info("process %d (cachefs %s) takes over", child.pid, version)
            self._note_end("was replaced by cachefs upgrade")
            self._down_since_s = time.monotonic()
            self._mount.detach()
            self._daemon.end(STOP_S)

    def _tell_to_start(self, child: Child) -> None:
        """Send the start message with the table."""
        start = replace(self._next_start, mounted=self._mount.name, kept=self._kept.is_connected)
        child.start(asdict(start), self._mount.table_fd)

    def _note_ready(self, child: Child, warnings: Sequence[str]) -> None:
        """Handle a daemon's first answer to the kernel."""
        child.is_ready = True
        child.ready_s = time.monotonic()
        if self._was_ready:
            paused_s = time.monotonic() - self._down_since_s
            _logger.info("process %d serves on, after %.2f s", child.pid, paused_s)
            return
        self._was_ready = True
        self._kept.begin()
        self._manager.ready(self._task.status)
        self._on_ready(warnings)

    def _bury(self, child: Child) -> None:
        """Handle a daemon's end: start another one, promote the successor, or give up."""
        self._selector.unregister(child.pidfd)
        self._hear_the_rest(child)
        how = child.reap()
        was_suspect = self._next_start.suspect
        self._next_start = replace(self._next_start, suspect=child.has_crashed)
        if child is self._successor:
            self._successor = None
            if not self._is_ending:
                self._note_failed_upgrade(child.failure.reason if child.failure else f"it {how}")
            return
        self._daemon = None
        if self._is_ending:
            return
        self._mount.detach()
        if self._successor is not None:
            self._promote()
        elif not self._was_ready and child.has_crashed and not was_suspect:
            _logger.error("the daemon %s; it is tried once more, with its files checked", how)
            self._start_daemon()
        elif not (self._was_ready or self._kept.was_taken):
            self._failure = child.start_error(how, self._task.log_name)
            self._end()
        else:
            self._replace(child, how)

    def _hear_the_rest(self, child: Child) -> None:
        """Handle the messages that an ended daemon has left in its channel."""
        if child.channel.fileno() in self._selector.get_map():
            self._receive(child)
        if child.channel.fileno() in self._selector.get_map():
            self._selector.unregister(child.channel.fileno())

    def _promote(self) -> None:
        """Make the successor the daemon."""
        self._daemon, self._successor = self._successor, None
        assert self._daemon is not None
        self._note_restart()
        if self._daemon.version is not None:
            self._tell_to_start(self._daemon)

    def _note_end(self, how: str) -> None:
        self._next_start = replace(self._next_start, last_end=how)

    def _note_restart(self) -> None:
        count = self._next_start.restarts + 1
        self._next_start = replace(self._next_start, restarts=count, restarted_at=time.time())

    def _replace(self, child: Child, how: str) -> None:
        """Schedule the next daemon after one that ended by itself and was not the first."""
        if child.failure is not None:
            how = f"could not begin: {child.failure.reason}"
        self._note_end(how)
        now_s = time.monotonic()
        if child.is_ready:
            self._down_since_s = now_s
        self._note_restart()
        if not child.is_ready:
            self._note_failure(f"it {how}")
            return
        _logger.warning(
            "the daemon (process %d) %s; what is cached is served on, and another is started",
            child.pid,
            how,
        )
        if child.has_crashed:
            self._note_crash(how)
            return
        self._start_at_s = now_s + pause_after_end_s(now_s - child.ready_s)

    def _note_crash(self, how: str) -> None:
        """Schedule the next daemon after a crash of a ready one.

        The cause may crash every daemon. So each pause is longer, and after `MOST_FAILURES` crashes
        within `FAILURES_WITHIN_S` the mount is given up.
        """
        count = self._crashes.add()
        if count == MOST_FAILURES:
            self._give_up(
                f"{count} daemons have crashed within a minute, the last one {how}; see "
                f"{self._task.log_name}"
            )
        else:
            self._start_at_s = time.monotonic() + pause_after_crash_s(count)

    def _note_failure(self, what: str) -> None:
        """Schedule the next try after a daemon that could not begin, or give the mount up."""
        count = self._failures.add()
        if count == MOST_FAILURES or not (self._was_ready or self._kept.was_taken):
            self._give_up(
                f"no daemon could be started in {count} attempts, the last one: {what}; mend that "
                "and mount again"
            )
            return
        pause_s = pause_after_failure_s(count)
        _logger.error("no daemon could be started: %s; the next try is in %.1f s", what, pause_s)
        self._start_at_s = time.monotonic() + pause_s

    def _give_up(self, why: str) -> None:
        self._failure = MountError(f"{self._task.mountpoint} is given up: {why}")
        if self._kept.is_kept and not self._was_ready:
            self._leave()  # what is wrong may be mended before the keeper's patience ends
        else:
            self._end()

    def _upgrade(self) -> None:
        """Start a successor, which replaces the daemon once its code is loaded."""
        daemon = self._daemon
        if daemon is None or not daemon.is_ready or self._successor or self._is_ending:
            _logger.info("SIGHUP is ignored: another daemon starts already, or the mount ends")
            return
        try:
            self._successor = self._spawn()
        except OSError as error:
            self._note_failed_upgrade(f"it could not be started: {reason_of(error)}")
            return
        _logger.info("SIGHUP: process %d is to replace %d", self._successor.pid, daemon.pid)

    def _note_failed_upgrade(self, why: str) -> None:
        _logger.error("the new daemon can't take over, the present one stays: %s", why)
        self._on_upgrade_failed(why)

    # -- the mount -------------------------------------------------------------------------------

    def _watch_mount(self, ended_fd: int) -> None:
        self._watch(ended_fd, partial(self._on_mount_ended, ended_fd))

    def _on_mount_ended(self, ended_fd: int) -> None:
        self._selector.unregister(ended_fd)
        if self._is_ending:
            return
        if self._mount.is_there():
            self._failure = MountError(
                f"{self._task.mountpoint}: the connection to the kernel was broken off; mount again"
            )
        self._end()

    def _end(self) -> None:
        """Unmount, and end all daemons. A second call makes their SIGKILL due at once."""
        if not self._is_ending:
            self._is_ending = True
            self._start_at_s = None
            self._manager.stopping()
            self._mount.take_away()
            self._kept.forget()
        for child in self._children():
            child.channel.send({"ended": True})
            child.end(STOP_S)

    def _leave(self) -> None:
        """End all daemons, and then leave the mount to the keeper (`_leave_nothing`).

        Until they have ended, the relay serves cached blocks, and other requests wait in the
        kernel, which sends them again. If it can't, all new requests wait, and the daemon first
        answers the others. A second call ends that wait, and a third makes SIGKILL due at once.
        """
        if not self._is_ending:
            self._is_ending = self._is_leaving = True
            self._start_at_s = None
            self._manager.stopping()
            if not self._mount.can_resend:
                self._mount.stop_reading()
                self._drained_by_s = time.monotonic() + DRAIN_S
                return
        self._let_daemons_end()

    def _let_daemons_end(self) -> None:
        self._drained_by_s = None
        self._mount.detach()
        for child in self._children():
            child.end(STOP_S)

    def _leave_nothing(self) -> None:
        """Unmount, kill all daemons, and free everything, whatever has happened before."""
        if not self._is_ending:
            self._end()
        for child in self._children():
            child.kill()
            child.reap()
        if self._is_leaving and not self._kept.leave():
            self._mount.take_away()
        self._selector.close()
        os.close(self._mount.table_fd)
