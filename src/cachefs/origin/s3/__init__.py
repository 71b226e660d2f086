"""S3 and OSS, on obstore and a client of our own for small files and listings."""
