"""Jitted functions of a policy: compiled for its kind of weights, and for the devices that hold it."""

import dataclasses
import functools
from typing import Any

import jax

from qerl_jax import sharding
from qerl_jax.config import DENSE
from qerl_jax.generation.device_pool import BY_HEADS
from qerl_jax.model.transformer import Transformer

# XLA's Triton GEMM first copies each 16-bit weight out of the stack of layers; cuBLAS reads it in place.
IN_PLACE = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function of a policy, as XLA compiles it for packed weights and for others (`IN_PLACE`)."""

    packed: Any
    dense: Any

    def __call__(self, *arguments, model: Transformer, **static):
        return self.of(model)(*arguments, model=model, **static)

    def of(self, model: Transformer):
        """The jitted function for a model's weights."""
        return self.dense if model.weights in DENSE else self.packed


def program(*static_argnames: str, gives: Any = BY_HEADS):
    """Compiles a function of arrays, each device of a group that shares the base computing on its own parts.

    Where the devices decode rows together each runs its part of the model (`Transformer.own_part`), with the pool of
    its heads.

    Args:
        *static_argnames: Names of arguments that are no arrays.
        gives: How the members of the result are divided then; False for those that are the same on all devices.
    """

    def jitted(function) -> Program:
        @functools.wraps(function)  # with its signature, by which arguments are named
        def grouped(*arrays, **static):
            model, how = static["model"], {}
            of_device = functools.partial(function, **static)
            if model.tensor > 1:
                of_device = functools.partial(_of_part, function, model, static)
                how = {"places": {1: BY_HEADS}, "gives_own": gives}
            return sharding.in_group(model.group, of_device, **how)(*arrays)

        options = {"static_argnames": static_argnames, "donate_argnames": "pool"}
        return Program(
            packed=jax.jit(grouped, **options),
            dense=jax.jit(grouped, **options, compiler_options=IN_PLACE),
        )

    return jitted


def _of_part(function, model: Transformer, static: dict[str, Any], variables, *arrays):
    """Calls a function with the part of a model that this device has."""
    static = static | {"model": model.own_part}
    return function(model.division.own(variables), *arrays, **static)
