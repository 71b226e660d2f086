"""cachefs: a node-level read cache mount for machine-learning training data."""

__version__ = "0.1.0"
