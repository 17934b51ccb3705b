"""Attention of one new token per row over a paged cache of keys and values."""

from pallas_kernels.decode_attention.api import (
    decode_attention,
    plan,
    supports_heads,
    supports_sharing,
    unless_kernel,
)

__all__ = ["decode_attention", "plan", "supports_heads", "supports_sharing", "unless_kernel"]
