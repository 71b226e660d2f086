"""What draws on a terminal."""
