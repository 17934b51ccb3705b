"""Tests the process pool: results of calls that hang, die or raise, and that no worker outlives its parent."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from qerl_jax.system.process_pool import Failure, Pool, Worker

ROOT = pathlib.Path(__file__).parents[3]
FUNCTIONS = """
import os, signal, sys, time
sys.stdout.write("printed while importing")

def double(x):
    print("printed while called")
    return 2 * x

def pid():
    return os.getpid()

def pid_after(seconds):
    time.sleep(seconds)
    return os.getpid()

def environment():
    return list(os.environ)

def hang(seconds):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(seconds)

def power(base, exponent):
    return base ** exponent % 10

def leave():
    os._exit(3)

def eat():
    held = []
    while True:
        held.append(bytearray(1 << 20))

def kill_myself(number):
    os.kill(os.getpid(), number)

def fail(text):
    raise KeyError(text)

def loaded(names):
    return [name for name in names if name in sys.modules]

def power_tower(_):
    return 7 ** 10**9
"""


class Calls(Pool):
    """Calls functions of a pool with one tuple of arguments, too."""

    def __call__(self, function, *arguments):
        (reply,) = self.map(function, [arguments])
        return reply


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """Lets workers import FUNCTIONS."""
    (tmp_path / "worker_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def pool(functions):
    """Makes pools over FUNCTIONS."""
    with contextlib.ExitStack() as pools:

        def make(workers=1, seconds=20.0, module="worker_functions", **options):
            made = Calls(module, workers=workers, seconds=seconds, **options)
            return pools.enter_context(contextlib.closing(made))

        yield make


def is_alive(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie has ended, though nobody has looked at it yet.
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_values_come_in_the_order_of_the_calls_and_text_of_any_kind_survives_the_way(pool):
    texts = ["two\nlines", "东京 🙂", '"quoted"', "\ud800", "x" * 1_000_000]
    values = [*range(20), *texts]
    assert pool(workers=2).map("double", [(x,) for x in values]) == [2 * x for x in values]


def test_a_call_over_its_limit_is_killed_and_the_others_are_answered(pool):
    calls = pool(workers=2, seconds=0.6)
    assert calls.map("hang", [(0,), (60,), (0,)]) == [None, Failure("timeout"), None]


@pytest.mark.slow
def test_a_loop_that_never_returns_to_python_is_killed_too(pool):
    # An exponentiation in C holds the interpreter: no signal handler of Python's would run.
    calls = pool(seconds=2.0)
    assert calls.map("power", [(7, 2), (7, 10**9)]) == [9, Failure("timeout")]


@pytest.mark.slow
def test_what_a_busy_machine_takes_away_does_not_count(pool):
    """The worker gets no processor time for longer than its limit, as on a busy machine."""
    call = pool(seconds=1.0)
    pid = call("pid")
    waking = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    waking.start()
    assert call("double", 4) == 8 and call("pid") == pid
    waking.join()


def test_a_worker_that_ends_or_is_killed_within_a_call_is_replaced(pool):
    call, kills = pool(), (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
    for ending in (["leave"], *(["kill_myself", int(number)] for number in kills)):
        before = call("pid")
        assert call(*ending) == Failure("died")
        assert call("pid") != before and not is_alive(before)


@pytest.mark.slow
def test_a_call_whose_process_someone_else_kills_is_made_again(pool):
    call = pool()
    before = call("pid")
    threading.Timer(0.3, os.kill, (before, signal.SIGKILL)).start()
    after = call("pid_after", 1.0)
    assert isinstance(after, int) and after != before


def test_a_worker_that_is_stopped_is_killed_and_replaced(pool):
    """It uses no processor time, and answers nothing."""
    call = pool(seconds=0.2)
    before = call("pid")
    os.kill(before, signal.SIGSTOP)
    assert call("double", 4) == Failure("timeout")
    assert call("double", 4) == 8 and not is_alive(before)


def test_memory_is_bounded_also_if_it_is_eaten_bit_by_bit(pool):
    error = Failure("raised", "MemoryError: ")
    assert pool(module="builtins")("bytearray", 1 << 40) == error
    call = pool(memory_bytes=256 << 20)
    assert call("eat") in (error, Failure("died"))
    resident = pathlib.Path(f"/proc/{call('pid')}/statm").read_text().split()[1]
    assert int(resident) * os.sysconf("SC_PAGE_SIZE") < 200 << 20


def test_an_exception_is_named_and_the_worker_stays_until_it_is_killed_while_idle(pool):
    call = pool()
    before = call("pid")
    assert call("fail", "why") == Failure("raised", "KeyError: 'why'")
    assert call("pid") == before
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_alive(before))
    assert call("double", 3) == 6


def test_nothing_starts_before_it_is_needed_and_close_ends_it(pool):
    call = pool()
    assert call.map("pid", []) == []
    assert is_alive(pid := call("pid"))
    call.close()
    assert not is_alive(pid)


def test_a_module_that_cannot_be_imported_and_impossible_limits_are_errors(pool):
    with pytest.raises(RuntimeError, match="no_such_module: ModuleNotFoundError: .*no_such_module"):
        pool(module="no_such_module")("f")
    for workers, seconds in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            Pool("math", workers=workers, seconds=seconds)


def test_workers_know_neither_jax_nor_the_parents_main_module(pool):
    import jax  # noqa: F401 (so that a fork would have it)

    assert pool()("loaded", ["jax", "flax", "transformers", "pytest"]) == []


def test_only_a_module_of_the_user_knows_secrets_of_the_parent(pool, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    names = pool()("environment")
    assert "HF_TOKEN" not in names and "PATH" in names
    worker = Worker("worker_functions", 20.0, is_trusted=True)
    names = worker.call('["environment", []]')
    worker.stop()
    assert "HF_TOKEN" in names


@pytest.fixture
def stopped_while_starting(functions, monkeypatch):
    """A worker that another thread stops before its process is known, and the process's id."""
    worker, popen, pids = Worker("worker_functions", 20.0), subprocess.Popen, []
    stopping = threading.Thread(target=worker.stop)

    def spawn(*arguments, **options):
        process = popen(*arguments, **options)
        pids.append(process.pid)
        stopping.start()
        stopping.join(0.5)
        return process

    monkeypatch.setattr(subprocess, "Popen", spawn)
    reply = worker.call('["double", [1]]')
    stopping.join(20)
    assert not stopping.is_alive()
    yield worker, reply, pids
    for pid in pids:
        if is_alive(pid):
            os.killpg(pid, signal.SIGKILL)


