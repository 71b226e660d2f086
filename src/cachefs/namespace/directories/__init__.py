"""Lists directories: new and paused listings, the snapshots they give, and mtimes."""
