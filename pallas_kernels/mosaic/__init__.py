"""What kernels in Pallas Mosaic GPU share: registers, memory and threads where Pallas has no words for them.

The only place that uses names of Mosaic GPU which JAX does not promise to keep. Modules here import Pallas,
which takes half a second: what starts a kernel imports them inside of the function.
"""
