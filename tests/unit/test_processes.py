"""Whether a process has ended."""

import os
import subprocess
import sys

from cachefs.writes.processes import has_ended


def test_processes_that_live_and_that_have_ended() -> None:
    assert not has_ended(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid), "it is a zombie"
    child.communicate()
    assert has_ended(child.pid)
