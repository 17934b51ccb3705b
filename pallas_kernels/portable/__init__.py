"""The portable kernels: Triton kernels, launched by jax-triton, for NVIDIA cards of compute capability 7.5 and up."""
