"""Decides whether the disk of one cache directory is healthy. Pure: no I/O, no clock.

The owner (`cache/tier/disk_threads.py`) reports every operation on slab files. While the directory
isn't `usable`, the cache neither reads nor stores blocks there. The rules measure the effect on
readers: a disk that is only busy is healthy.

NORMAL turns UNSTABLE when
- *errors*: 3 reads or 3 writes fail within 30 s, and at least one in 50 of that kind. Errors caused
  by a full disk, a missing slab file or a lack of descriptors or memory don't count;
- *gone*: one error means that the device is gone or takes no writes (EROFS, ENODEV, ...);
- *hung*: one operation has not returned after 5 s (HDD: 10 s);
- *slow*: in the last 6 s there were 3 s during which an operation was slow, and at least half of
  the time that all operations took was spent in slow ones. An operation is slow if it takes longer
  than `patience_s` plus 0.1 s for each 10^6 bytes. `patience_s` is 30 times the usual time of a
  read, but at least 0.5 s (HDD: 1 s) and at most 1.5 s. Time in which several operations are slow
  counts once, and only the first 2 s of each operation count: one stall is never enough, however
  many operations it delays.
For writes the limits of the last two rules are doubled, because no reader waits for a write and a
disk with a long write queue is only busy. So a disk that answers in 0.4 s instead of 0.4 ms stays
NORMAL, and so does one with a few long waits among many short ones.

The usual time is a running median of reads. It takes at most 10 samples a second, and each moves
it by 1/256. Slow and failed reads are no samples, and there are none while the disk isn't NORMAL.

The disk returns to NORMAL after 3 probes in a row without error, each within `patience_s`. Probes
are 1 s apart after the first fall (from NORMAL). Each further fall doubles the interval, up to
10 s; after 10 minutes without a fall the next one counts as the first. UNSTABLE turns DOWN after 5
failed probes in a row, or when a probe has not returned after 10 s. DOWN is probed every 30 s until
a probe succeeds, then as above.
"""

import errno
import math
import os
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from cachefs.types import Medium


class Health(Enum):
    """The state of a disk; only a NORMAL one is used."""

    NORMAL = "normal"
    UNSTABLE = "unstable"
    DOWN = "down"


class _Limits(NamedTuple):
    usual_s: float
    """Initial value of the usual time of a small read."""
    scale_bytes: int
    """Size of a read that normally takes twice as long as a small one."""
    patience_s: float
    hung_s: float


_LIMITS = {
    Medium.MEM: _Limits(20e-6, 64 << 10, 0.5, 5.0),
    Medium.SSD: _Limits(500e-6, 256 << 10, 0.5, 5.0),
    Medium.HDD: _Limits(10e-3, 1 << 20, 1.0, 10.0),
}
_MAX_PATIENCE_S = 1.5
_SLOW_FACTOR = 30
_WRITE_FACTOR = 2
_TRANSFER_S_PER_BYTE = 1e-7
_SLOW_WINDOW_S = 6.0
_SLOW_S = 3.0
_SLOW_S_OF_ONE_OPERATION = 2.0

_ERROR_WINDOW_S = 30
_ERRORS = 3
_OPERATIONS_PER_ERROR = 50
_NOT_THE_DISK = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.EAGAIN, errno.EINTR, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP,
    }
)  # fmt: skip
_GONE = frozenset(
    {errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ENOTCONN, errno.ESHUTDOWN}
)

_LESSON_EVERY_S = 0.1
_LESSON = 1 / 256

_PROBES_TO_NORMAL = 3
_PROBES_TO_DOWN = 5
_PROBE_HUNG_S = 10.0
_PROBE_EVERY_S = 1.0
_MAX_PROBE_EVERY_S = 10.0
_PROBE_DOWN_EVERY_S = 30.0
_FALLS_FORGOTTEN_S = 600.0


class _Second:
    """Sums of the operations that were reported during about a second.

    `operations` and `errors` have two items: reads, writes.
    """

    __slots__ = ("begin_s", "errors", "operations", "slow", "slow_spent_s", "spent_s", "stalled_s")

    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.operations = [0, 0]
        self.errors = [0, 0]
        self.slow = 0
        """Number of slow operations."""
        self.spent_s = 0.0
        """Sum of the durations of all operations."""
        self.slow_spent_s = 0.0
        """Sum of the durations of slow operations."""
        self.stalled_s = 0.0
        """Time in which at least one operation was slow; overlapping operations count once."""


