"""What cards reach at best: the limits that the times of scripts/bench_*.py are compared with."""

# A copy within an H200 reaches 4.3 of its nominal 4.8 TB/s. Other cards are taken to reach the same share.
REACHED = 4.3 / 4.8
# Operations per second that JAX reaches on an H200, in a product of 8192^3 in bfloat16.
BF16_RATE = 790e12


def bandwidth() -> float:
    """Bytes per second that the device at hand reaches: an H200's on a CPU."""
    from pallas_kernels import runtime

    return runtime.device().bandwidth * REACHED
