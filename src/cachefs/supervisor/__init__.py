"""The supervisor owns a mount on the relay's data path, and keeps it when the daemon ends.

`supervisor.py` is its main loop, `child.py` its view of one daemon, `link.py` the daemon's end of
the connection, and `channel.py` the messages. docs/ARCHITECTURE.md has a diagram.
"""
