"""Records what a reader does beside reading, for `tests.faults.fuzz`, and renders chat templates in a watched process."""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from qerl_jax.data import template_renderer

# Events of `sys.audit` that no reader should cause.
ACTIONS = (
    "open",  # except for some files, see `Watch`
    *("exec", "compile", "import", "pickle.find_class", "marshal.loads", "ctypes.dlopen"),
    *("subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod"),
    *("os.truncate", "os.putenv", "shutil.rmtree", "shutil.copyfile", "webbrowser.open"),
)


class Watch:
    """Records actions inside a `with` block as texts: events that no reader should cause, except those `allowed` here.

    Paths below `places` may be read. It adds an audit hook, which cannot be removed.
    """

    def __init__(self, places: Sequence[str], allowed: Sequence[str] = ()):
        self.seen: list[str] = []
        self._places, self._actions = tuple(places), frozenset(ACTIONS) - frozenset(allowed)
        self._is_on = False
        sys.addaudithook(self._hook)

    def __enter__(self):
        self._is_on = True

    def __exit__(self, *_):
        self._is_on = False

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self._is_on or event not in self._actions:
            return
        if event != "open" or not self._is_harmless(*arguments):
            self._is_on = False  # formatting the event may open files
            self.seen.append(f"{event}{arguments!r}"[:200])
            self._is_on = True

    def _is_harmless(self, path: Any, mode: str | None, flags: int) -> bool:
        """Whether a file is only read, and is an input or a part of Python."""
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        # No real file: it is opened for an error's text.
        if isinstance(path, int) or path == "<template>":
            return True
        return os.path.abspath(os.fsdecode(path)).startswith(self._places)


# Jinja compiles and runs generated code, and imports modules to describe an error.
_OF_JINJA = ("exec", "compile", "import", "marshal.loads")


@functools.cache
def _watch() -> Watch:
    return Watch((sys.prefix, sys.base_prefix), allowed=_OF_JINJA)


def render_batch(*request: Any) -> list[str]:
    """Calls `template_renderer.render_batch`. If it did more than render, returns one text "did ..." that says what."""
    watch, texts = _watch(), []
    watch.seen.clear()
    try:
        with watch:
            texts = template_renderer.render_batch(*request)
    except Exception:
        if not watch.seen:
            raise
    return [f"{DID}{watch.seen[0]}"] if watch.seen else texts


DID = "did more than render: "
