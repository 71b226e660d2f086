"""What `cachefs mount` and `mount.cachefs` need to start a daemon."""
