"""Tests that imports between packages go in one direction."""

import ast
import graphlib
import itertools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each row may import from the rows above it and within itself; packages of one row do not import each other.
ORDER = (
    ("system",),
    ("config",),
    ("compilation",),
    ("distributed", "data", "tracking"),
    ("model",),
    ("aqn", "checkpoint", "rewards"),
    ("tools", "quantization"),
    ("generation",),
    ("rl",),
    ("planning",),
    ("evaluation",),
    ("training",),
    # The root loads names of `api` on demand: a library that imports it would run in a circle.
    ("api", "qerl_jax"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}
# What is plain arithmetic and text: neither Flax nor kernels.
PLAIN = (
    *("system", "config", "distributed/messages.py", "data", "rewards", "tools", "tracking"),
    *("aqn/draw.py", "aqn/schedule.py", "rl/grpo.py", "rl/masked.py"),
)


def imports(path):
    """Yields the dotted names of all that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(name):
    """Lists the files of a package or module of qerl_jax."""
    path = ROOT / "qerl_jax" / name
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def packages():
    inside = (ROOT / "qerl_jax").iterdir()
    found = (path for path in inside if path.suffix == ".py" or (path / "__init__.py").is_file())
    return sorted({path.stem for path in found} - {"__init__"})


def imported(name):
    """Yields packages of the project that a package of qerl_jax imports; the root itself is called qerl_jax."""
    for name_imported in itertools.chain(*map(imports, files(name))):
        root, *rest = name_imported.split(".")
        if root == "qerl_jax":
            yield rest[0] if rest and rest[0] in LEVEL else "qerl_jax"
        elif root in ("scripts", "tests"):
            yield root


def roots(path):
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("name", packages())
def test_a_package_imports_only_from_those_above_it(name):
    assert name in LEVEL, f"qerl_jax/{name}: give it a row in ORDER"
    others = set(imported(name)) - {name}
    assert [other for other in others if LEVEL.get(other, len(ORDER)) >= LEVEL[name]] == []


def test_modules_import_each_other_without_cycles():
    graph = {}
    for path in itertools.chain(*map(files, packages()), (ROOT / "pallas_kernels").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[module] = {name.rpartition(".")[0] for name in imports(path)} | set(imports(path))
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", PLAIN)
def test_arithmetic_and_texts_need_neither_flax_nor_kernels(name):
    path = ROOT / "qerl_jax" / name
    for file in [path] if path.suffix else files(name):
        assert roots(file).isdisjoint({"flax", "pallas_kernels"}), file


def test_kernels_import_jax_only():
    allowed = {"jax", "ml_dtypes", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        # The portable path: what starts Triton's kernels, and the modules that hold them, which it alone imports.
        is_triton = path.name in ("launch.py", "decoders.py") or path.name.endswith("_kernels.py")
        more = {"triton", "jax_triton"} if path.parent.name == "portable" and is_triton else set()
        assert roots(path) <= allowed | more, path


# As ORDER, of the kernels.
KERNEL_ORDER = (
    ("runtime", "formats"),
    ("linear", "mosaic", "portable"),
    ("nvfp4_matmul", "decode_attention"),
    ("packed_matmul",),
    ("finished_linear", "parts"),
)


def test_families_of_kernels_import_only_from_those_above_them():
    level = {name: level for level, row in enumerate(KERNEL_ORDER) for name in row}
    folder = ROOT / "pallas_kernels"
    for path in {*folder.rglob("*.py")} - {folder / "__init__.py"}:
        name = path.relative_to(folder).with_suffix("").parts[0]
        others = {other.split(".")[1] for other in imports(path) if other.startswith("pallas_k")}
        others -= {name}
        assert [other for other in others if level[other] >= level[name]] == [], path


def test_only_the_shim_names_what_mosaic_gpu_may_change():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        if path.parent.name != "mosaic":
            assert not [n for n in imports(path) if n.startswith("jax.experimental.mosaic")], path


def test_library_runs_without_torch():
    assert "torch" not in set(itertools.chain(*map(roots, (ROOT / "qerl_jax").rglob("*.py"))))
