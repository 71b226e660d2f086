"""Sends the content of written files to the origin, and then to the cache."""
