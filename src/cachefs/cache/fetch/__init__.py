"""Blocks on their way from the origin."""
