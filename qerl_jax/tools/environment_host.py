"""Runs tools and one environment by name, in a worker process of `environments`.

Only the standard library and small modules of this package are imported, so that a process starts quickly.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qerl_jax.rewards import imports

# Methods of an environment that are not tools.
_OWN = ("reset", "get_reward")


def tool_names(environment: type) -> list[str]:
    """Returns the methods of an environment's class that are tools: public ones, without `reset` and `get_reward`."""
    methods = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in _OWN]


class Host:
    """Tool functions, and at most one environment, which is made once and reset for each row."""

    def __init__(
        self,
        functions: Sequence[Callable],
        environment: Callable | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        """Makes the environment with its options."""
        self._tools = {function.__name__: function for function in functions}
        self._environment = None if environment is None else environment(**(options or {}))
        if self._environment is not None:
            names = tool_names(type(self._environment))
            self._tools |= {name: getattr(self._environment, name) for name in names}

    def reset(self, columns: Mapping[str, Any]) -> str | None:
        """Resets the environment with a row's columns; returns its first message as text, or None.

        Raises:
            TypeError: If `reset` returns something else.
        """
        if self._environment is None:
            return None
        observation = self._awaited(self._environment.reset(**columns))
        if not isinstance(observation, str | None):
            raise TypeError(f"reset must return a text or None; got {type(observation).__name__}")
        return observation

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns its result as text.

        Raises:
            LookupError: If there is no tool of that name.
        """
        if name not in self._tools:
            raise LookupError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        return str(self._awaited(self._tools[name](**arguments)))

    def finish(self) -> tuple[float | None, dict[str, Any]]:
        """Returns the environment's own reward, or None, and its public attributes that can be written as JSON."""
        environment, public = self._environment, {}
        if environment is None:
            return None, {}
        judge = getattr(environment, "get_reward", lambda: None)
        reward = self._awaited(judge())
        for name, value in vars(environment).items():
            # Copied through JSON, so that values are the same in a thread as from a process, and later rows cannot
            # change them. What JSON does not take is left out.
            with contextlib.suppress(TypeError, ValueError):
                public |= {} if name.startswith("_") else {name: json.loads(json.dumps(value))}
        return None if reward is None else float(reward), public

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop for all calls: clients and tasks of an environment stay bound to their first loop."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, _close, loop)
        return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    # A call that hangs may still run in the loop.
    if not loop.is_running():
        loop.close()


# A worker process has one host, made by the first request.
_host: Host | None = None


def load(functions: Sequence[str], environment: str | None, options: Mapping[str, Any]) -> None:
    """Makes the host of this process from import paths; a second call does nothing."""
    global _host
    if _host is None:
        factory = None if environment is None else imports.attribute(environment)
        _host = Host([imports.attribute(path) for path in functions], factory, options)


def __getattr__(name: str) -> Any:
    """Gives the methods of this process's host, which requests call like functions of this module."""
    return getattr(_host, name)
