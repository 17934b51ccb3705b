"""QeRL-JAX: reinforcement learning of language models on frozen 4-bit weights."""
