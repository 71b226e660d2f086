"""Names that look-ups have found absent, and names that the kernel caches as absent."""

import math
from collections import OrderedDict
from collections.abc import Callable

from cachefs.namespace.clock import Clock

_MOST = 100_000
"""The most names kept, about 20 MB. The oldest are dropped first."""


class AbsentNames:
    """The absent names of one mount by directory and name, owned by its `Namespace`. All methods
    are synchronous."""

    def __init__(
        self, clock: Clock, ttl_ns: float, on_unbound: Callable[[int, bytes], None]
    ) -> None:
        """`on_unbound(parent, name)` must make the kernel drop what it caches of the name."""
        self._clock = clock
        self.ttl_ns = ttl_ns
        self._on_unbound = on_unbound
        self._found_at_ns: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._cached: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """Names that the kernel caches as absent, for a TTL."""

    def note(self, parent: int, name: bytes, observed_ns: int) -> None:
        """Note that a look-up which began at `observed_ns` has found the name absent."""
        self._found_at_ns[(parent, name)] = observed_ns
        if len(self._found_at_ns) > _MOST:
            self._found_at_ns.popitem(last=False)

    def drop(self, parent: int, name: bytes) -> None:
        """Note that a look-up has found the name."""
        self._found_at_ns.pop((parent, name), None)

    def found_at_ns(self, parent: int, name: bytes) -> int:
        """Return when a look-up last found the name absent (ns); 0 if none did."""
        return self._found_at_ns.get((parent, name), 0)

    def remaining_ns(self, parent: int, name: bytes, listed_ns: float | None) -> float | None:
        """Return the ns until the name's absence expires; negative if it has expired.

        `listed_ns` is the time until the directory's complete listing, which doesn't show the name,
        expires; None if there is no such listing. Return None if neither a look-up nor a listing
        has found the name absent, as far as is known."""
        since_ns = self._found_at_ns.get((parent, name))
        if since_ns is None and listed_ns is None:
            return None
        remaining_ns = -math.inf
        if since_ns is not None:
            remaining_ns = self._clock.remaining_ns(since_ns, self.ttl_ns)
        if listed_ns is not None:
            remaining_ns = max(remaining_ns, min(listed_ns, self.ttl_ns))
        return remaining_ns

    def note_cached(self, parent: int, name: bytes) -> None:
        """Note that the kernel is about to cache the name as absent."""
        self._cached[parent, name] = None
        if len(self._cached) > _MOST:
            self._cached.popitem(last=False)

    def note_new(self, parent: int, name: bytes) -> None:
        """Note that a listing shows a new name: if the kernel caches it as absent, invalidate
        that."""
        if (parent, name) in self._cached:
            del self._cached[parent, name]
            self._on_unbound(parent, name)
