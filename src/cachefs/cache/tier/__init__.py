"""One cache directory at work: its index, slab files, admission and eviction."""
