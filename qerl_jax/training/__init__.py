"""The training loop, and the replay of single steps.

This package may import all packages except `cli`.
"""
