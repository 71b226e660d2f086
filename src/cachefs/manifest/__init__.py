"""Manifests: lists of files with their versions, written and mounted."""
