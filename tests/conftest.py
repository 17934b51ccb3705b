"""Where the tests run: on the CPU, unless JAX_PLATFORMS or `-m gpu` says otherwise."""

import os
import re

import pytest


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", help="run tests marked slow, too")


def pytest_configure(config):
    # Before any test imports jax, which reads the variable once.
    if not _asked_for("gpu", config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if not config.getoption("--runslow"):
            # Most of the time goes into compilation, and less of it with less optimization (with none a
            # golden scale would differ in its last bit). `make test-all` runs with what users have.
            flags = f"--xla_backend_optimization_level=1 {os.environ.get('XLA_FLAGS', '')}"
            os.environ["XLA_FLAGS"] = flags.strip()
    # Workers, and runs that tests start, compile the same programs: one of them is enough.
    cache = config.rootpath / ".pytest_cache" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def pytest_collection_modifyitems(config, items):
    if not (config.getoption("--runslow") or _asked_for("slow", config)):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)

    # Whole runs first: at the end one worker would be left alone with them.
    items.sort(key=lambda item: item.path.name != "test_tiny_run.py")

    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that JAX can see"))


def _asked_for(marker, config):
    return re.search(rf"(?<!not )\b{marker}\b", config.getoption("markexpr")) is not None


def _has_gpu():
    import jax

    return jax.default_backend() == "gpu"
