"""Shared code of the Mosaic GPU kernels: launches, and operations on registers, memory and threads that Pallas lacks.

Only this package uses Mosaic GPU names that are not JAX's public API. Importing its modules imports Pallas, which
takes half a second, so a function that launches a kernel imports them only when it is called.
"""
