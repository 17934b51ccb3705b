"""Public names of a package that are imported when they are first used, so that importing the package is fast."""

import ast
import importlib
import pathlib
from collections.abc import Callable
from typing import Any


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its `__name__`.
        file: Its `__file__`. The names are those that it imports for type checkers: under `if TYPE_CHECKING`.
    """
    (names,) = (x for x in ast.parse(pathlib.Path(file).read_text()).body if isinstance(x, ast.If))
    imports = [node for node in names.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: node.module for node in imports for alias in node.names}

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        if module is (root := importlib.import_module(package)):
            return importlib.import_module(f"{package}.{name}")
        setattr(root, name, value := getattr(module, name))
        return value

    return imported, lambda: sorted(modules), sorted(modules)
