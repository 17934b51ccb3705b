"""The portable path: Triton kernels, through jax-triton, for NVIDIA cards of compute capability 7.5 and up."""
