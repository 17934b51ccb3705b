"""Tests of programs that are compiled before they are called."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from qerl_jax.compilation import early_programs
from qerl_jax.compilation.early_programs import EarlyPrograms, Listed
from qerl_jax.compilation.jitted import Jitted
from qerl_jax.compilation.kernel_modules import KernelModules
from qerl_jax.compilation.program_process import ProgramProcess
from qerl_jax.compilation.program_store import ProgramStore, Traced
from qerl_jax.rl import update


def _plus(state, number, *, twice):
    return {"sum": state["x"] + number * (1 + twice), "x": state["x"]}


plus = Jitted(_plus, "plus", static_argnames="twice")
FUNCTION, KEY = functools.partial(plus, twice=True), ("plus", 1)


def arrays(size=3):
    return {"x": jnp.arange(size)}, jnp.int32(2)


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Programs are traced in this process, by threads; returns the list of requests for them."""
    before, made = jax.config.jax_compilation_cache_dir, []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))

    def make(self, request):
        made.append(request)
        store = ProgramStore.beside_xla()
        store.write(request.key, Traced.of(request.function, request.arrays))

    monkeypatch.setattr(ProgramProcess, "make", make)
    monkeypatch.setattr(early_programs, "workers", lambda: 2)
    yield made
    jax.config.update("jax_compilation_cache_dir", before)


def begun(*sizes):
    early = EarlyPrograms()
    early.begin([Listed("plus", (*KEY, size), FUNCTION, arrays(size)) for size in sizes])
    return early


def is_right(early, size, *, compiled):
    """Whether a call gives the right result, by the program of the list or by the function."""
    called = []
    function = functools.partial(lambda *a: called.append(1) or FUNCTION(*a))
    result = early.call((*KEY, size), function, *arrays(size))
    assert bool(called) != compiled
    return result["sum"].tolist() == [x + 4 for x in range(size)] and result["x"].shape == (size,)


def test_a_listed_program_is_called_and_a_later_run_finds_it(requests):
    early = begun(3, 4)
    assert is_right(early, 3, compiled=True)
    assert is_right(early, 4, compiled=True)
    assert early.counts == (2, 2) and len(requests) == 2
    early.end()
    again = begun(4, 3, 5)
    for size in (3, 4, 5):
        assert is_right(again, size, compiled=True)
    assert len(requests) == 3
    again.end()


def test_the_first_programs_of_the_list_are_compiled_first(requests, monkeypatch):
    """Also if they are traced last. Until one is compiled others can take its place, unless the run is patient."""
    is_busy, are_others_traced, over, order = (
        *(threading.Event() for _ in range(2)),
        threading.Semaphore(0),
        [],
    )
    compiling, tracing = EarlyPrograms._compile, EarlyPrograms._traced

    def compile_one(self, program, *rest):
        order.append(program.key[-1])
        if order == [9]:
            is_busy.set()
            assert over.acquire(timeout=60) and over.acquire(timeout=60)
            assert (*KEY, 5) in self.unready
            patient = EarlyPrograms(patient=True)
            patient._pending = self._pending
            assert not patient.unready
        compiling(self, program, *rest)

    def trace(self, program, *rest):
        size = program.key[-1]
        assert size == 9 or {3: are_others_traced}.get(size, is_busy).wait(60)
        result = tracing(self, program, *rest)
        if size == 4:
            are_others_traced.set()
        return result

    monkeypatch.setattr(early_programs, "_AT_ONCE", 1)
    monkeypatch.setattr(EarlyPrograms, "_compile", compile_one)
    monkeypatch.setattr(EarlyPrograms, "_traced", trace)
    monkeypatch.setattr(ProgramProcess, "end", lambda self: over.release())
    early = begun(9, 3, 5, 4)
    assert is_right(early, 4, compiled=True) and (*KEY, 5) not in early.unready
    early.end()
    assert order == [9, 3, 5, 4]


def test_what_is_not_listed_or_has_another_shape_is_compiled_when_it_is_called(requests, capsys):
    early = begun(3)
    assert is_right(early, 7, compiled=False)
    for _ in range(2):
        assert early.call((*KEY, 3), FUNCTION, *arrays(6))["sum"].shape == (6,)
    line = "a program has other shapes than it was listed with, and is compiled now\n"
    assert capsys.readouterr().err == line
    early.end()
    assert is_right(EarlyPrograms(), 3, compiled=False)


