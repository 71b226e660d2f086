"""Between the kernel and the namespace: decode a request, make one call, encode the reply."""
