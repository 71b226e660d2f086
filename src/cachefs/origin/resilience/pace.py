"""Recent speed of reads: the time allowed for a large body, and the delay before a hedge."""

import math
from collections import deque

from cachefs.origin.options import QUICK_READ_S

_MIB = 1 << 20
_FACTOR = 8
_LEAST_S_PER_MIB, _MOST_S_PER_MIB = 0.1, 1.0
_WEIGHT = 0.1
_MEASURED_BYTES = 256 << 10
"""Smaller bodies measure the latency, not the rate."""
_RECENT_WEIGHT = 0.5
_QUICK_S = 1.0
_PIECE_S = 2.0
_SLOW_BYTES_PER_S = 128 << 10
_SAMPLES = 200
_ENOUGH_SAMPLES = 50
_QUANTILE = 0.95
_RENEW_EVERY = 20
_LEAST_DELAY_S = 0.005


class Pace:
    """Estimates rates and latencies from successful reads. `ResilientOrigin` owns it."""

    def __init__(self) -> None:
        self._s_per_mib = 2 * _LEAST_S_PER_MIB / _FACTOR
        self._recent_s_per_mib: float | None = None
        self._latencies_s: deque[float] = deque(maxlen=_SAMPLES)
        self._since_renewal = 0
        self._straggler_s: float | None = None
        self._latest_s = 0.0
        self.unhindered_s: float | None = None
        """Seconds that a small read takes without contention; None until measured."""

    def note(self, size_bytes: int, took_s: float) -> None:
        """Record that a read of `size_bytes` succeeded after `took_s`."""
        if size_bytes >= _MEASURED_BYTES:
            s_per_mib = took_s * _MIB / size_bytes
            self._s_per_mib += _WEIGHT * (s_per_mib - self._s_per_mib)
            recent = self._recent_s_per_mib
            if recent is None or math.isinf(recent):
                recent = s_per_mib
            self._recent_s_per_mib = recent + _RECENT_WEIGHT * (s_per_mib - recent)
        elif self._recent_s_per_mib == math.inf and took_s < _QUICK_S:
            self._recent_s_per_mib = None
        if size_bytes > _MIB:
            return
        self._latest_s = took_s
        self._latencies_s.append(took_s)
        self._since_renewal += 1
        if self._since_renewal >= _RENEW_EVERY and len(self._latencies_s) >= _ENOUGH_SAMPLES:
            self._since_renewal = 0
            ordered = sorted(self._latencies_s)
            # If all latencies are similar, the slowest 5 % are no stragglers.
            twice_median_s = 2 * ordered[len(ordered) // 2]
            slow_s = ordered[int(len(ordered) * _QUANTILE)]
            self.unhindered_s = ordered[int(len(ordered) * (1 - _QUANTILE))]
            self._straggler_s = max(_LEAST_DELAY_S, slow_s, twice_median_s)

    def allowance_s(self, size_bytes: int) -> float:
        """Return how many seconds a body of this size may take beyond the request timeout."""
        s_per_mib = self._s_per_mib * _FACTOR
        return min(max(s_per_mib, _LEAST_S_PER_MIB), _MOST_S_PER_MIB) * size_bytes / _MIB

    def note_silence(self) -> None:
        """Record that a body did not arrive in time."""
        self._recent_s_per_mib = math.inf

    def is_quick(self, size_bytes: int) -> bool:
        """Whether a body of this size should arrive so fast (within `_QUICK_S` if the rate has
        been measured) that its progress need not be watched."""
        recent = self._recent_s_per_mib
        if recent is None:
            return size_bytes < _MEASURED_BYTES
        return recent * size_bytes / _MIB < _QUICK_S

    @property
    def answers_quickly(self) -> bool:
        """Whether the latest small read took much less than `QUICK_READ_S`; True before the
        first."""
        return self._latest_s < QUICK_READ_S / 2

    @staticmethod
    def is_slow(size_bytes: int, took_s: float) -> bool:
        """Whether a read was so slow that too many requests must have shared the line."""
        return size_bytes >= _MEASURED_BYTES and size_bytes < _SLOW_BYTES_PER_S * took_s

    @property
    def best_read_bytes(self) -> float:
        """The size of one request that arrives within `_PIECE_S`. A reader gets no byte of a
        request before all of it has arrived."""
        recent = self._recent_s_per_mib
        return math.inf if not recent else _PIECE_S / recent * _MIB

    def straggler_s(self, size_bytes: int) -> float | None:
        """Return after how many seconds a read counts as a straggler; None if that is unknown."""
        return None if size_bytes > _MIB else self._straggler_s
