"""Reward functions: calling convention, stock rewards, math judges, the sandbox, and tools and environments.

May import `data`, `config` and `files`.
"""
