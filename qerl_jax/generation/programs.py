"""Jits functions of a policy for its kind of weights and for the devices that hold it."""

import dataclasses
import functools
from typing import Any

from qerl_jax.compilation.jitted import Jitted
from qerl_jax.config import DENSE
from qerl_jax.distributed import sharding
from qerl_jax.generation.device_pool import BY_HEADS
from qerl_jax.model.transformer import Transformer

# XLA's Triton GEMM first copies each 16-bit weight out of the stack of layers; cuBLAS reads it in place.
IN_PLACE = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function of a policy: one version for packed weights, and one for 16-bit weights (`IN_PLACE`)."""

    packed: Jitted
    dense: Jitted

    def __call__(self, *arguments, model: Transformer, **static):
        return self.of(model)(*arguments, model=model, **static)

    def of(self, model: Transformer) -> Jitted:
        """Returns the version for a model's weights."""
        return self.dense if model.weights in DENSE else self.packed


def program(*static_argnames: str, gives: Any = BY_HEADS):
    """Makes a decorator that jits a function of variables, pool and further arrays; the pool is donated.

    If a group of devices shares the base, each computes on its own parts. If the group decodes rows together (tensor
    parallel), each runs its part of the model (`Transformer.own_part`), with the pool of its heads. `gives` then has the
    sharding of each member of the result; False for one that is the same on all devices.
    """

    def jitted(function) -> Program:
        @functools.wraps(function)  # keeps the signature, from which jit takes argument names
        def grouped(*arrays, **static):
            model, how = static["model"], {}
            of_device = functools.partial(function, **static)
            if model.tensor > 1:
                of_device = functools.partial(_of_part, function, model, static)
                how = {"places": {1: BY_HEADS}, "gives_own": gives}
            return sharding.in_group(model.group, of_device, **how)(*arrays)

        options = {"static_argnames": static_argnames, "donate_argnames": "pool"}
        name = function.__qualname__
        return Program(
            packed=Jitted(grouped, f"{name}.packed", **options),
            dense=Jitted(grouped, f"{name}.dense", **options, compiler_options=IN_PLACE),
        )

    return jitted


def _of_part(function, model: Transformer, static: dict[str, Any], variables, *arrays):
    """Calls a function with this device's part of the model."""
    static = static | {"model": model.own_part}
    return function(model.division.local(variables), *arrays, **static)
