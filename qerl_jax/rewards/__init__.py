"""Reward functions: calling convention, stock rewards, math judges and the sandbox.

May import `data`, `config` and `system`.
"""
