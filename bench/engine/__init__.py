"""The cache engine without kernel and network: what it hits, holds, and costs."""
