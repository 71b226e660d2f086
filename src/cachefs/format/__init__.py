"""Bytes on disk and nothing else: every layout and every file name. No I/O."""
