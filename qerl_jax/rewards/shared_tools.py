"""Tools of a run on several hosts: the first process runs them, and sends the replies to the others.

So tools run where rewards are computed, and a tool that keeps something between calls keeps it once. A process that
samples a row reads the row's calls itself; only the calls and the replies are sent.
"""

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax import messages
from qerl_jax.config import ToolsConfig
from qerl_jax.hosts import HostLost, Hosts
from qerl_jax.rewards.environments import Reply, Session, Snapshot, Tool, Toolboxes, plain

messages.sent(Reply)

# All processes make the same objects in the same order, so equal numbers name the same one.
_numbers = itertools.count()


class SharedToolboxes(Toolboxes):
    """The tools of a run whose processes are `hosts`; with one process, `Toolboxes`."""

    def __init__(
        self,
        cfg: ToolsConfig,
        tools: Sequence[Tool] | None = None,
        environment: Tool | Mapping[str, Tool] | None = None,
        hosts: Hosts = Hosts(),
    ):
        """Finds tools and environments, and lets the first process wait for calls of the others.

        Args:
            cfg: See `Toolboxes`, as for the following.
            tools: See there.
            environment: See there.
            hosts: The processes of the run; all of them must make this object.

        Raises:
            ValueError: See `Toolboxes`.
        """
        super().__init__(cfg, tools, environment)
        self._hosts, self._requests, self._rows = hosts, itertools.count(), itertools.count()
        self._name = f"tools/{next(_numbers)}" if hosts.count > 1 else ""
        self._closed = threading.Event()
        others = range(1, hosts.count) if hosts.leads else ()
        self._servers = [
            threading.Thread(target=self._serve, args=(other,), daemon=True) for other in others
        ]
        for each in self._servers:
            each.start()

    def session(self, columns: Mapping[str, Any]) -> "Session | FarSession":
        """See `Toolboxes`; outside of the first process a session that the first process holds."""
        if self._hosts.leads:
            return super().session(columns)
        return FarSession(self, columns, next(self._rows))

    def observations(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """See `Toolboxes`. All processes must call this; only the first one resets environments."""
        return self._hosts.told(lambda: super(SharedToolboxes, self).observations(rows))

    def close(self) -> None:
        """Ends all processes of tools; calls of other processes are no longer answered."""
        self._closed.set()
        for each in self._servers:
            each.join()
        super().close()

    def ask(self, row: int, columns: Mapping[str, Any], method: str, *arguments: Any) -> str:
        """Asks the first process to call a method of a row's session.

        Args:
            row: Number of the row, which this process chose.
            columns: What an environment is reset with.
            method: "call", "finish" or "abandon".
            *arguments: Arguments of the method.

        Returns:
            The name by which `reply` finds the result; "abandon" has none.

        Raises:
            HostLost: When the first process cannot be reached.
        """
        name = f"{self._name}/{self._hosts.index}/{next(self._requests)}"
        self._hosts.send(name, [row, dict(columns), method, list(arguments)])
        return f"{name}/reply"

    def reply(self, name: str) -> Any:
        """The result of what `ask` asked; waits for it.

        Raises:
            HostLost: When the first process has ended or failed, and after `close`.
        """
        found = self._hosts.received(name, self._closed.is_set)
        if found is None:
            raise HostLost("the run has ended before a tool replied")
        return found[0]

    def _serve(self, other: int) -> None:
        """Takes the requests of another process in their order, and starts each in a thread of the executor."""
        sessions: dict[int, Session] = {}
        # The main thread finds by itself that a process is lost.
        with contextlib.suppress(HostLost), self._hosts.farewell():
            for number in itertools.count():
                name = f"{self._name}/{other}/{number}"
                found = self._hosts.received(name, self._closed.is_set)
                if found is None:
                    return
                row, columns, method, arguments = found[0]
                session = sessions.pop(row, None) or super().session(columns)
                if method == "abandon":
                    session.abandon()
                    continue
                if method == "call" and session.toolbox.environment is not None:
                    sessions[row] = session
                self.executor.submit(self._answer, f"{name}/reply", session, method, arguments)

    def _answer(self, name: str, session: Session, method: str, arguments: Sequence[Any]) -> None:
        """Calls a method of a session, and sends the result."""
        # Errors of a tool are replies. Any other error ends the run, and all processes say why.
        with self._hosts.farewell():
            if method == "call":
                found: Any = session.call(*arguments)
            else:
                with contextlib.closing(session):
                    found = vars(session.finish())
            self._hosts.send(name, found)


class FarSession:
    """One row's tools, which run in the first process; it has the methods of `Session` that a row needs.

    Attributes:
        toolbox: The toolbox that the tools come from, as this process knows it.
    """

    def __init__(self, boxes: SharedToolboxes, columns: Mapping[str, Any], row: int):
        self.toolbox = boxes.of(columns)
        self._boxes, self._columns, self._row = boxes, plain(columns), row
        self._has_state = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """See `Session`."""
        self._has_state = self.toolbox.environment is not None
        return self._asked("call", name, dict(arguments))

    def finish(self) -> Snapshot:
        """See `Session`; the first process then leaves the environment to another row."""
        if self.toolbox.environment is None:
            return Snapshot()
        self._has_state = False
        return Snapshot(**self._asked("finish"))

    def close(self) -> None:
        """Does nothing: see `finish`."""

    def abandon(self) -> None:
        """See `Session`; does not wait."""
        if self._has_state:
            self._has_state = False
            with contextlib.suppress(HostLost):
                self._boxes.ask(self._row, self._columns, "abandon")

    def _asked(self, method: str, *arguments: Any) -> Any:
        """What the first process gives for a method."""
        return self._boxes.reply(self._boxes.ask(self._row, self._columns, method, *arguments))
