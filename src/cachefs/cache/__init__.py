"""Blocks: look up, fetch once, admit, evict."""
