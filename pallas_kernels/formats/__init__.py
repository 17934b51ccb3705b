"""Definitions of 4-bit number formats in plain jnp, and a rounding that XLA cannot omit."""
