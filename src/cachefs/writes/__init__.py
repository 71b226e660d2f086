"""What processes write to the mount: unsent changes, uploads, and changes of names."""
