"""The tiers of a mount: which block belongs in which, and moves between them."""
