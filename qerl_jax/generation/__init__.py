"""Sampling: the engine, its schedule and pages, how a token is sampled, texts for notebooks and files.

May import `checkpoint`, `model`, `data` and what those import.
"""
