"""Runs tools and environments for rows, in processes that can be killed.

A `Toolbox` holds the functions that the policy may call; `Toolboxes` are the toolboxes of a run, one for each of its
environments. A `Session` belongs to one row. With an environment, it has its own process, which keeps that row's
state; if a call exceeds its time limit, the process is killed without harm to other rows. Plain functions have no
state and share processes. A process that is not killed is used for another row, with the environment reset.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qerl_jax.config import ToolsConfig
from qerl_jax.rewards import imports, scoring
from qerl_jax.system.checked import require
from qerl_jax.system.process_pool import Failure, Worker
from qerl_jax.tools import environment_host, tool_calls
from qerl_jax.tools.stock_tools import ENVIRONMENTS, TOOLS

type Tool = str | Callable


@dataclasses.dataclass(frozen=True)
class Reply:
    """The result of a tool call.

    Attributes:
        text: The text that the policy sees.
        failed: Whether the text is an error.
    """

    text: str
    failed: bool = False


class Snapshot(types.SimpleNamespace):
    """An environment after its row, as reward functions see it: its public attributes that can be written as JSON."""

    _reward: float | None = None
    _class: str | None = None

    def get_reward(self) -> float | None:
        """Returns the reward that the environment gave its row; None if it gave none or was killed."""
        return self._reward

    def of_class(self, name: str) -> bool:
        """Whether the environment's class has this name."""
        return self._class == name


class _Process:
    """Runs a host in its own process, which can be killed."""

    def __init__(self, load: Sequence[Any], seconds: float):
        self._worker, self._load = Worker(environment_host.__name__, seconds, is_trusted=True), load
        self._loaded = False

    def call(self, function: str, *arguments: Any) -> Any:
        if not self._loaded:
            failure = self._worker.call(json.dumps(["load", self._load]))
            if failure is not None:
                return failure
            self._loaded = True
        result = self._worker.call(json.dumps([function, arguments]))
        # A killed process must load again.
        self._loaded &= not (isinstance(result, Failure) and result.reason != "raised")
        return result

    def stop(self) -> None:
        self._worker.stop()


