"""The circuit breaker: decides whether requests to the origin make sense.

A *run* of failures begins with the first failure after a success. Any answer of the origin ends it.
A run alone does not open the breaker, because one object that many readers request may cause it: a
check of the source itself must fail too. A short run does not open it either. The run must have
lasted as long as a call waits (`open_after_s`), so that readers wait out shorter outages.
"""

_SUSPECT_FAILURES = 3
_FORGET_S = 15.0
"""A failure that is older than this no longer counts."""


class Breaker:
    """State machine without a clock. All times are seconds of one monotonic clock."""

    def __init__(self, open_after_s: float) -> None:
        self.reason = ""
        """The message of the last failure."""
        self.is_open = False
        self._open_after_s = open_after_s
        self._run_began_at = 0.0
        self._last_at = 0.0
        self._failures = 0
        self._checks_failed = 0

    @property
    def is_failing(self) -> bool:
        """Whether a run of failures is in progress or the breaker is open."""
        return self._failures > 0 or self.is_open

    def failed(self, began_at: float, now: float, reason: str) -> None:
        """Record that a request sent at `began_at` got no answer or a server error."""
        if not self._failures or (now - self._last_at > _FORGET_S and not self.is_open):
            self._failures = self._checks_failed = 0
            self._run_began_at = began_at
        self._failures += 1
        self._last_at = now
        self.reason = reason

    def check_failed(self) -> None:
        """Record that the source as a whole gave no answer to a probe, or a server error."""
        self._checks_failed += 1

    def answered(self) -> bool:
        """Record an answer of the origin. Return True if this closes the breaker."""
        self._failures = self._checks_failed = 0
        was_open, self.is_open = self.is_open, False
        return was_open

    def is_suspect(self, now: float) -> bool:
        """Whether the run is long enough to send a probe."""
        if not self._failures:
            return False
        lasted_s = now - self._run_began_at
        return self._failures >= _SUSPECT_FAILURES or lasted_s >= self._open_after_s / 3

    def try_to_open(self, now: float) -> bool:
        """Open the breaker if it is due. Return True if this call opened it."""
        if self.is_open or not (self._failures and self._checks_failed):
            return False
        if now - self._run_began_at < self._open_after_s:
            return False
        self.is_open = True
        return True
