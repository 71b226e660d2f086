"""Least recently used, in order of sampled ages: what most caches do."""

from cachefs.cache.policies.base import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """For reads that favour what was read lately. Shuffled epochs defeat it."""

    name = "lru"
