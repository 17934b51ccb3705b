"""Tools and one environment, called by name, as they run in a worker process of `environments`.

Only the standard library is imported here, so that a process starts quickly.
"""

import asyncio
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
    """Methods of an environment's class that the policy may call: those whose names begin with a letter."""
    methods = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in _OWN]


class Host:
    """Tool functions, and an environment that is made once and reset for each row."""

    def __init__(
        self,
        functions: Sequence[Callable],
        environment: Callable | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        """Makes the environment."""
        self._tools = {function.__name__: function for function in functions}
        self._environment = None if environment is None else environment(**(options or {}))
        if self._environment is not None:
            names = tool_names(type(self._environment))
            self._tools |= {name: getattr(self._environment, name) for name in names}

    def reset(self, columns: Mapping[str, Any]) -> str | None:
        """Begins a row; returns the environment's first message as text, or None."""
        if self._environment is None:
            return None
        said = self._awaited(self._environment.reset(**columns))
        if not isinstance(said, str | None):
            raise TypeError(f"reset must return a text or None; got {type(said).__name__}")
        return said

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool as text."""
        if name not in self._tools:
            raise LookupError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        return str(self._awaited(self._tools[name](**arguments)))

    def finish(self) -> tuple[float | None, dict[str, Any]]:
        """The environment's own reward, or None, and its public attributes that are plain values."""
        environment = self._environment
        if environment is None:
            return None, {}
        reward = None
        if hasattr(environment, "get_reward"):
            reward = self._awaited(environment.get_reward())
            reward = None if reward is None else float(reward)
        public = {k: v for k, v in vars(environment).items() if not k.startswith("_")}
        public = {name: value for name, value in public.items() if _is_plain(value)}
        # The values are the same with and without a process of their own, and later rows cannot change them.
        return reward, json.loads(json.dumps(public))

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls: clients and tasks that an environment keeps belong to that of their first use."""
        loop = asyncio.new_event_loop()
        weakref.finalize(self, _close, loop)
        return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    # A call that hangs runs in it still.
    if not loop.is_running():
        loop.close()


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# A worker process has one host, made by the first request.
_host: Host | None = None


def load(functions: Sequence[str], environment: str | None, options: Mapping[str, Any]) -> None:
    """Makes the host of this process from import paths; a second call does nothing."""
    global _host
    if _host is None:
        factory = None if environment is None else imports.attribute(environment)
        _host = Host([imports.attribute(path) for path in functions], factory, options)


def reset(columns: Mapping[str, Any]) -> str | None:
    """See `Host.reset`."""
    return _host.reset(columns)


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """See `Host.call`."""
    return _host.call(name, arguments)


def finish() -> tuple[float | None, dict[str, Any]]:
    """See `Host.finish`."""
    return _host.finish()
