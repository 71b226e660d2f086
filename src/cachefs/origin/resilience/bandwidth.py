"""A token bucket that limits bytes per second and spreads them evenly."""

_BURST_S = 0.05
"""The burst that is allowed after a pause, in seconds at the full rate."""


class TokenBucket:
    """Computes waiting times; it does not sleep. After `reserve`, the caller must wait for the
    returned time before it uses the bytes."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """`bytes_per_s` None means no limit."""
        self._rate = bytes_per_s
        self._free_at = float("-inf")

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        """Set the rate. Bytes that are already reserved are sent at the new rate."""
        if self._rate and bytes_per_s and self._free_at > now:
            self._free_at = now + (self._free_at - now) * self._rate / bytes_per_s
        elif not bytes_per_s:
            self._free_at = float("-inf")
        self._rate = bytes_per_s

    def reserve(self, size_bytes: int, now: float) -> float:
        """Reserve `size_bytes` and return the seconds until they may be used."""
        if not self._rate:
            return 0.0
        starts_at = max(self._free_at, now - _BURST_S)
        self._free_at = starts_at + size_bytes / self._rate
        return max(0.0, starts_at - now)

    def give_back(self, size_bytes: int) -> None:
        """Return `size_bytes` that were reserved but not used."""
        if self._rate:
            self._free_at -= size_bytes / self._rate
