"""Quantizes 16-bit model folders to 4 bits, by rounding to nearest or with calibration.

May import `checkpoint`, `model`, `data` and the packages that those import.
"""
