"""Number formats of 4-bit weights in plain jnp: what the bytes mean. And a rounding that XLA may not leave out."""
