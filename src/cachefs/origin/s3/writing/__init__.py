"""Writes to S3 and OSS."""
