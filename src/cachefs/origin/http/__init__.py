"""HTTP/1.1 with compiled threads, for all requests to a store."""
