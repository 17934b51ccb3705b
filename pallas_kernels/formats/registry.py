"""The packed number formats by name."""

import dataclasses
import functools

from pallas_kernels.formats import mxfp4, nf4, nvfp4
from pallas_kernels.formats.number_format import NumberFormat, Options, PackedTensor

FORMATS: dict[str, NumberFormat] = {
    form.name: form for form in (nvfp4.FORMAT, mxfp4.FORMAT, nf4.FORMAT)
}


@functools.cache
def with_options(name: str, options: Options) -> NumberFormat:
    """Returns a format with the given options; the same object at each call, so that nothing is compiled twice."""
    return dataclasses.replace(FORMATS[name], options=options)


def format_of(t: PackedTensor) -> NumberFormat:
    """Returns the format of a packed weight, with default options."""
    return next(form for form in FORMATS.values() if isinstance(t, form.tensor))
