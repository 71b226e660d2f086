"""The process that a mount on the relay's data path belongs to: it outlives the daemon.

`supervisor.py` is its life, `child.py` one daemon seen from it, `link.py` the same connection seen
from the daemon, `channel.py` what goes over it. docs/ARCHITECTURE.md has the picture.
"""
