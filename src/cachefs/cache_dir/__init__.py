"""Cache directories: the files on disk, and the slots in them. No code here awaits."""
