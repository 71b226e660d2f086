"""Compare cachefs with other mounts of object stores: `python -m bench.peers` (see `__main__`)."""
