"""Time in which the process did not run counts for no deadline, and time always goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cachefs.loop_clock import GAP_S, LATE_S, LoopClock

SLEEPER = """
import socket, sys, trio
from cachefs.loop_clock import LoopClock, had_gap_since

async def main():
    began_at = trio.current_time()
    near, far = trio.socket.socketpair()
    print("ready", flush=True)
    with trio.move_on_after(1.0) as scope:
        await near.recv(1)
    assert scope.cancelled_caught
    print(had_gap_since(began_at), trio.current_time() - began_at < 1.5, flush=True)

trio.run(main, clock=LoopClock())
"""


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """What trio does with its clock."""

    def __init__(self) -> None:
        self.time = Time()
        self.clock = LoopClock(self.time)

    def sleep(self, at_most_s: float, really_s: float) -> float:
        """Return how much time the clock counts."""
        began_at = self.clock.current_time()
        assert self.clock.deadline_to_sleep_time(began_at + at_most_s) == pytest.approx(at_most_s)
        self.time.now += really_s
        return self.clock.current_time() - began_at


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_time_goes_on_as_usual(loop: Loop) -> None:
    assert loop.sleep(10.0, 4.0) == pytest.approx(4.0)
    assert loop.sleep(1.0, 1.0 + LATE_S / 2) == pytest.approx(1.0 + LATE_S / 2)
    assert loop.sleep(float("inf"), 100.0) == pytest.approx(100.0)
    loop.time.now += GAP_S / 2  # a turn that takes long
    assert loop.sleep(1.0, 1.0) == pytest.approx(1.0)


def test_a_gap_does_not_count(loop: Loop) -> None:
    loop.sleep(2.0, 1.5)
    before = loop.clock.current_time()
    assert loop.sleep(2.0, 9.0) == pytest.approx(0.0, abs=0.01)
    assert loop.clock.gap_at >= before
    assert loop.sleep(2.0, 2.0) == pytest.approx(2.0)


def test_a_gap_within_a_turn(loop: Loop) -> None:
    before = loop.clock.current_time()
    loop.time.now += 9.0
    assert loop.clock.current_time() == pytest.approx(before, abs=0.01)


def test_a_short_delay_leaves_time_to_look_once_more(loop: Loop) -> None:
    counted_s = loop.sleep(0.05, 0.1)
    assert 0.04 < counted_s < 0.05
    rest_s, turns = 0.05 - counted_s, 0
    while rest_s > 1e-9 and turns < 10:
        rest_s -= loop.sleep(rest_s, 0.1)
        turns += 1
    assert 0 < turns < 5, "time goes on, also if each sleep ends late"


def test_time_goes_on_if_nothing_but_gaps_come(loop: Loop) -> None:
    began_at = loop.clock.current_time()
    for _ in range(20):
        loop.sleep(0.5, 1.0)
    assert loop.clock.current_time() - began_at > 4


def test_a_stopped_process() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.6)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == b"True True\n"
    assert process.returncode == 0