def test_a_worker_that_is_stopped_while_it_starts_leaves_no_process(stopped_while_starting):
    worker, reply, pids = stopped_while_starting
    assert reply == Failure("died") and not is_alive(pids[0])
    assert worker.call('["double", [1]]') == Failure("died") and len(pids) == 1


def test_a_call_that_waits_ends_when_its_worker_is_stopped(functions):
    worker, replies = Worker("worker_functions", 20.0), []
    pid = worker.call('["pid", []]')
    calling = threading.Thread(target=lambda: replies.append(worker.call('["pid_after", [60]]')))
    calling.start()
    time.sleep(0.3)
    worker.stop()
    calling.join(20)
    assert replies == [Failure("died")] and not is_alive(pid)


PARENT = """
import sys, threading
sys.path.insert(0, {folder!r})
from qerl_jax.system.process_pool import Pool
pool = Pool("worker_functions", workers=2, seconds=0.4)
idle, busy = pool._idle.get(), pool._idle.get()
print(idle.call('["pid", []]'), busy.call('["pid", []]'), flush=True)
busy.call('["{call}", [60]]')
"""


@pytest.mark.parametrize("call", ["hang", "power_tower"])
def test_workers_end_with_a_parent_that_is_killed(functions, tmp_path, call):
    command = [sys.executable, "-c", PARENT.format(folder=str(tmp_path), call=call)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        idle, busy = map(int, parent.stdout.readline().split())
        assert is_alive(idle) and is_alive(busy)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(idle) and not is_alive(busy))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
