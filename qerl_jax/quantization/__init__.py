"""16-bit folders to 4-bit ones, rounded to nearest or calibrated.

May import `checkpoint`, `model`, `data` and what those import.
"""
