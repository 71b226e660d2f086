"""The composition root: builds the objects of one mount, runs them, takes them down in order.

`run.py` is the way in, `supervised.py` that of a process of its own. Nothing is imported here: what
`supervised.py` imports has an order.
"""
