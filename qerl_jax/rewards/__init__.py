"""Rewards of completions: the calling convention, stock rewards, judges in processes, the sandbox.

May import `data`, `config` and `files`.
"""
