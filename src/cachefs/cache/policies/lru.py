"""Evict the least recently used blocks, by sampled ages. Most caches do this."""

from cachefs.cache.policies.base import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """For workloads that soon read the same blocks again. It performs badly in shuffled epochs."""

    name = "lru"
