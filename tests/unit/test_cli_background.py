"""Going to the background: what the parent tells, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from cachefs import log
from cachefs.cli.mounting import background
from cachefs.errors import CacheDirError, UsageError

def serve(ready):
    Path(sys.argv[1]).write_text(str(os.getpid()))
    {body}

background.START_TIMEOUT_S = float(sys.argv[3])
background.STOP_TIMEOUT_S = 0.5
try:
    background.launch(serve, Path("/no/such/mount"), Path(sys.argv[2]))
except BaseException as error:
    print(f"{{type(error).__name__}}: {{error}}")
else:
    print("up")
"""


class Launch:
    """One parent process, with a daemon that does `body`."""

    def __init__(self, directory: Path, body: str, start_timeout_s: int = 5) -> None:
        self.pid_file = directory / "pid"
        self.log_file = directory / "log"
        self.parent = subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM.format(body=body)),
                *(self.pid_file, self.log_file, str(start_timeout_s)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> str:
        return self.parent.communicate(timeout=300)[0].strip()

    def daemon_pid(self) -> int:
        for _ in range(3000):
            if self.pid_file.exists() and self.pid_file.read_text():
                return int(self.pid_file.read_text())
            time.sleep(0.02)
        raise AssertionError("the daemon did not start")

    def wait_until_interruptible(self) -> None:
        """Until the parent, which waits for its daemon, handles the last of its signals."""
        status = Path(f"/proc/{self.parent.pid}/status")
        for _ in range(3000):
            caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)
            if caught >> (signal.SIGHUP - 1) & 1:
                return
            time.sleep(0.02)
        raise AssertionError("the parent does not wait")

    def daemon_is_gone(self) -> bool:
        try:
            os.kill(self.daemon_pid(), 0)
        except ProcessLookupError:
            return True
        return False


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise CacheDirError('no room')", "CachefsError: no room"),
        ("raise UsageError('bad')", "UsageError: bad"),
        ("raise ValueError('bug')", "CachefsError: internal error: ValueError: bug; see {log}"),
        ("pass", "MountError: the daemon ended before the mount was up; see {log}"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "MountError: the daemon was killed by SIGKILL before the mount was up; see {log}",
        ),
        (
            "ready(); time.sleep(60)",
            "MountError: /no/such/mount was mounted but does not answer; see {log}",
        ),
        (
            "background.START_TIMEOUT_S; time.sleep(60)",
            "MountError: the daemon did not come up within 5 s",
        ),
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)",
            "MountError: /no/such/mount was mounted but does not answer; see {log}",
        ),
    ],
)
def test_a_daemon_that_fails_is_told_and_gone(tmp_path: Path, body: str, said: str) -> None:
    launch = Launch(tmp_path, body)
    assert launch.said() == said.format(log=launch.log_file)
    assert launch.daemon_is_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_parent_ends_the_daemon(tmp_path: Path, number: int) -> None:
    launch = Launch(tmp_path, "time.sleep(60)", start_timeout_s=60)
    launch.daemon_pid()
    launch.wait_until_interruptible()
    launch.parent.send_signal(number)
    assert launch.said() == "KeyboardInterrupt:"
    assert launch.daemon_is_gone()


def test_what_the_daemon_prints_is_in_the_log(tmp_path: Path) -> None:
    launch = Launch(
        tmp_path, "os.write(1, b'out '); os.write(2, b'err '); print(os.getcwd(), input())"
    )
    assert "internal error: EOFError" in launch.said()
    assert "out err " in launch.log_file.read_text()


def test_the_daemon_leads_its_own_session(tmp_path: Path) -> None:
    body = "raise CacheDirError(f'{os.getsid(0) == os.getpid()} {os.getcwd()}')"
    assert Launch(tmp_path, body).said() == "CachefsError: True /"
