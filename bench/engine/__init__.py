"""Measure the cache engine without kernel and network: hit ratio, space, and costs."""
