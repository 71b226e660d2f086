"""Where commands write what they print."""
