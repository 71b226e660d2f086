"""Everything that fsspec opens."""
