"""Policies on disk: 16-bit and 4-bit bases, PEFT adapters, exports, and the state of a run.

May import `model`, `data` and the packages that those import.
"""
