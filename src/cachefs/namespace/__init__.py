"""Names to inodes: what exists, since when that is known, and how its bytes are read."""
