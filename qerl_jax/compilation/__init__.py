"""Programs of a run before they are called: traced by other processes, stored, and compiled by threads.

May import `config` and `system`.
"""
