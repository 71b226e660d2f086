"""Changes of names: create, remove, rename, directories, and attributes."""
