"""Stores traced programs on the disk, so that another process compiles and runs them without tracing them again.

A file is a line of JSON and the program in JAX's portable form (`jax.export`, StableHLO as bytes): neither runs code when
it is read. The compiled program is in JAX's own cache, under the hash of what is stored here.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from typing import Any, Self

import jax
from jax import export

import pallas_kernels
from pallas_kernels import runtime
from qerl_jax.compilation import json_trees
from qerl_jax.system import files
from qerl_jax.system.checked import tell

_FORMAT = 1
# Of each program there are some MB.
_MOST_BYTES = 1 << 30
# Calls of libraries in programs. A program that is run elsewhere may meet another version of them; one that is stored
# is run with the same versions, which are part of its key.
_LIBRARIES = (
    "mosaic_gpu_v2",
    "triton_kernel_call",
    *(f"__cudnn$fmha{kind}" for kind in ("Softmax", "SoftmaxBackward")),
)
_VERSIONS = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin flax optax jax-triton triton".split()


@dataclasses.dataclass(frozen=True)
class Traced:
    """A program that was traced and lowered, with the leaves of its arguments as arguments.

    Attributes:
        exported: The program.
        donated: The arguments whose buffers it may overwrite.
        results: The structure of what it returns.
    """

    exported: export.Exported
    donated: tuple[int, ...]
    results: Any

    @classmethod
    def of(cls, function: functools.partial, arrays: tuple[Any, ...]) -> Self:
        """Traces and lowers a partial call of a jitted function.

        Args:
            function: The jitted function (`Jitted`) with its static arguments.
            arrays: The other arguments; shapes (`jax.ShapeDtypeStruct`) are enough.
        """
        leaves, structure = jax.tree.flatten(arrays)
        results = []

        def flat(*leaves):
            out = inner(*jax.tree.unflatten(structure, leaves))
            out, result = jax.tree.flatten(out)
            results[:] = [result]
            return out

        inner = functools.partial(function.func.inner, *function.args, **function.keywords)
        described = inner.func.trace(*inner.args, *arrays, **inner.keywords).args_info
        donated = [at for at, leaf in enumerate(jax.tree.leaves(described)) if leaf.donated]
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _LIBRARIES]
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        exported = export.export(jax.jit(flat), disabled_checks=checks)(*shapes)
        return cls(exported, tuple(donated), results[0])

    def lowered(self, place: Any, options: dict[str, bool]) -> jax.stages.Lowered:
        """Returns it as a function of the leaves that JAX compiles, or finds in its cache.

        Args:
            place: The sharding of arrays on the device.
            options: XLA's.
        """
        leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in self.exported.in_avals
        ]
        program = jax.jit(self.exported.call, donate_argnums=self.donated, compiler_options=options)
        return program.lower(*leaves)


class ProgramStore:
    """A folder with a file for each program."""

    def __init__(self, folder: pathlib.Path, most_bytes: int = _MOST_BYTES):
        """Uses a folder, which is made if it does not exist; beyond `most_bytes` the files used longest ago go."""
        self._folder, self._most_bytes = folder, most_bytes

    @classmethod
    def beside_xla(cls) -> Self | None:
        """Returns the store beside the compiled programs that JAX keeps; None if it keeps none."""
        folder = jax.config.jax_compilation_cache_dir
        if folder is None or not jax.config.jax_enable_compilation_cache or "://" in folder:
            return None
        return cls(pathlib.Path(folder) / "traced")

    @property
    def is_new(self) -> bool:
        """Whether it has no program of these sources, versions and devices."""
        return not any(self._folder.glob(self._path(f"{surroundings()[:16]}-*").name))

    def read(self, key: str) -> Traced | None:
        """Returns the program with a key; None if there is none. A damaged file is removed, with a line."""
        path = self._path(key)
        try:
            head, _, blob = path.read_bytes().partition(b"\n")
            os.utime(path)  # used now
        except OSError:
            return None
        try:
            table = files.parse_json(head)
            if (table["format"], table["sha256"]) != (_FORMAT, hashlib.sha256(blob).hexdigest()):
                raise ValueError("not what was written")
            results = json_trees.from_json(table["results"])
            return Traced(export.deserialize(bytearray(blob)), (*table["donated"],), results)
        except Exception as error:
            tell(f"{path}: a damaged program is compiled anew ({type(error).__name__}: {error})")
            path.unlink(missing_ok=True)
            return None

    def write(self, key: str, program: Traced) -> None:
        """Stores a program: readers find the whole file or none.

        Raises:
            DiskError: If it cannot be written.
        """
        blob = bytes(program.exported.serialize())
        table = {
            "format": _FORMAT,
            "sha256": hashlib.sha256(blob).hexdigest(),
            "donated": program.donated,
            "results": json_trees.to_json(program.results),
        }
        path = self._path(key)
        with files.writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(blob))
        files.write_whole(path, json.dumps(table).encode() + b"\n" + blob)

    def _path(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}.program"

    def _make_room(self, size: int) -> None:
        """Removes the files used longest ago until there is room for one more."""
        stats = []
        for path in self._folder.glob("*.program"):
            try:
                stats.append((path.stat().st_mtime, path.stat().st_size, path))
            except OSError:  # another process removed it
                continue
        total = size + sum(of_file for _, of_file, _ in stats)
        for _, of_file, path in sorted(stats):
            if total <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= of_file


def key_of(function: functools.partial, arrays: tuple[Any, ...]) -> str:
    """Returns the key of a program: a hash of all that its code and its compilation depend on.

    It covers the function and its static arguments, the structure, shapes and dtypes of its arrays, the chosen kernels,
    each file of both packages, versions, environment and device.
    """
    leaves, structure = jax.tree.flatten(arrays)
    named: Any = function.func
    parts = (
        f"{named.__module__}:{named.__qualname__}",
        repr((function.args, sorted(function.keywords.items()))),
        str(structure),
        str([(leaf.shape, str(leaf.dtype)) for leaf in leaves]),
        repr(sorted(named.compiler_options.items())),
        runtime.chosen_kernels(),
    )
    return f"{surroundings()[:16]}-{hashlib.sha256('\0'.join(parts).encode()).hexdigest()}"


@functools.cache
def surroundings() -> str:
    """Returns a hash of sources, versions, environment and devices."""
    digest = hashlib.sha256()
    for root in (pathlib.Path(__file__).parents[1], pathlib.Path(pallas_kernels.__path__[0])):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for name in _VERSIONS:
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    names = sorted(n for n in os.environ if n.startswith(("XLA_FLAGS", "JAX_", "PALLAS_")))
    digest.update(repr([(name, os.environ[name]) for name in names]).encode())
    driver = pathlib.Path("/proc/driver/nvidia/version")
    digest.update(driver.read_bytes() if driver.exists() else b"")
    devices = jax.devices()
    digest.update(
        repr((devices[0].client.platform_version, runtime.device(), len(devices))).encode()
    )
    return digest.hexdigest()
