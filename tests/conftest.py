"""Settings of all tests. They run on the CPU unless JAX_PLATFORMS or `-m gpu` says otherwise."""

import gc
import os
import re
import sys

import pytest

from scripts.check_device import QUICK_XLA, card


@pytest.fixture
def no_silent_broadcasting():
    """Makes JAX refuse arrays of different ranks."""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", help="run tests marked slow, too")
    parser.addoption("--cards", type=int, default=1, help="with -m gpu: cards that workers share")


def pytest_configure(config):
    # Before any test imports jax, which reads the variable once.
    if not _asked_for("gpu", config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Triton's kernels are interpreted where it is installed, and a test asks for them; it reads this once, too.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # The warpgroups of an interpreted block wait for each other, each on a thread of XLA. With fewer threads than
        # warpgroups a test would never end.
        os.environ.setdefault("NPROC", str(max(16, os.cpu_count())))
        # Most of the time goes into compilation: a third of it is left with the emitter that makes all
        # kernels of a program at once, and without optimization, which long runs cannot do without.
        # Where XLA_FLAGS is set, be it to nothing, programs are compiled as it says.
        quick = (
            "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
            f"--xla_backend_optimization_level={int(_with_slow(config))}",
            # Workers take all cores already: a program that is compiled or run in pieces, by several threads, is more work.
            "--xla_cpu_parallel_codegen_split_count=1",
            "--xla_cpu_multi_thread_eigen=false",
        )
        os.environ.setdefault("XLA_FLAGS", " ".join(quick))
    else:
        # Each worker would take three quarters of the card's memory otherwise.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # Tests take the processors and the card's memory already.
        os.environ.setdefault("QERL_TRACE_PROCESSES", "0")
        # Almost all of the time is compilation.
        os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_XLA))
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        if worker and (cards := config.getoption("--cards")) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = card(int(worker.removeprefix("gw")), cards)
    # What is traced lives on: looking for garbage so often finds little.
    gc.set_threshold(100_000)
    # Workers, runs that tests start, and the tests' next run compile the same programs: once is enough. Most are single
    # operations; to read one takes a fraction of what its compilation takes, and to write it nothing to speak of.
    cache = config.rootpath / ".pytest_cache" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


# A worker takes a folder of these at a time, the longest first, so that its files share compiled programs: they have models,
# shapes and small runs in common. Of the others it takes files, which are short: both workers end at about one time.
_FOLDERS = (
    "pallas_kernels",
    "generation",
    "rl",
    "model",
    "faults",
    "checkpoint",
    "evaluation",
    "quantization",
)
# They train the run of tests/faults.
_WITH_FAULTS = ("test_tiny_run.py", "test_guards.py")


def _folder(path):
    """Returns the folder of _FOLDERS to which a test's file belongs; None if there is none."""
    *_, folder, name = path.split("/")
    return "faults" if name in _WITH_FAULTS else folder if folder in _FOLDERS else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = super()._split_scope(nodeid)
            return _folder(path) or path

    # With the slow tests a folder takes too long for one worker.
    return (
        None
        if _with_slow(config) or config.getvalue("dist") != "loadfile"
        else Scheduling(config, log)
    )


def pytest_collection_modifyitems(config, items):
    if not _with_slow(config):
        _leave_out("slow", config, items)

    ranks = {name: rank for rank, name in enumerate(_FOLDERS)}
    items.sort(key=lambda item: ranks.get(_folder(item.path.as_posix()), len(ranks)))

    if _num_devices() < 2:
        _leave_out("devices", config, items)
    if _has_gpu():
        return
    if not _asked_for("gpu", config):
        _leave_out("gpu", config, items)
    # Who asks for these tests is told why they do not run.
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that JAX can see"))


def _leave_out(marker, config, items):
    left_out = [item for item in items if item.get_closest_marker(marker)]
    ids = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in ids]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


# Of the 65,530 areas of memory that Linux grants a process, those above which compiled programs are let go. Each
# program takes some ten; at the limit XLA ends the process with a segmentation fault.
_MOST_AREAS, _LOOK_EVERY = 40_000, 20
_tests_run = 0


def pytest_runtest_teardown(item, nextitem):
    global _tests_run
    _tests_run += 1
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if not (is_last_of_file or _tests_run % _LOOK_EVERY == 0) or "jax" not in sys.modules:
        return
    with open("/proc/self/maps") as areas:
        if sum(1 for _ in areas) < _MOST_AREAS:
            return
    sys.modules["jax"].clear_caches()
    gc.collect()


def _with_slow(config):
    return config.getoption("--runslow") or _asked_for("slow", config)


def _asked_for(marker, config):
    return re.search(rf"(?<!not )\b{marker}\b", config.getoption("markexpr")) is not None


def _num_devices():
    import jax

    return jax.device_count()


def _has_gpu():
    import jax

    return jax.default_backend() == "gpu"
