"""What fits: device memory by the plan of a run, and the cards that can hold it.

May import `rl` and the packages that it imports.
"""
