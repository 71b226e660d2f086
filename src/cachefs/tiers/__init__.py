"""Cache directories: what is on disk, and the arithmetic of slots. Nothing here waits."""
