"""Names the compiler's modules after their kernels, so that another process finds them in the compilation cache.

JAX numbers the modules of a process in the order in which they are lowered, and writes the number into the module. The
number becomes part of the key under which a program is cached. So a process that lowers its kernels in another order,
as a resumed run does, would compile them again.
"""

import functools
import os

from jax.experimental.mosaic.gpu import core

# Where the number is written, as `jaxlib/mosaic/gpu/dump.cc` has it.
_NUMBERED = "mosaic_gpu.dump_basename"
# If one of these is set, modules are written to files, which need names of their own.
_DUMPS = "MOSAIC_GPU_DUMP_"


@functools.cache
def use() -> None:
    """Gives modules that are lowered from now on the names of their kernels, unless they are written to files.

    Does nothing if this version of JAX has no such numbers.
    """
    number = getattr(core.dialect, "get_or_set_dump_options", None)
    if number is None or any(name.startswith(_DUMPS) for name in os.environ):
        return

    def named(module):
        attributes = module.operation.attributes
        if _NUMBERED not in attributes:
            attributes[_NUMBERED] = attributes["sym_name"]
        return number(module)

    core.dialect.get_or_set_dump_options = named
