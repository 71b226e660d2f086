"""The composition root: builds the objects of one mount, runs them and closes them in order.

The entry point is `run.py`, or `supervised.py` for a daemon in its own process. This file imports
nothing, because the order of imports in `supervised.py` matters.
"""
