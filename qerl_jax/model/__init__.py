"""The transformer: sizes, Linen modules, their arithmetic, the key/value cache, log-probabilities.

May import `config`, `checked`, `files` and `pallas_kernels`.
"""
