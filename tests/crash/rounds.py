"""Crashes at random moments, many times over the same directories.

A worker reads, admits, evicts, demotes, promotes, reassigns and commits as fast as it can until it
is killed. Then everything is verified, with what is left, and the next one goes on with that.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import trio

from tests.crash.load import SIZES, TIERS, Order, Tally, make_origin
from tests.crash.verify import check, verify
from tests.crash.worker import FAILURE_NAME, TALLY_NAME

REPOSITORY = Path(__file__).parents[2]
TRIED = ("admitted", "evicted", "demoted", "promoted", "reassigned", "commits", "adopted")
"""What the rounds are for, by names of counters."""
EXPECTED = (
    "a block is not what was stored|can't be opened|header is damaged"
    # Workers shrink tiers to a slab or two. `verify` waits until the quota holds all the same.
    "|because all of its slabs have pinned blocks"
)
T = TypeVar("T")
TIER_CHOICES = (["mem", "ssd1", "ssd2", "hdd"], ["mem", "ssd1", "ssd2"], ["ssd1", "hdd"])


class Server:
    """Forks workers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.worker"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, order: Order, kill_after_s: float | None) -> int:
        """One worker, to its end; returns its wait status."""
        assert self._process.stdin is not None
        print(order.encode(), file=self._process.stdin, flush=True)
        pid = self._answer()
        if kill_after_s is not None:
            with suppress(ProcessLookupError, FileNotFoundError):  # it has failed, and says why
                _kill(pid, kill_after_s)
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def _kill(pid: int, after_s: float) -> None:
    """Kill a process that was forked just now after so much time in which it ran or slept.

    The time in which its main thread waited for a processor does not count: a busy machine would
    leave it nothing to do in the rest. schedstat: nanoseconds on a processor, nanoseconds of
    waiting, number of turns (Linux, Documentation/scheduler/sched-stats.rst).
    """
    times = Path(f"/proc/{pid}/schedstat")
    start_s = time.monotonic()
    while True:
        waited_s = int(times.read_text().split()[1]) / 1e9
        left_s = start_s + after_s + waited_s - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(left_s)
    os.kill(pid, signal.SIGKILL)


class Rounds:
    """Crash, verify, go on; everything is derived from the seed."""

    def __init__(self, server: Server, root: Path, seed: int) -> None:
        self._server = server
        self._root = root
        self._choice = random.Random(seed)
        self._origin, files = make_origin()
        self._refs = [ref for some in files.values() for ref in some]
        self._tally = Tally(root / TALLY_NAME)
        self.total: Counter[str] = Counter()

    def order(self, undo_file: Path | None = None) -> Order:
        choice = self._choice
        return Order(
            root=str(self._root),
            seed=choice.randrange(1 << 30),
            tiers=choice.choices(TIER_CHOICES, (8, 1, 1))[0],
            policy=choice.choices(("lru", "epoch", "2-random"), (6, 3, 1))[0],
            commit_interval_s=choice.choice((0.01, 0.02, 0.05, 0.2)),
            cooldown_s=choice.choice((0.0, 0.05, 1.0)),
            kinds={kind: choice.choice((0.1, 1, 5)) for kind in SIZES},
            resizing=choice.random() < 0.3,
            undo_file=None if undo_file is None else str(undo_file),
        )

    def chance(self, probability: float) -> bool:
        return self._choice.random() < probability

    def choose(self, choices: Sequence[T]) -> T:
        return self._choice.choice(choices)

    def crash(self, order: Order) -> None:
        kill_after_s = self._choice.choices(
            (self._choice.uniform(0, 0.04), self._choice.uniform(0.03, 0.4)), (1, 7)
        )[0]
        status = self._server.run(order, kill_after_s)
        self._judge(order)
        assert os.WIFSIGNALED(status), order
        self.total["killed"] += 1

    def close(self, order: Order) -> None:
        order.close_after_s = self._choice.uniform(0, 0.2)
        status = self._server.run(order, None)
        self._judge(order)
        assert status == 0, order

    def _judge(self, order: Order) -> None:
        self.total.update(self._tally.take())
        failure = self._root / FAILURE_NAME
        assert not failure.exists(), f"{order}:\n{failure.read_text()}"

    def verify(self, order: Order) -> None:
        try:
            trio.run(
                verify,
                self._root,
                list(TIERS) if len(order.tiers) == 4 else order.tiers,
                order.policy,
                self._origin,
                self._refs,
                self._choice,
            )
        except BaseException as error:
            error.add_note(f"after {order}")
            raise

    def go_on(self, crashes: int) -> bool:
        """Whether more rounds are needed: until so many crashes, and on a slow machine until
        everything was tried that they are for."""
        return self.total["killed"] < crashes or (
            self.total["killed"] < 10 * crashes and not all(self.total[name] for name in TRIED)
        )

    def end(self) -> None:
        """The rounds have tried what they are for, and have left nothing behind."""
        assert all(self.total[name] for name in TRIED), self.total
        self.verify(Order(str(self._root), 0, list(TIERS)))
        check(self._root, list(TIERS))
