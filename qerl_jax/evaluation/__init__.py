"""How often a policy is right: benchmarks, protocols, estimates with intervals, pass rates.

May import `rl`, `checkpoint`, `tracking`, `memory` and what those import.
"""
