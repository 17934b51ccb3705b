"""Sampling: the engine, its scheduler and KV-cache pages, token sampling, and text generation for users.

This package may import `checkpoint`, `model`, `data` and what those import.
"""
