"""SIGSTOP for a process, until it really stands still."""

import contextlib
import os
import signal
import time
from pathlib import Path

_PATIENCE_S = 180


def suspend(pid: int) -> None:
    """Stop a process by SIGSTOP, and wait until none of its threads runs any more. Until the thread
    that takes the signal gets a CPU, the others go on: one of them may answer a request meanwhile.
    Returns also if the process ends."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE_S
    while not stands_still(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped or have ended."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if file.read_text().rpartition(")")[2].split()[0] not in "TtXZ":
                return False
    return True
