"""Where the data lives: one `Origin` per mount."""
