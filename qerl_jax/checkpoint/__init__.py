"""Policies on disk: bases in 16 and 4 bits, PEFT adapters, exports, and the state of a run.

May import `model`, `data` and what those import.
"""
