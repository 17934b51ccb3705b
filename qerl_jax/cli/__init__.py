"""The command `qerl`.

May import every package.
"""
