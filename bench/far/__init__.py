"""An origin that is far away: 30 ms for a round trip, 80 MB/s on a connection."""
