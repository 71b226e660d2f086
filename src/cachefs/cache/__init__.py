"""The block cache: looks up, fetches, admits, evicts and moves blocks."""
