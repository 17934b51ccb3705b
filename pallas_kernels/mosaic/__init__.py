"""Shared code of kernels in Pallas Mosaic GPU: operations on registers, memory and threads that Pallas does not
offer.

Only this package uses Mosaic GPU names that JAX does not promise to keep. Modules here import Pallas, which takes
half a second, so a function that launches a kernel imports them itself.
"""
