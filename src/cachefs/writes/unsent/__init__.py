"""What users see of unsent files, and what they decide about them."""
