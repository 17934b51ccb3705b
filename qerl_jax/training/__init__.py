"""The training loop, and the replay of single steps.

May import every package but `cli`.
"""
