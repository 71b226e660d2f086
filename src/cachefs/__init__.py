"""cachefs: a node-level cache mount for machine-learning training data."""

try:
    from cachefs._version import __version__  # scripts/version writes it
except ModuleNotFoundError:  # a checkout in which nothing was built
    __version__ = "0+unknown"

__all__ = ["__version__"]
