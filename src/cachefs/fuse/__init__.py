"""The FUSE layer between kernel and namespace: it decodes requests and encodes replies."""
