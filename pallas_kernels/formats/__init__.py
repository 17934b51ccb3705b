"""Number formats of 4-bit weights in plain jnp: the meaning of the bytes. Also a rounding that XLA cannot omit."""
