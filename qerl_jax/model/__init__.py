"""The transformer: architecture, Linen modules, their arithmetic, the KV cache and log-probabilities.

May import `config`, `checked`, `files` and `pallas_kernels`.
"""
