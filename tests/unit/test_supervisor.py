"""The supervisor with daemons that are a few lines of Python; nothing is mounted."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cachefs.errors import CachefsError, MountError, RelayUnusableError, UsageError
from cachefs.fuse import relay
from cachefs.supervisor import child, restarts, supervisor
from cachefs.supervisor.supervisor import Supervisor
from cachefs.supervisor.task import Task

pytestmark = pytest.mark.skipif(relay.why_not() is not None, reason=f"no relay: {relay.why_not()}")

PREAMBLE = """
import os, signal, socket, sys, time
from pathlib import Path
from cachefs.supervisor.channel import PROTOCOL, Channel
count_file = Path(sys.argv[1])
count = len(count_file.read_text()) + 1
count_file.write_text("x" * count)
upgrade_failed = count_file.with_name("failed")
channel = Channel(socket.socket(fileno=int(sys.argv[2])))
hello = lambda: (channel.send({"hello": PROTOCOL, "version": f"v{count}"}), channel.receive())[1]
ready = lambda *warnings: channel.send({"ready": True, "warnings": list(warnings), "new": 1})
def end(): os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)
"""


class Stage:
    """Runs a supervisor in this process until one of its daemons, or the test, ends it."""

    def __init__(self, directory: Path) -> None:
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.count = directory / "count"
        self.count.write_text("")
        self.ready: list[list[str]] = []
        self.failed_upgrades: list[str] = []

    def run(self, body: str) -> None:
        command = [sys.executable, "-c", PREAMBLE + body, str(self.count)]
        task = Task(self.mountpoint, False, "{}", command, "status", "the log")

        def on_ready(warnings: Sequence[str]) -> None:
            self.ready.append(list(warnings))

        def on_upgrade_failed(why: str) -> None:
            self.failed_upgrades.append(why)
            self.count.with_name("failed").touch()

        Supervisor(task, on_ready, on_upgrade_failed=on_upgrade_failed).run()

    @property
    def daemons(self) -> int:
        return len(self.count.read_text())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_daemon_that_cannot_be_started_is_named(stage: Stage) -> None:
    task = Task(stage.mountpoint, False, "{}", ["/no/such/python"], "status", "the log")
    with pytest.raises(MountError, match="started: /no/such/python: No such file or directory"):
        Supervisor(task, lambda warnings: None).run()


def test_an_event_of_a_closed_file_is_not_one_of_the_next_file(stage: Stage) -> None:
    """The next file has the number of the closed one."""
    supervisor = Supervisor(Task(stage.mountpoint, False, "{}", [], "", ""), lambda warnings: None)
    numbers = []
    called = []
    with contextlib.ExitStack() as stack:

        def watch(callback: Callable[[], None]) -> socket.socket:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            numbers.append(ours.fileno())
            supervisor._watch(ours.fileno(), callback)
            theirs.send(b"x")
            return ours

        def replace() -> None:
            called.append("first")
            supervisor._selector.unregister(first.fileno())
            supervisor._selector.unregister(second.fileno())
            second.close()
            watch(lambda: called.append("third"))

        first = watch(replace)
        second = watch(lambda: called.append("second"))
        supervisor._turn()
        assert numbers[1] == numbers[2]
        assert called == ["first"]
        supervisor._turn()
        assert called == ["first", "third"]
        supervisor._leave_nothing()


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("hello(); channel.send({'error': 'no room', 'code': 1})", CachefsError, "no room"),
        ("hello(); channel.send({'error': 'bad', 'code': 2})", UsageError, "bad"),
        ("hello(); channel.send({'fall_back': 'too old'})", RelayUnusableError, "too old"),
        ("pass", MountError, "the daemon ended before the mount was up; see the log"),
        ("sys.exit(3)", MountError, "the daemon ended with code 3 before the mount was up"),
        (
            "hello(); os.kill(os.getpid(), signal.SIGKILL)",
            MountError,
            "the daemon was killed by SIGKILL before the mount was up; see the log",
        ),
        (
            "channel.send({'hello': 0, 'version': '9'}); time.sleep(60)",
            CachefsError,
            "cachefs 9 can't take over a mount of this version",
        ),
    ],
)
def test_what_the_first_daemon_fails_with(
    stage: Stage, body: str, kind: type[CachefsError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        stage.run(body)
    assert stage.daemons == 1
    assert stage.ready == []


def test_a_daemon_is_told_what_it_needs_and_its_warnings_are_passed_on(stage: Stage) -> None:
    stage.run(
        "message, (table,) = hello(); start = message['start']\n"
        "ready(start['config'], str(start['supervisor_pid']), str(start['restarts'])); end()"
    )
    assert stage.ready == [["{}", str(os.getpid()), "0"]]
    assert stage.daemons == 1


def test_ctrl_c_before_it_is_up_is_an_interruption(stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt):
        stage.run("hello(); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")


@pytest.mark.expect_log("the daemon .* was killed by SIGSEGV; what is cached is served on")
def test_another_daemon_takes_the_place_of_one_that_died(stage: Stage) -> None:
    stage.run(
        "message, _ = hello(); ready(); time.sleep(0.3)\n"
        "if count == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "start = message['start']\n"
        "assert (start['restarts'], start['last_end']) == (1, 'was killed by SIGSEGV')\n"
        "end()"
    )
    assert stage.daemons == 2
    assert len(stage.ready) == 1


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.01)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.expect_log("the daemon .* ended; what is cached is served on")
@pytest.mark.expect_log("no daemon could be started: it could not begin: disk gone")
def test_a_daemon_that_can_not_begin_again_gives_the_mount_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FAILURES_WITHIN_S", 600.0)
    with pytest.raises(MountError, match=r"given up: no daemon could .* 5 attempts.* disk gone"):
        stage.run(
            "hello()\n"
            "if count == 1: ready(); time.sleep(0.3)\n"
            "else: channel.send({'error': 'disk gone', 'code': 1})"
        )
    assert stage.daemons == 6


@pytest.mark.long
@pytest.mark.expect_log("has sent no heartbeat for 4 s; it is ended")
@pytest.mark.expect_log("was killed by SIGABRT; what is cached is served on")
def test_a_daemon_that_hangs_is_aborted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SILENCE_LIMIT_S", 4.0)
    stage.run(
        "hello(); ready()\n"
        "if count == 1: time.sleep(60)\n"
        "for _ in range(50 if count < 4 else 0): channel.send({'alive': True}); time.sleep(0.1)\n"
        "end()"
    )
    # A busy machine may keep one from its signs of life for 4 s, but not one after the other.
    assert 2 <= stage.daemons < 4


def test_an_upgrade_waits_until_the_next_daemon_is_loaded(stage: Stage) -> None:
    stage.run(
        "if count == 2: time.sleep(0.5)\n"
        "message, _ = hello(); ready()\n"
        "if count == 2:\n"
        "    assert message['start']['last_end'] == 'was replaced by cachefs upgrade'\n"
        "    end()\n"
        "os.kill(os.getppid(), signal.SIGHUP); time.sleep(60)"
    )
    assert stage.daemons == 2
    assert stage.failed_upgrades == []


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("raise SystemExit(7)", "it ended with code 7"),
        ("channel.send({'hello': 0, 'version': '9'}); time.sleep(60)", "unmount and mount again"),
    ],
)
@pytest.mark.expect_log("the new daemon can't take over, the present one stays: ")
def test_an_upgrade_that_fails_leaves_the_daemon(stage: Stage, second: str, why: str) -> None:
    stage.run(
        f"if count == 2: {second}\n"
        "hello(); ready(); os.kill(os.getppid(), signal.SIGHUP)\n"
        "while not upgrade_failed.exists(): time.sleep(0.01)\n"
        "end()"
    )
    assert stage.daemons == 2
    assert len(stage.failed_upgrades) == 1
    assert why in stage.failed_upgrades[0]


def test_a_daemon_that_does_not_end_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 0.5)
    stage.run("signal.signal(signal.SIGTERM, signal.SIG_IGN); hello(); ready(); end()")
    assert stage.daemons == 1


def test_an_upgrade_while_another_daemon_begins_anyhow_is_none(stage: Stage) -> None:
    stage.run(
        "hello(); os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3); ready()\n"
        "if count == 2: end()\n"
        "for _ in range(3): os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.2)\n"
        "time.sleep(60)"
    )
    assert stage.daemons == 2
    assert stage.failed_upgrades == []


def test_signal_handlers_are_put_back(stage: Stage) -> None:
    def handler(number: int, frame: object) -> None: ...

    before: Callable[..., object] = signal.signal(signal.SIGHUP, handler)  # type: ignore[assignment]
    try:
        stage.run("hello(); ready(); end()")
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_whoever_asks_for_the_mount_when_it_ends_gets_none(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be left behind, with nobody who serves it."""
    mounted: list[str] = []
    monkeypatch.setattr(
        supervisor.RelayedMount, "give_to", lambda self, child, source, other: mounted.append("x")
    )
    answer = stage.count.with_name("answer")
    stage.run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); hello(); ready()\n"
        "os.kill(os.getppid(), signal.SIGTERM); message, _ = channel.receive()\n"
        "assert message == {'ended': True}\n"
        "channel.send({'mount': {'source': 's', 'allow_other': False}})\n"
        f"Path({str(answer)!r}).write_text(channel.receive()[0]['error'])\n"
    )
    assert mounted == []
    assert answer.read_text() == "the mount ends"