class DiskHealth:
    """See the module docstring. `now_s` is monotonic time. Use it from one thread only."""

    def __init__(self, medium: Medium) -> None:
        self._limits = _LIMITS[medium]
        self.state = Health.NORMAL
        self.usable = True
        """Whether `state` is NORMAL."""
        self.reason = ""
        """The cause of the last change of `state`, as one phrase; empty if it never changed."""
        self.on_change: Callable[[Health, Health, str], None] | None = None
        """Called with the old state, the new one and the reason. Only `DiskThreads` sets it."""
        self.patience_s = 0.0
        """How long a reader should wait for this disk before it reads from the origin instead."""
        self._usual_s = self._limits.usual_s
        self._next_lesson_s = -math.inf
        self._set_patience()
        self._seconds = deque([_Second(-math.inf)], maxlen=_ERROR_WINDOW_S + 1)
        self._stalled_until_s = -math.inf
        self._since_s = -math.inf
        """When `state` last changed. Operations that began earlier are ignored."""
        self._probe_every_s = _PROBE_EVERY_S
        self._next_probe_s = math.inf
        self._good_probes = 0
        self._bad_probes = 0

    # -- operations ------------------------------------------------------------------------

    def operation_done(
        self,
        duration_s: float,
        size_bytes: int,
        error: OSError | None,
        now_s: float,
        *,
        write: bool = False,
    ) -> None:
        """Report that an operation has returned.

        `duration_s` excludes the wait for a thread. Creating, opening and removing files count as
        writes.
        """
        if not self.usable or now_s - duration_s < self._since_s:
            return
        second = self._seconds[-1]
        if now_s - second.begin_s >= 1:
            second = _Second(now_s)
            self._seconds.append(second)
        second.operations[write] += 1
        second.spent_s += duration_s
        if error is not None and error.errno not in _NOT_THE_DISK:
            second.errors[write] += 1
            self._judge_errors(error, now_s, write)
        elif duration_s > self.patience_s and duration_s > self._slow_s(size_bytes, write):
            second.slow += 1
            second.slow_spent_s += duration_s
            self._stalled(now_s - duration_s, now_s)
        elif not write and error is None and now_s >= self._next_lesson_s:
            self._learn(duration_s, size_bytes, now_s)

    def operation_overdue(
        self, age_s: float, now_s: float, size_bytes: int = 0, *, write: bool = False
    ) -> None:
        """Report that an operation or a probe has not returned after `age_s`.

        The owner should repeat this for each operation as long as it is under way.
        """
        if now_s - age_s < self._since_s:
            return
        if self.state is Health.UNSTABLE and age_s >= _PROBE_HUNG_S:
            self._bad_probes = _PROBES_TO_DOWN
            self._change(Health.DOWN, f"a probe is not back after {_time(age_s)}", now_s)
        if not self.usable:
            return
        factor = _WRITE_FACTOR if write else 1
        if age_s >= self._limits.hung_s * factor + size_bytes * _TRANSFER_S_PER_BYTE:
            what = "a write" if write else "a read"
            self._change(Health.UNSTABLE, f"{what} is not back after {_time(age_s)}", now_s)
        elif age_s >= self._slow_s(size_bytes, write):
            if now_s - self._seconds[-1].begin_s >= 1:
                self._seconds.append(_Second(now_s))
            self._stalled(now_s - age_s, now_s)

    def _slow_s(self, size_bytes: int, write: bool) -> float:
        factor = _WRITE_FACTOR if write else 1
        return self.patience_s * factor + size_bytes * _TRANSFER_S_PER_BYTE

    def _judge_errors(self, error: OSError, now_s: float, write: bool) -> None:
        if error.errno in _GONE:
            self._change(Health.UNSTABLE, _what(error), now_s)
            return
        recent = self._recent(now_s, _ERROR_WINDOW_S)
        errors = sum(second.errors[write] for second in recent)
        operations = sum(second.operations[write] for second in recent)
        if errors >= _ERRORS and errors * _OPERATIONS_PER_ERROR >= operations:
            reason = f"{errors} errors in {_ERROR_WINDOW_S} s, the last: {_what(error)}"
            self._change(Health.UNSTABLE, reason, now_s)

    def _stalled(self, begin_s: float, now_s: float) -> None:
        """Account for a slow operation that began at `begin_s` and was under way until `now_s`."""
        end_s = min(now_s, begin_s + _SLOW_S_OF_ONE_OPERATION)
        self._seconds[-1].stalled_s += max(0.0, end_s - max(begin_s, self._stalled_until_s))
        self._stalled_until_s = max(end_s, self._stalled_until_s)
        recent = self._recent(now_s, _SLOW_WINDOW_S)
        spent_s = sum(second.spent_s for second in recent)
        slow_spent_s = sum(second.slow_spent_s for second in recent)
        if sum(second.stalled_s for second in recent) < _SLOW_S or 2 * slow_spent_s < spent_s:
            return
        slow = sum(second.slow for second in recent)
        typical_s = slow_spent_s / slow if slow else now_s - begin_s
        reason = f"operations take {_time(typical_s)}, reads usually {_time(self._usual_s)}"
        self._change(Health.UNSTABLE, reason, now_s)

    def _recent(self, now_s: float, window_s: float) -> list[_Second]:
        return [second for second in self._seconds if second.begin_s > now_s - window_s]

    def _learn(self, duration_s: float, size_bytes: int, now_s: float) -> None:
        small_s = duration_s / (1 + size_bytes / self._limits.scale_bytes)
        self._usual_s *= 1 + _LESSON if small_s > self._usual_s else 1 - _LESSON
        self._next_lesson_s = now_s + _LESSON_EVERY_S
        self._set_patience()

    def _set_patience(self) -> None:
        wanted_s = max(self._limits.patience_s, _SLOW_FACTOR * self._usual_s)
        self.patience_s = min(wanted_s, _MAX_PATIENCE_S)

    # -- probes ----------------------------------------------------------------------------

    def probe_due(self, now_s: float) -> bool:
        """Whether the owner must probe the disk now: write, sync and read back a little data.

        The owner must not run two probes at a time.
        """
        return now_s >= self._next_probe_s

    def probe_done(self, duration_s: float, error: OSError | None, now_s: float) -> None:
        """Report that a probe has returned, however late. A full disk fails no probe."""
        if self.usable:
            return
        every_s = self._probe_every_s
        failed = error is not None and error.errno not in _NOT_THE_DISK
        if failed or duration_s > self.patience_s:
            self._good_probes = 0
            self._bad_probes += 1
            if self.state is Health.UNSTABLE and self._bad_probes >= _PROBES_TO_DOWN:
                what = _what(error) if error else f"took {_time(duration_s)}"
                reason = f"{self._bad_probes} probes failed, the last: {what}"
                self._change(Health.DOWN, reason, now_s)
            if self.state is Health.DOWN:
                every_s = _PROBE_DOWN_EVERY_S
        else:
            self._bad_probes = 0
            self._good_probes += 1
            if self._good_probes >= _PROBES_TO_NORMAL:
                self._change(Health.NORMAL, f"{self._good_probes} probes succeeded", now_s)
                return
        self._next_probe_s = now_s + every_s

    # -- changes ---------------------------------------------------------------------------

    def _change(self, state: Health, reason: str, now_s: float) -> None:
        old = self.state
        if old is Health.NORMAL:
            self._fall(now_s)
        elif state is Health.NORMAL:
            self._next_probe_s = math.inf
            self._seconds.clear()
            self._seconds.append(_Second(now_s))
        self.state = state
        self.usable = state is Health.NORMAL
        self.reason = reason
        self._since_s = now_s
        if self.on_change is not None:
            self.on_change(old, state, reason)

    def _fall(self, now_s: float) -> None:
        forgotten = now_s - self._since_s >= _FALLS_FORGOTTEN_S
        twice_s = min(2 * self._probe_every_s, _MAX_PROBE_EVERY_S)
        self._probe_every_s = _PROBE_EVERY_S if forgotten else twice_s
        self._next_probe_s = now_s + self._probe_every_s
        self._good_probes = 0
        self._bad_probes = 0


def _what(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"
