"""Reinforcement learning: noise, rollouts, advantages, losses, the optimizer and the update.

May import `generation`, `rewards` and what those import.
"""