class _Thread:
    """Runs a host in a thread of this process, for objects that no other process can import.

    A call that hangs is abandoned, and its thread keeps running.
    """

    def __init__(self, make: Callable[[], environment_host.Host], seconds: float):
        self._make, self._seconds = make, seconds
        self._host: environment_host.Host | None = None

    def call(self, function: str, *arguments: Any) -> Any:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            try:
                if self._host is None:
                    self._host = self._make()
                future.set_result(getattr(self._host, function)(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        if not concurrent.futures.wait([future], self._seconds).done:
            self._host = None
            return Failure("timeout")
        # Nothing that a call raises ends the run, not even SystemExit or a TimeoutError of its own.
        error = future.exception()
        return Failure("raised", f"{type(error).__name__}: {error}") if error else future.result()

    def stop(self) -> None:
        self._host = None


type _Runner = _Process | _Thread


class Toolbox:
    """Tools, and at most one environment, whose methods are tools too.

    Attributes:
        schemas: The JSON schema of each tool, which the chat template shows.
        environment: The environment's class; None without one.
        owns_reward: Whether the environment has a method `get_reward`.
        unimportable: Names of the objects that no other process can import. If there are any, all of this toolbox
            runs in this process and cannot be killed.
    """

    def __init__(
        self,
        cfg: ToolsConfig,
        tools: Sequence[Tool] | None = None,
        environment: Tool | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        """Finds tools and environment; starts no process.

        Args:
            cfg: Limits, and names of tools and environment.
            tools: Tools, as functions or names, instead of those that `cfg` names.
            environment: A class, a factory or a name, instead of the one that `cfg` names.
            options: Arguments of the environment, instead of those in `cfg`.

        Raises:
            ValueError: For a tool or environment that cannot be found, a tool without a valid schema, a duplicate
                name, or no tool at all.
        """
        environment = cfg.environment if environment is None else environment
        functions = [_callable(t, TOOLS) for t in (cfg.functions if tools is None else tools)]
        factory = None if environment is None else _callable(environment, ENVIRONMENTS)
        options = dict((cfg.environment_options or {}) if options is None else options)
        methods: list[Callable] = []
        self.environment: type | None = None
        if factory is not None:
            kind = factory if isinstance(factory, type) else _kind(factory, options)
            can_reset = callable(getattr(kind, "reset", None))
            require(can_reset, "tools.environment", kind.__name__, "must have a method reset")
            names = environment_host.tool_names(kind)
            # Bound to a dummy object, so that `self` is not an argument in the schema.
            methods = [types.MethodType(getattr(kind, name), object()) for name in names]
            self.environment = kind
        self.owns_reward = hasattr(self.environment, "get_reward")
        self.schemas = [tool_calls.schema(tool) for tool in (*functions, *methods)]
        names = [schema["function"]["name"] for schema in self.schemas]
        repeated = sorted({name for name in names if names.count(name) > 1})
        require(not repeated, "tools", repeated, "must differ in name")
        require(bool(names), "tools", names, "there must be at least one")
        things = [*functions, *filter(None, [factory])]
        paths = [imports.path_of(thing) or _configured_path(thing, cfg) for thing in things]
        names = [getattr(thing, "__name__", str(thing)) for thing in things]
        self.unimportable = [name for name, path in zip(names, paths, strict=True) if path is None]
        count, seconds = len(functions), cfg.seconds
        load = [paths[:count], None if factory is None else paths[count], options]
        host = lambda: environment_host.Host(functions, factory, options)
        process, thread = lambda: _Process(load, seconds), lambda: _Thread(host, seconds)
        self._make: Callable[[], _Runner] = thread if self.unimportable else process
        self._idle: queue.SimpleQueue[_Runner] = queue.SimpleQueue()
        self._all: list[_Runner] = []
        self.close = weakref.finalize(self, _stop, self._all)

    @property
    def environment_name(self) -> str | None:
        """Name of the environment's class; None without one."""
        return None if self.environment is None else self.environment.__name__

    def observation(self, columns: Mapping[str, Any]) -> str | None:
        """Resets an environment with a row's columns, and returns its first message, or None.

        Raises:
            ValueError: If `reset` fails or exceeds the time limit.
        """
        if self.environment is None:
            return None
        with contextlib.closing(Session(self, columns)) as session:
            observation = session.begin()
        if isinstance(observation, Failure):
            reset = f"reset({', '.join(columns)}) {_told(observation)}"
            raise ValueError(f"environment {self.environment_name}: {reset}")
        return observation

    def take(self) -> _Runner:
        """Returns an idle runner, or makes a new one."""
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        self._all.append(runner := self._make())
        if not self.close.alive:  # `close` may have run before this one was added
            runner.stop()
        return runner

    def give_back(self, runner: _Runner) -> None:
        """Makes a runner available to the next session."""
        self._idle.put(runner)


class Toolboxes:
    """The tools of a run: one toolbox, or one for each environment, which rows name in their column "environment".

    Attributes:
        executor: Threads that run calls; at most `cfg.workers` at a time, by default one per processor.
        unimportable: Those of all toolboxes; see `Toolbox`.
    """

    def __init__(
        self,
        cfg: ToolsConfig,
        tools: Sequence[Tool] | None = None,
        environment: Tool | Mapping[str, Tool] | None = None,
    ):
        """Finds tools and environments; starts no process.

        `tools`, and `environment`, a class or several by name, replace those that `cfg` names.

        Raises:
            ValueError: As for `Toolbox`, and for two classes with the same name.
        """
        environment = cfg.environments or cfg.environment if environment is None else environment
        self._is_one, options = not isinstance(environment, Mapping), cfg.environment_options or {}
        if self._is_one:
            self._boxes = {None: Toolbox(cfg, tools, environment)}
        else:
            self._boxes = {
                name: Toolbox(cfg, tools, factory, options.get(name, {}))
                for name, factory in environment.items()
            }
        names = sorted(kind.__name__ for kind in {box.environment for box in self} - {None})
        rule = "classes must differ in name, by which their rewards are told apart"
        require(len({*names}) == len(names), "tools.environments", names, rule)
        self.unimportable = list(dict.fromkeys(name for box in self for name in box.unimportable))
        self.executor = concurrent.futures.ThreadPoolExecutor(cfg.workers or os.cpu_count() or 1)
        options = {"wait": False, "cancel_futures": True}
        self._shut = weakref.finalize(self, self.executor.shutdown, **options)

    def __iter__(self) -> Iterator[Toolbox]:
        return iter(self._boxes.values())

    def of(self, columns: Mapping[str, Any]) -> Toolbox:
        """Returns the toolbox of a row with these columns.

        Raises:
            ValueError: If there are several environments and the row's column "environment" names none of them.
        """
        if self._is_one:
            return self._boxes[None]
        name = columns.get("environment")
        rule = f"the column must name one of the environments: {', '.join(self._boxes)}"
        is_known = isinstance(name, str) and name in self._boxes
        require(is_known, "environment", name, rule, ValueError)
        return self._boxes[name]

    def session(self, columns: Mapping[str, Any]) -> "Session":
        """Makes the session of a row. As in TRL, if there are several, none gets the column "environment"."""
        return Session(self.of(columns), self._told(columns))

    def observations(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Returns the environment's first message to each of several rows; see `Toolbox.observation`."""
        first = lambda columns: self.of(columns).observation(self._told(columns))
        return list(self.executor.map(first, rows))

    def own_rewards(self) -> list[scoring.Named]:
        """Returns reward functions for environments with `get_reward`, under the names of their classes."""
        owners = (box.environment_name for box in self if box.owns_reward)
        return [(name, scoring.environments_own(name)) for name in dict.fromkeys(owners)]

    def extras(self, rows: int) -> dict[str, Any]:
        """Returns the further arguments of reward functions for rows that were not sampled: empty `environments`."""
        has_some = any(box.environment is not None for box in self)
        return {"environments": [Snapshot() for _ in range(rows)]} if has_some else {}

    def _told(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in columns.items() if self._is_one or k != "environment"}

    def close(self) -> None:
        """Stops all worker processes."""
        self._shut()
        for box in self:
            box.close()


class Session:
    """The tools of one row. Methods block until a call ends or exceeds its limit; one thread at a time may call them.

    No process starts before the first call.

    Attributes:
        toolbox: The toolbox that the tools belong to.
    """

    def __init__(self, toolbox: Toolbox, columns: Mapping[str, Any]):
        self.toolbox, self._columns = toolbox, plain(columns)
        self._runner: _Runner | None = None
        self._begun = self._lost = False

    def begin(self) -> Any:
        """Resets the environment on the first call; returns its first message or None, or a `Failure`."""
        self._runner = self._runner or self.toolbox.take()
        if self._begun:
            return None
        self._begun = True
        return self._noted(self._runner.call("reset", self._columns))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Calls a tool, and returns its result, or the error that it raised, as the policy sees it."""
        if self._lost:
            return error("the environment has ended: an earlier call was stopped")
        if self.toolbox.environment is None:
            runner = self.toolbox.take()
            try:
                return _reply(name, runner.call("call", name, dict(arguments)))
            finally:
                self.toolbox.give_back(runner)
        if not self._begun:
            failure = self.begin()
            if isinstance(failure, Failure):
                self._lost = True
                return error(f"the environment could not begin: it {_told(failure)}")
        return _reply(name, self._noted(self._runner.call("call", name, dict(arguments))))

    def finish(self) -> Snapshot:
        """Returns the environment after the row; without attributes if it was killed or could not be reset."""
        name = self.toolbox.environment_name
        if name is None:
            return Snapshot()
        result: Any = None if self._begun else self.begin()
        if not self._lost and not isinstance(result, Failure):
            result = self._noted(self._runner.call("finish"))
        if self._lost or isinstance(result, Failure):
            return Snapshot(_class=name)
        reward, public = result
        return Snapshot(**public, _reward=reward, _class=name)

    def close(self) -> None:
        """Makes the session's process available to another row."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.toolbox.give_back(runner)

    def abandon(self) -> None:
        """Stops the session's process, in which a call may still be running; later calls start no process."""
        self._begun = self._lost = True
        # The runner is removed first: the call's thread must not give a stopped process to another row.
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.stop()

    def _noted(self, result: Any) -> Any:
        """Returns a result, and records whether the process was killed and the environment's state lost."""
        self._lost |= isinstance(result, Failure) and result.reason != "raised"
        return result


def _kind(factory: Callable, options: Mapping[str, Any]) -> type:
    try:
        return type(factory(**options))
    except Exception as error:
        name = getattr(factory, "__name__", factory)
        raise ValueError(f"tools.environment {name}: cannot be made: {error}") from error


def _callable(thing: Tool, stock: Mapping[str, Callable]) -> Callable:
    function = stock.get(thing) or _imported(thing, stock) if isinstance(thing, str) else thing
    require(callable(function), "tools", thing, "must be a function or a class")
    return function


def _imported(path: str, stock: Mapping[str, Callable]) -> Any:
    forms = "an import path such as 'package.module:name' or 'folder/file.py:name'"
    require(":" in path, "tools", path, f"must be one of {sorted(stock)}, or {forms}")
    imports.require_file(path.rpartition(":")[0], "tools", path)
    try:
        return imports.attribute(path)
    except ValueError as error:
        if not path.startswith("__main__:") and "<locals>" not in path:
            raise
        rule = "was defined in a script, a notebook or a function: define it in a module or a file, or "
        raise ValueError(f"tools: got {path!r}; {rule}give it to Policy.with_tools") from error


def _configured_path(thing: Callable, cfg: ToolsConfig) -> str | None:
    """Returns the path "file.py:name" by which a config names an object; None if it does not name it so."""
    for path in cfg.paths:
        file, _, name = path.rpartition(":")
        if file.endswith(".py") and name == getattr(thing, "__qualname__", None):
            return f"{os.path.abspath(file)}:{name}"
    return None


def _reply(name: str, result: Any) -> Reply:
    """Returns the result of a tool call as the policy sees it."""
    if isinstance(result, Failure):
        return error(result.detail if result.reason == "raised" else f"{name} {_told(result)}")
    return Reply(result)


def error(text: str) -> Reply:
    """Returns an error as the policy sees it: JSON with the key "error"."""
    return Reply(json.dumps({"error": text}, ensure_ascii=False), failed=True)


def _told(failure: Failure) -> str:
    return {
        "timeout": "took too long and was stopped",
        "died": "ended its process",
        "raised": f"raised {failure.detail}",
    }[failure.reason]


def plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns columns as plain JSON values: arrays become lists, and other objects text."""
    listed = lambda value: value.tolist() if hasattr(value, "tolist") else str(value)
    return json.loads(json.dumps(dict(columns), default=listed))


def _stop(runners: Sequence[_Runner]) -> None:
    for runner in runners:
        runner.stop()
