"""Layouts of all files on disk, and all file names. This package does no I/O."""
