"""Tests that the Pallas kernels of a program are compiled before it, each one once."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import nvfp4, runtime
from pallas_kernels.nvfp4_matmul import decode
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.nvfp4_matmul.layout import prepare
from qerl_jax.compilation import kernel_modules
from qerl_jax.compilation.kernel_modules import KernelModules, modules


@functools.cache
def lowered(*sizes):
    """A program with a product of each size, in a loop, lowered for a card."""
    with runtime.on(runtime.H200):
        ws = [
            jax.eval_shape(lambda n=n: prepare(nvfp4.random(jax.random.key(0), (n, 128))))
            for n in sizes
        ]
        product = functools.partial(decode.matmul, config=Config(1, 64, 2, 2))

        def loop(x, ws):
            return jax.lax.fori_loop(0, 3, lambda _, x: x + sum(product(x, w).sum() for w in ws), x)

        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        return jax.jit(loop).trace(x, ws).lower(lowering_platforms=("cuda",))


def test_the_kernels_of_a_program_are_those_of_its_text():
    one, two = (modules(lowered(*sizes)) for sizes in ((64,), (64, 128, 64)))
    assert len(one) == 1 and len(two) == 2 and one.items() <= two.items()
    for name, kernel in two.items():
        assert kernel["kernel_hash"] == name and kernel["module"].startswith(b"ML\xefR")
        assert kernel["use_custom_barrier"] is False


def test_a_program_without_kernels_has_none():
    assert modules(jax.jit(lambda x: x + 1).lower(1.0)) == {}


def test_a_compiled_kernel_is_called_as_the_program_calls_it():
    (kernel,) = modules(lowered(64)).values()
    program = jax.jit(kernel_modules._call(kernel)).trace()
    assert modules(program.lower(lowering_platforms=("cuda",))) == {kernel["kernel_hash"]: kernel}


def test_a_program_does_not_wait_for_kernels_that_the_end_of_a_run_cancels(monkeypatch):
    is_busy, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(kernel_modules, "_THREADS", 1)
    monkeypatch.setattr(kernel_modules, "_compile", lambda _: (is_busy.set(), may_end.wait(30)))
    subject = KernelModules()
    waiting = threading.Thread(target=subject.compile, args=(lowered(64, 128),), daemon=True)
    waiting.start()
    assert is_busy.wait(30)
    ending = threading.Thread(target=subject.end, daemon=True)
    ending.start()
    while not any(future.cancelled() for future in subject._compiled.values()):
        ending.join(0.01)
    may_end.set()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("error", [None, RuntimeError("not on this card")])
def test_a_kernel_is_compiled_once_and_beside_the_others(monkeypatch, error):
    both, compiled = threading.Barrier(2), []

    def compile_one(kernel):
        both.wait(30)
        compiled.append(kernel["kernel_hash"])
        if error:
            raise error

    monkeypatch.setattr(kernel_modules, "_compile", compile_one)
    subject = KernelModules()
    for _ in range(2):
        subject.compile(lowered(64, 128, 64))
    subject.compile(lowered(64))
    assert sorted(compiled) == sorted(modules(lowered(64, 128, 64)))
    subject.end()
