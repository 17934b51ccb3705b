"""Tools of a run on several hosts: the first process runs them and sends the replies to the others.

So tools run where rewards are computed, and the state of a tool exists only once. The process that samples a row
parses the row's calls itself; only calls and replies are sent.
"""

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.config import ToolsConfig
from qerl_jax.distributed import messages
from qerl_jax.distributed.hosts import HostLost, Hosts
from qerl_jax.tools.environments import Reply, Session, Snapshot, Tool, Toolboxes, plain

messages.sent(Reply)

# All processes make these objects in the same order, so the same number refers to the same object.
_numbers = itertools.count()


class SharedToolboxes(Toolboxes):
    """The tools of a run on the processes `hosts`; with one process it behaves like `Toolboxes`."""

    def __init__(
        self,
        cfg: ToolsConfig,
        tools: Sequence[Tool] | None = None,
        environment: Tool | Mapping[str, Tool] | None = None,
        hosts: Hosts = Hosts(),
    ):
        """Does what `Toolboxes` does, and starts threads in the first process that serve the others.

        All processes of the run, `hosts`, must make this object.
        """
        super().__init__(cfg, tools, environment)
        self._hosts, self._requests, self._rows = hosts, itertools.count(), itertools.count()
        self._name = f"tools/{next(_numbers)}" if hosts.count > 1 else ""
        self._closed = threading.Event()
        self._servers = []
        for other in range(1, hosts.count) if hosts.leads else ():
            self._servers.append(threading.Thread(target=self._serve, args=(other,), daemon=True))
            self._servers[-1].start()

    def session(self, columns: Mapping[str, Any]) -> "Session | FarSession":
        """Returns the session of a row, as `Toolboxes.session`; its tools always run in the first process."""
        if self._hosts.leads:
            return super().session(columns)
        return FarSession(self, columns, next(self._rows))

    def observations(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Returns the first message to each row, as `Toolboxes.observations`.

        All processes must call this; only the first one resets environments.
        """
        return self._hosts.told(lambda: super(SharedToolboxes, self).observations(rows))

    def close(self) -> None:
        """Stops the worker processes of tools, and stops serving the other processes."""
        self._closed.set()
        for server in self._servers:
            server.join()
        super().close()

    def ask(self, row: int, columns: Mapping[str, Any], method: str, *arguments: Any) -> str:
        """Asks the first process to call a method of a row's session: "call", "finish" or "abandon". Does not wait.

        The row has the number that this process gave it, and the columns with which an environment is reset.

        Returns:
            The name to pass to `reply` for the result; "abandon" has no result.

        Raises:
            HostLost: If the first process cannot be reached.
        """
        name = f"{self._name}/{self._hosts.index}/{next(self._requests)}"
        self._hosts.send(name, [row, dict(columns), method, list(arguments)])
        return f"{name}/reply"

    def reply(self, name: str) -> Any:
        """Waits for the result of the call for which `ask` returned this name, and returns it.

        Raises:
            HostLost: If the first process has ended or failed, or after `close`.
        """
        message = self._hosts.received(name, self._closed.is_set)
        if message is None:
            raise HostLost("the run has ended before a tool replied")
        return message[0]

    def _serve(self, other: int) -> None:
        """Receives the requests of another process in order, and runs each in a thread of the executor."""
        sessions: dict[int, Session] = {}
        # If a process is lost, the main thread notices it by itself.
        with contextlib.suppress(HostLost), self._hosts.farewell():
            for number in itertools.count():
                name = f"{self._name}/{other}/{number}"
                message = self._hosts.received(name, self._closed.is_set)
                if message is None:
                    return
                row, columns, method, arguments = message[0]
                session = sessions.pop(row, None) or super().session(columns)
                if method == "abandon":
                    session.abandon()
                    continue
                if method == "call" and session.toolbox.environment is not None:
                    sessions[row] = session
                self.executor.submit(self._answer, f"{name}/reply", session, method, arguments)

    def _answer(self, name: str, session: Session, method: str, arguments: Sequence[Any]) -> None:
        """Calls a method of a session and sends the result."""
        # Errors of a tool are replies. Any other error ends the run, and all processes report it.
        with self._hosts.farewell():
            if method == "call":
                result: Any = session.call(*arguments)
            else:
                with contextlib.closing(session):
                    result = vars(session.finish())
            self._hosts.send(name, result)


class FarSession:
    """The session of a row whose tools run in the first process; it has the methods of `Session` that a row needs.

    Attributes:
        toolbox: This process's own copy of the toolbox that the tools belong to.
    """

    def __init__(self, boxes: SharedToolboxes, columns: Mapping[str, Any], row: int):
        self.toolbox = boxes.of(columns)
        self._boxes, self._columns, self._row = boxes, plain(columns), row
        self._has_state = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Calls a tool, as `Session.call`."""
        self._has_state = self.toolbox.environment is not None
        return self._asked("call", name, dict(arguments))

    def finish(self) -> Snapshot:
        """Returns the environment after the row, as `Session.finish`; the first process then closes the session."""
        if self.toolbox.environment is None:
            return Snapshot()
        self._has_state = False
        return Snapshot(**self._asked("finish"))

    def close(self) -> None:
        """Does nothing: `finish` has already closed the session."""

    def abandon(self) -> None:
        """Ends the session, as `Session.abandon`; does not wait."""
        if self._has_state:
            self._has_state = False
            with contextlib.suppress(HostLost):
                self._boxes.ask(self._row, self._columns, "abandon")

    def _asked(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a method of the session in the first process."""
        return self._boxes.reply(self._boxes.ask(self._row, self._columns, method, *arguments))
