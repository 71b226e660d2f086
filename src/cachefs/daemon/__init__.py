"""The composition root: builds the objects of one mount, runs them, takes them down in order."""

from cachefs.daemon.run import run

__all__ = ["run"]
