"""The transformer: sizes, Linen modules, their arithmetic, the key/value cache, log-probabilities.

May import `config` and `pallas_kernels`.
"""
