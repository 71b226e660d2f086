"""The benchmark: `python -m bench` (see `__main__`). The demo shares its sandbox and its rig."""
