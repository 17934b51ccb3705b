"""Programs of a run before they are called: traced once, stored, and compiled in other processes.

May import `config` and `system`.
"""
