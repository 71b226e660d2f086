"""A daemon that hangs is told from one that only waits for the processor."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.supervisor.hang_detection import STILL_LOOKS, STOPPED_LOOKS, HangDetector
from tests.mount.harness import eventually

PID = 77
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """What the kernel says of process 77."""
    (tmp_path / f"{PID}/task/{PID}").mkdir(parents=True)

    def write(state: str, times: str) -> None:
        (tmp_path / f"{PID}/stat").write_text(f"{PID} (a ) name) {state} 1 77 77 0 -1 4194560 0")
        (tmp_path / f"{PID}/task/{PID}/schedstat").write_text(f"{times}\n")

    return write


def looks(tmp_path: Path, count: int, before: Callable[[int], None]) -> list[str | None]:
    detector = HangDetector(PID, tmp_path)
    found: list[str | None] = []
    for number in range(count):
        before(number)
        found.append(detector.look())
    return found


def test_stopped(tmp_path: Path, write: Write) -> None:
    found = looks(tmp_path, STOPPED_LOOKS + 1, lambda _: write("T", "900 100 5"))
    assert found == [None] * STOPPED_LOOKS + ["stopped"]


def test_a_loop_that_neither_runs_nor_waits(tmp_path: Path, write: Write) -> None:
    found = looks(tmp_path, STILL_LOOKS + 1, lambda _: write("S", "900 100 5"))
    assert found == [None] * STILL_LOOKS + ["still"]


@pytest.mark.parametrize(
    ("state", "times"),
    [
        ("S", "{0}900 100 5"),  # it runs now and then
        ("R", "900 {0}100 5"),  # it waits for a processor
        ("S", "900 {0}100 5"),
        ("R", "900 100 5"),  # a limit of its group leaves it none
        ("D", "900 100 5"),  # a disk
        ("t", "900 100 5"),  # a debugger
        ("S", "0 0 0"),  # a kernel that doesn't count
        ("S", ""),
    ],
)
def test_everything_else_has_time(tmp_path: Path, write: Write, state: str, times: str) -> None:
    found = looks(tmp_path, 3 * STILL_LOOKS, lambda n: write(state, times.format(n + 1)))
    assert set(found) == {None}


def test_who_went_on_in_between_begins_anew(tmp_path: Path, write: Write) -> None:
    found = looks(tmp_path, STOPPED_LOOKS + 2, lambda n: write("R" if n == 1 else "T", "9 9 9"))
    assert set(found) == {None}


def test_nobody_there(tmp_path: Path) -> None:
    assert set(looks(tmp_path, 3 * STILL_LOOKS, lambda _: None)) == {None}


def test_a_real_process() -> None:
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", "while True: pass"]) as process:
        detector = HangDetector(process.pid)
        try:
            assert {detector.look() for _ in range(3 * STILL_LOOKS)} == {None}
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: detector.look() == "stopped")
        finally:
            process.kill()


def test_looks_from_before_a_gap_do_not_count(tmp_path: Path, write: Write) -> None:
    write("T", "900 100 5")
    detector = HangDetector(PID, tmp_path)
    for _ in range(STOPPED_LOOKS):
        assert detector.look() is None
    detector.forget()
    assert detector.look() is None
