"""A token bucket: bytes per second, evenly."""

_BURST_S = 0.05
"""How much may come at once after a pause, in seconds of the rate."""


class TokenBucket:
    """Pure: `reserve` says how long to wait. Whoever has reserved must wait so long, then go."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """None is no limit."""
        self._rate = bytes_per_s
        self._free_at = float("-inf")

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        """What is owed under the old rate is paid at the new one."""
        if self._rate and bytes_per_s and self._free_at > now:
            self._free_at = now + (self._free_at - now) * self._rate / bytes_per_s
        elif not bytes_per_s:
            self._free_at = float("-inf")
        self._rate = bytes_per_s

    def reserve(self, size_bytes: int, now: float) -> float:
        """Take `size_bytes` from now on; seconds until they may be used."""
        if not self._rate:
            return 0.0
        starts_at = max(self._free_at, now - _BURST_S)
        self._free_at = starts_at + size_bytes / self._rate
        return max(0.0, starts_at - now)

    def give_back(self, size_bytes: int) -> None:
        """So much of what was reserved is not used after all."""
        if self._rate:
            self._free_at -= size_bytes / self._rate
