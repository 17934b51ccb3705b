"""Writes and shows the metrics of a run: files, terminal, trackers, and a page of charts.

This package may import `config` and `files`.
"""
