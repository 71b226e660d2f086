"""The shared tier: blocks that many nodes share, on memcached (docs/SHARED_TIER.md)."""
