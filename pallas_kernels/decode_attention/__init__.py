"""Decode attention: each row's new token attends to a paged cache of keys and values."""

from pallas_kernels.decode_attention.api import (
    decode_attention,
    plan,
    supports_heads,
    supports_sharing,
    unless_kernel,
)
from pallas_kernels.decode_attention.config import LEAST_SHARED

__all__ = [
    "LEAST_SHARED",
    "decode_attention",
    "plan",
    "supports_heads",
    "supports_sharing",
    "unless_kernel",
]
