"""Rewards of completions: how they are called, the ones in stock, judges in processes, the sandbox.

May import `data`, `config` and `files`.
"""
