"""Evaluation: benchmarks, protocols, estimates with confidence intervals, comparisons and pass rates.

May import `rl`, `checkpoint`, `tracking`, `memory` and what those import.
"""
