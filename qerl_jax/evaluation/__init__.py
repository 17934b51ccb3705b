"""Evaluation: benchmarks, protocols, estimates with confidence intervals, comparisons and pass rates.

May import `rl`, `checkpoint`, `tracking`, `planning` and what those import.
"""
