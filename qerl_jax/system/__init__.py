"""The machine a program runs on: files, locks, worker processes, early calls, and checked dataclasses.

May import nothing of the project.
"""
