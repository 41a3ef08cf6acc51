"""Splitting a GGUF into stage slices, and reading what a split has left.

Knows files and the native layer; nothing of requests.
"""
