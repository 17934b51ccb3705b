"""The transformer: architecture, Linen modules, their arithmetic, the KV cache and log-probabilities.

May import `config`, `distributed`, `system` and `pallas_kernels`.
"""
