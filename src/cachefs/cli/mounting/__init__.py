"""What `cachefs mount` and `mount.cachefs` need to serve a mount."""
