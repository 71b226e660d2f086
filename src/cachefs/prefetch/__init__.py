"""Prefetching: fetch files that a reader will probably read next, before it reads them."""
