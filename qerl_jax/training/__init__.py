"""The loop of training, and steps that are run once more.

May import every package but `cli`.
"""
