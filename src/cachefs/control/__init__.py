"""How other processes ask a daemon about itself: one Unix socket per mount."""
