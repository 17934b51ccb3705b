"""Adaptive quantization noise: the schedule of sigma, the draw of the vectors, and the noise of a run.

The idea of the paper (arXiv 2510.11696, section 3.3).

May import `model` and `config`.
"""
