"""The background work on one cache directory: moving blocks together, removing, verifying."""
