"""Shared code of kernels in Pallas Mosaic GPU: launches, and operations on registers, memory and threads that Pallas
does not offer.

Only this package uses Mosaic GPU names that JAX does not promise to keep. Importing its modules imports Pallas, which
takes half a second, so a function that launches a kernel imports them when it is called.
"""
