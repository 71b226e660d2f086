"""What users have written and the origin does not have yet (docs/formats/spool.md).

`spool.py` holds the staged files of one writable mount. A staged file (`staged_file.py`) is the
local content of one inode while it differs from the origin. Its bytes are in a sparse spool file
(`spool_files.py`), and everything else is in memory and in the spool's journal (`journal.py`), from
which the next daemon restores it.
"""
