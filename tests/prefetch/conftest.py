from tests.namespace.conftest import clock, origin, reading, tree

__all__ = ["clock", "origin", "reading", "tree"]
