"""S3 and OSS, with a client of our own."""