def test_a_program_whose_process_fails_is_compiled_when_it_is_called(requests, monkeypatch, capsys):
    monkeypatch.setattr(ProgramProcess, "make", lambda *_: "XlaRuntimeError: out of\nmemory")
    early = begun(3)
    assert is_right(early, 3, compiled=False)
    assert is_right(early, 3, compiled=False)
    line = "a program could not be compiled early, and is compiled now: RuntimeError: XlaRuntimeError: out of memory"
    assert capsys.readouterr().err == f"{line}\n"
    early.end()


@pytest.mark.parametrize("by", ["go_on", "call", "end"])
def test_other_programs_wait_for_the_first_step_or_for_a_call(requests, by):
    early = EarlyPrograms()
    one, two = (Listed("plus", (*KEY, size), FUNCTION, arrays(size)) for size in (3, 4))
    early.begin([one], [two])
    assert is_right(early, 3, compiled=True)
    early._threads[-1].join(0.2)
    assert early.counts == (1, 2) and early.unready == {(*KEY, 4)}
    if by == "go_on":
        early.go_on()
        early._threads[-1].join(60)
        assert early.counts == (2, 2)
    elif by == "call":
        assert is_right(early, 4, compiled=True)
    early.end()
    assert is_right(early, 4, compiled=by != "end")


def test_in_a_later_run_other_programs_follow_at_once(requests):
    one, two = (Listed("plus", (*KEY, size), FUNCTION, arrays(size)) for size in (3, 4))
    for others in ([], [two]):
        early = EarlyPrograms()
        early.begin([one], others)
        assert is_right(early, 3, compiled=True)
        early._threads[-1].join(60 if others else 0)
        assert early.counts == (1 + len(others),) * 2
        early.end()


def test_kernels_are_compiled_before_a_program_that_was_traced_now(requests, monkeypatch):
    order, compiling = [], jax.stages.Lowered.compile
    monkeypatch.setattr(KernelModules, "compile", lambda self, lowered: order.append(lowered))
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self: (order.append(self), compiling(self))[1]
    )
    for expected in (2, 1):
        order.clear()
        early = begun(3)
        assert is_right(early, 3, compiled=True)
        early.end()
        assert len(order) == expected and order[0] is order[-1]


def test_processes_start_first_only_where_nothing_is_stored(requests, monkeypatch):
    started = []
    monkeypatch.setattr(ProgramProcess, "start", lambda self, imports=None: started.append(imports))
    for expected in (["somewhere"] * 2, []):
        started.clear()
        early = EarlyPrograms()
        early.prepare("somewhere")
        assert started == expected
        early.begin([Listed("plus", KEY, FUNCTION, arrays())])
        assert early.call(KEY, None, *arrays())["sum"].shape == (3,)
        early.end()
    assert len(requests) == 1


def test_a_run_that_ends_waits_for_no_program(requests, monkeypatch):
    is_busy, may_end = threading.Event(), threading.Event()
    ended = []

    def make(self, request):
        is_busy.set()
        assert may_end.wait(60)
        return "ended"

    monkeypatch.setattr(ProgramProcess, "make", make)
    monkeypatch.setattr(ProgramProcess, "end", lambda self: (ended.append(self), may_end.set()))
    early = begun(3, 4, 5)
    assert is_busy.wait(60)
    early.end()
    assert len(set(ended)) == 2 and is_right(early, 5, compiled=False)


def test_without_a_folder_of_jax_nothing_is_compiled_early(requests):
    jax.config.update("jax_compilation_cache_dir", None)
    early = begun(3)
    assert early.counts == (0, 0) and is_right(early, 3, compiled=False)


@pytest.mark.slow
def test_a_process_that_is_killed_costs_a_line_and_no_result(tmp_path, monkeypatch, capsys):
    """With a function of the package, which the process finds by its name."""
    monkeypatch.setattr(early_programs, "workers", lambda: 1)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        early, grads = EarlyPrograms(), {"w": jnp.ones(3)}
        function = functools.partial(Jitted(update.zeros.__wrapped__, "nowhere"))
        early.begin([Listed("zeros", ("zeros",), function, (grads,))])
        assert early.call(("zeros",), function, grads)[0] == 0
        early.end()
        assert "could not be compiled early" in capsys.readouterr().err
        process = ProgramProcess()
        process.start()
        process._process.kill()
        assert "the process ended" in process.make(None)
        process.end()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
