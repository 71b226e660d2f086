"""Holds fetched blocks until a tier has stored them.

`Fetches` hands each fetch over that has its bytes (`admit`). Its blocks are offered to the tiers,
fastest first; a block that one tier refuses is offered to the next slower one. The memory of a
fetch is released when its last block is stored or given up. Readers get the bytes from here until
then.
"""

from cachefs.cache.fetch.in_flight import FetchMemory, InFlightFetch
from cachefs.cache.fetch.unstored import UnstoredAhead
from cachefs.cache.levels.tier_set import TierSet
from cachefs.cache.tier.admission import Candidate
from cachefs.types import BlockKey


class FetchedBlocks:
    """The fetched blocks of one mount that are not in a tier yet; the `BlockCache` owns it. Every
    method is atomic on the event loop."""

    def __init__(self, tiers: TierSet, memory: FetchMemory) -> None:
        self.admitting: dict[BlockKey, memoryview] = {}
        """The blocks that wait for their admission. Only this object changes it."""
        self.unstored = UnstoredAhead()
        """Blocks that were fetched ahead and that no tier took."""
        self._tiers = tiers
        self._memory = memory

    def admit(self, fetch: InFlightFetch) -> None:
        """Offer the blocks of a fetch that has its bytes to the tiers."""
        clock = self._tiers.common.history.now
        for key in fetch.keys:
            data = fetch.block(key.block_index)
            candidate = Candidate(key, data, self._admission_finished, clock, fetch)
            self.admitting[key] = data
            if not self._offer(candidate, 0):
                if len(self._tiers):
                    self._tiers[-1].store.counters.rejected += 1
                self._give_up(candidate)

    def _offer(self, candidate: Candidate, first_level: int) -> bool:
        """Queue the block for the first level from `first_level` on that has room for it."""
        tiers, key, length = self._tiers, candidate.key, len(candidate.data)
        target = tiers.entry(key, length, first_level)
        if target is None:
            return False
        candidate.level = target.level
        if len(tiers) > 1 and tiers.common.admission_filter.must_be_pinned(key):
            candidate.must_pin = target.store.may_pin(length)
        target.admission.offer(candidate)
        return True

    def _admission_finished(self, candidate: Candidate, stored: bool) -> None:
        if stored:
            self._finish(candidate)
        elif not self._offer(candidate.anew(), candidate.level + 1):
            self._give_up(candidate)

    def _give_up(self, candidate: Candidate) -> None:
        """End the admission of a block that no tier takes."""
        if candidate.fetch is not None and candidate.fetch.is_ahead:
            self.unstored.put(candidate.key, candidate.data)
        self._finish(candidate)

    def _finish(self, candidate: Candidate) -> None:
        self.admitting.pop(candidate.key, None)
        if candidate.fetch is not None:
            self._memory.finish_block(candidate.fetch)
