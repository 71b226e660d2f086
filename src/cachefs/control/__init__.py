"""How other processes query and control a daemon: one Unix socket per mount, and metrics on TCP."""
