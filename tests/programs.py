"""What JAX compiles while a test calls something."""

import re

import jax


def compiled(caplog, f):
    """Returns the names of the programs that JAX compiled during a call."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        f()
    found = (re.match(r"Compiling (?:jit\()?(\w+)", record.message) for record in caplog.records)
    return [match[1] for match in found if match]
