"""A jitted function that other processes find by its name."""

import functools
from collections.abc import Callable
from typing import Any

import jax


class Jitted:
    """A jitted function of a module; unlike that of `jax.jit` it can be sent to another process, by its name.

    Args:
        function: The function.
        name: The name in the function's module under which the result is found; None means the function's own.
        **options: Those of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, **options: Any):
        functools.update_wrapper(self, function)
        self.__qualname__ = name or function.__qualname__
        self._jitted = jax.jit(function, **options)
        self.compiler_options: dict[str, bool] = options.pop("compiler_options", {})
        # The same without XLA's options, which JAX refuses where another jitted function calls this one.
        self.inner = jax.jit(function, **options)

    def __call__(self, *arguments, **keywords):
        return self._jitted(*arguments, **keywords)

    def __getattr__(self, name: str):
        # A copy is asked for names before it has any attribute.
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __reduce__(self) -> str:
        return self.__qualname__


def jitted(**options: Any) -> Callable[[Callable[..., Any]], Jitted]:
    """Makes a decorator that jits a function with options of `jax.jit`."""
    return lambda function: Jitted(function, **options)
