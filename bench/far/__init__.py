"""Measure a distant origin: 30 ms per round trip, 80 MB/s per connection."""
