"""Writes and shows the metrics of a run: files, terminal, trackers, and a page of charts.

May import `config` and `system`.
"""
