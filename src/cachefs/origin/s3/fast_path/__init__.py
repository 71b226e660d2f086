"""Sends small requests with few system calls: over its own HTTP/1.1 connections, plain or TLS."""
