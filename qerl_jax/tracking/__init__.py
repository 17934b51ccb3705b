"""Where the numbers of a run go: files, terminal, trackers, and a page of curves.

May import `config` and `files`.
"""
