"""Find the mounts that a command is about, and send requests about paths in them."""
