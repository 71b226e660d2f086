"""Manifests: lists of files with their versions. cachefs writes them and mounts them."""
