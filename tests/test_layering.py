"""Imports go down only."""

import ast
import graphlib
import itertools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each row may import from those above it, and within itself without cycles.
LAYERS = (
    "pallas_kernels",
    "__init__ adam8bit answers architecture arithmetic benchmarks charts config data display "
    "equivalence estimators grpo log masked noise packing page pages progress reward_functions "
    "reward_workers rewards sandbox schedule stop_strings tensor_files tokenizer trackers",
    "decode draws formats kv_cache layers logprobs model shared_prompts",
    "adapters awq calibration checkpoint engine model_files policies quantize run_state sampling",
    "generator rollouts update",
    "completion_file evaluate export pass_rates plan replay report train",
    "__main__ cli",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
MODULES = sorted(path.stem for path in (ROOT / "qerl_jax").glob("*.py"))


def imports(path):
    """Dotted names of all that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its layer"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module):
    """Modules of the project that a module of qerl_jax imports; pallas_kernels counts as one."""
    for name in imports(ROOT / "qerl_jax" / f"{module}.py"):
        root, *rest = name.split(".")
        if root in ("pallas_kernels", "qerl_jax", "scripts", "tests"):
            yield rest[0] if root == "qerl_jax" and rest else root


def roots(path):
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_no_higher_layer(module):
    assert module in LEVEL, f"qerl_jax/{module}.py: give it a layer in LAYERS"
    higher = [name for name in own_imports(module) if LEVEL.get(name, len(LAYERS)) > LEVEL[module]]
    assert not higher


def test_imports_have_no_cycle():
    graph = {module: set(own_imports(module)) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [name for name in MODULES if LEVEL.get(name) == 1])
def test_layer_1_sees_values_and_arrays_only(module):
    assert roots(ROOT / "qerl_jax" / f"{module}.py").isdisjoint({"flax", "pallas_kernels"})


def test_kernels_import_jax_only():
    allowed = {"jax", "ml_dtypes", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    files = (ROOT / "pallas_kernels").rglob("*.py")
    assert set(itertools.chain(*map(roots, files))) <= allowed


def test_library_runs_without_torch():
    files = (ROOT / "qerl_jax").rglob("*.py")
    assert "torch" not in set(itertools.chain(*map(roots, files)))
