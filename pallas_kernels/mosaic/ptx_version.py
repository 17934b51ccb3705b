"""Has JAX ask for the version of ptxas once in a process.

JAX asks before each conversion to or from numbers of at most 8 bits. Each time ptxas is started, which takes 20 ms: a
third of the time of lowering a decode program for packed weights.
"""

import functools

from jax.experimental.mosaic.gpu import fragmented_array


@functools.cache
def keep() -> None:
    """Keeps the first answer from now on. Does nothing if this version of JAX asks in another way."""
    extension = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    ask = getattr(extension, "_get_ptxas_isa_version", None)
    if ask is not None:
        extension._get_ptxas_isa_version = functools.cache(ask)
