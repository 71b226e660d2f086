"""The routes of the control socket, one module per subject."""
