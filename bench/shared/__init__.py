"""Measure the shared tier: several nodes on one machine, three memcached, and a distant origin."""
