"""The circuit breaker: whether it is of any use to ask the origin.

A *run* of failures begins with the first failure after a success, and any answer of the origin ends
it. A run alone doesn't open the breaker, for it may be the fault of one object that many ask for: a
probe must fail too. Nor does a short one: it opens when nothing has come for as long as a reader is
patient, so that shorter outages are waited out by those who read meanwhile.
"""

_SUSPECT_FAILURES = 3
_FORGET_S = 15.0
"""A failure so long ago says nothing about now."""


class Breaker:
    """Times are seconds of any clock that doesn't go back."""

    def __init__(self, open_after_s: float) -> None:
        self.reason = ""
        """What the last failure said."""
        self.opened_at: float | None = None
        self._open_after_s = open_after_s
        self._run_began_at = 0.0
        self._last_at = 0.0
        self._failures = 0
        self._probes_failed = 0

    @property
    def is_open(self) -> bool:
        return self.opened_at is not None

    @property
    def is_failing(self) -> bool:
        """A run of failures is under way, or the breaker is open."""
        return self._failures > 0 or self.is_open

    def failed(self, began_at: float, now: float, reason: str) -> None:
        """A request that was sent at `began_at` got no answer, or a server error."""
        if not self._failures or (now - self._last_at > _FORGET_S and not self.is_open):
            self._failures = self._probes_failed = 0
            self._run_began_at = began_at
        self._failures += 1
        self._last_at = now
        self.reason = reason

    def probe_failed(self) -> None:
        self._probes_failed += 1

    def answered(self) -> bool:
        """The origin answered. True if this closes the breaker."""
        self._failures = self._probes_failed = 0
        was_open, self.opened_at = self.is_open, None
        return was_open

    def is_suspect(self, now: float) -> bool:
        """Whether the run is worth a probe."""
        if not self._failures:
            return False
        lasted_s = now - self._run_began_at
        return self._failures >= _SUSPECT_FAILURES or lasted_s >= self._open_after_s / 3

    def try_to_open(self, now: float) -> bool:
        """True if this opens the breaker."""
        if self.is_open or not (self._failures and self._probes_failed):
            return False
        if now - self._run_began_at < self._open_after_s:
            return False
        self.opened_at = now
        return True