@pytest.mark.expect_log("the daemon .* was killed by SIG(BUS|KILL)")
def test_after_a_crash_the_next_daemon_is_told_to_look_first(stage: Stage) -> None:
    stage.run(
        "message, _ = hello(); suspect = message['start']['suspect']\n"
        "ready(); time.sleep(0.3)\n"
        "if count == 1:\n"
        "    assert not suspect\n"
        "    os.kill(os.getpid(), signal.SIGBUS)\n"
        "if count == 2:\n"
        "    assert suspect\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "assert count == 3 and not suspect, 'somebody else has killed it'\n"
        "end()"
    )
    assert stage.daemons == 3


@pytest.mark.expect_log("tried once more, with its files checked")
def test_the_first_daemon_is_tried_again_after_a_crash(stage: Stage) -> None:
    stage.run(
        "message, _ = hello()\n"
        "if count == 1: os.kill(os.getpid(), signal.SIGBUS)\n"
        "assert message['start']['suspect']\n"
        "ready(); end()"
    )
    assert (stage.daemons, len(stage.ready)) == (2, 1)


@pytest.mark.expect_log("tried once more, with its files checked")
def test_a_first_daemon_that_crashes_twice_fails(stage: Stage) -> None:
    with pytest.raises(MountError, match="was killed by SIGBUS before the mount was up"):
        stage.run("hello(); os.kill(os.getpid(), signal.SIGBUS)")
    assert stage.daemons == 2


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.expect_log("the daemon .* was killed by SIGSEGV")
def test_daemons_that_crash_as_soon_as_they_serve_give_the_mount_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FAILURES_WITHIN_S", 600.0)
    with pytest.raises(MountError, match="5 daemons have crashed within a minute"):
        stage.run("hello(); ready(); time.sleep(0.1); os.kill(os.getpid(), signal.SIGSEGV)")
    assert stage.daemons == restarts.MOST_FAILURES


@pytest.mark.long
@pytest.mark.expect_log("the daemon .* was killed by SIGKILL")
def test_daemons_that_others_kill_are_replaced_for_ever(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FAILURES_WITHIN_S", 600.0)
    stage.run(
        "hello(); ready(); time.sleep(0.1)\n"
        "if count == 8: end()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert stage.daemons == 8


def test_a_daemon_has_more_time_after_a_gap() -> None:
    """What the supervisor could not hear while it did not run."""
    daemon = child.Child([sys.executable, "-c", "import time; time.sleep(60)"])
    silent_by_s = daemon.silent_by_s
    daemon.excuse(100.0)
    assert daemon.silent_by_s == silent_by_s + 100.0
    daemon.end(1.0)
    ends_by_s = daemon.ends_by_s
    assert ends_by_s is not None
    daemon.excuse(100.0)
    assert daemon.ends_by_s == ends_by_s + 100.0
    daemon.kill()
    daemon.reap()
