"""Checks cache directories that no daemon uses."""
