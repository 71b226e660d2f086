"""cachefs beside what others mount object stores with: `python -m bench.peers` (see `__main__`)."""
