"""Maps names to inodes: which names exist, how old that information is, and how files are read."""
