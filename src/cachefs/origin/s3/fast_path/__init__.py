"""Reads small objects with few system calls: over plain HTTP/1.1 connections of our own."""
