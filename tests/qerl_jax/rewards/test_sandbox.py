"""Tests the sandbox: what programs may do, and real attempts to escape, which it stops."""

import contextlib
import json
import os
import pathlib
import platform
import re
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from qerl_jax.rewards import sandbox
from qerl_jax.rewards.sandbox import Limits
from tests.qerl_jax.rewards.escapes import CALL, ENDLESS, ESCAPES, got_out, written

ROOT = pathlib.Path(__file__).parents[3]

WHY_NOT = sandbox.unavailable()
isolated = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
USUAL, BRIEF = Limits(), Limits(seconds=0.5)


def run(program, stdin="", limits=USUAL):
    return sandbox.run(textwrap.dedent(program), stdin, limits)


HONEST = {
    "reads and writes": ("a = int(input()); print(a + int(input()))", "1\n2\n", "3\n"),
    "all of the input": ("import sys; print(len(sys.stdin.read()))", "x" * 1_000_000, "1000000\n"),
    "unicode": ("print(input()[::-1])", "京東 🙂\n", "🙂 東京\n"),
    "standard library": ("import bisect, heapq, math, re; print(math.comb(5, 2))", "", "10\n"),
    "main module": ("print(__name__)\nclass A: pass\nprint(A.__module__)", "", "__main__\n" * 2),
    "a deep recursion in a thread with a large stack": (
        """
        import sys, threading
        sys.setrecursionlimit(10**6)
        threading.stack_size(256 << 20)
        def depth(n):
            return n and 1 + depth(n - 1)
        def main():
            print(depth(50_000))
        threading.Thread(target=main).start()
        """,
        "",
        "50000\n",
    ),
    "a file in its folder": ("open('x', 'w').write('5'); print(open('x').read())", "", "5\n"),
    "a few hundred megabytes": ("x = bytearray(300 << 20); print(len(x) >> 20)", "", "300\n"),
    "seconds of work": ("import time\nwhile time.process_time() < 1.5: pass\nprint(1)", "", "1\n"),
}


@isolated
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_run(name):
    program, stdin, output = HONEST[name]
    assert run(program, stdin) == sandbox.Outcome("ok", output)


@isolated
@pytest.mark.parametrize(
    "program",
    ["1 / 0", "raise SystemExit(3)", "import os; os._exit(1)", "not python", "import jax"],
)
def test_programs_that_fail_are_told_apart(program):
    assert run("print('before', flush=True)\n" + program).status == "failed"


@isolated
def test_what_was_written_before_the_end_is_kept():
    outcome = run("print('before', flush=True)\nwhile True: pass", limits=BRIEF)
    assert outcome == sandbox.Outcome("timeout", "before\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes things on this machine that a program might reach: secrets, servers, a process."""
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("SECRET", "secret")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        with contextlib.chdir(tmp_path):  # the path of a socket has a small limit
            unix.bind("server.sock")
        unix.listen()
        inherited = stack.enter_context(open(tmp_path / "secret"))
        os.set_inheritable(inherited.fileno(), True)
        victim = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(victim.kill)
        yield {
            "host": tmp_path,
            "home": pathlib.Path.home(),
            "project": pathlib.Path(__file__).resolve(),
            "port": server.getsockname()[1],
            "pid": victim.pid,
        }
        assert victim.poll() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "server.sock"]


def needs_the_machine(attempt):
    if (attempt.startswith(CALL) or "fromhex" in attempt) and platform.machine() != "x86_64":
        pytest.skip("the numbers of its system calls are x86_64's")


@isolated
@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_stopped(name, machine):
    needs_the_machine(ESCAPES[name])
    assert got_out(name, machine) is None


@isolated
@pytest.mark.parametrize("kind", sandbox._KINDS[1:], ids=str)
def test_where_less_can_be_had_memory_is_bounded_too(kind, machine, monkeypatch):
    monkeypatch.setattr(sandbox, "_found", lambda: (kind, None))
    names = [name for name in ESCAPES if name.startswith("take memory in")]
    assert [found for name in names if (found := got_out(name, machine))] == []
    assert run("print(1)").output == "1\n"
    can_write = run("open('x', 'w').write('5'); print(open('x').read())")
    assert can_write.output == ("5\n" if kind.folder else "")


@isolated
def test_without_the_tools_that_mount_programs_have_no_folder(monkeypatch):
    which = sandbox.shutil.which
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: name != "unshare" and which(name))
    assert sandbox._found.__wrapped__() == (sandbox._KINDS[-1], None)


# Becomes nobody, to whom a private folder above Python's installation seems to be a readable one.
AS_NOBODY = """
if [ -n "{private}" ]; then
    mount --bind {prefix} {point}
    mount -t tmpfs -o mode=0755 none {private}
    mkdir -p {prefix}
    mount --bind {point} {prefix}
fi
export PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1
exec setpriv --reuid 65534 --regid 65534 --clear-groups {python} -m tests.qerl_jax.rewards.escapes "$0"
"""


@isolated
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="who runs this is an ordinary user already")
def test_no_escape_gets_out_as_an_ordinary_user_either(machine):
    needs_the_machine(CALL)
    above = reversed(pathlib.Path(sys.base_prefix).parents)
    private = next((path for path in above if not path.stat().st_mode & stat.S_IXOTH), "")
    python = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (machine["host"], *machine["host"].parents[:2]):
        folder.chmod(0o755)
    with tempfile.TemporaryDirectory() as point:
        places = {"prefix": sys.base_prefix, "point": point, "private": private}
        script = AS_NOBODY.format(**places, root=ROOT, python=python)
        facts = json.dumps({name: str(value) for name, value in machine.items()})
        command = ["unshare", "--mount", "--", "sh", "-ec", script, facts]
        tried = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300)
    if "denied" in tried.stderr and not tried.stdout:
        pytest.skip(f"nobody cannot read the project or Python here: {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr
    assert json.loads(tried.stdout) == []


REAL = (
    "connect to a server of this machine|connect to a unix socket of this machine|"
    "write to a folder of this machine|read a secret of this machine|"
    "read the secret through a symbolic link|read the secret through a hard link|"
    "read an inherited file|read the environment|read the memory of others|see other processes|"
    "signal a process of this machine|spawn|listen|fill the folder with many files|"
    "take memory in the buffers of sockets|take memory in empty files|take memory in links|"
    "take memory in locks|take memory in timers|start threads that no library knows|"
    "open many files"
).split("|")


@pytest.mark.parametrize("name", REAL)
def test_the_same_attempt_succeeds_outside(name, machine, tmp_path_factory):
    """The attempts are real: without the sandbox they succeed."""
    needs_the_machine(ESCAPES[name])
    passed = [number for number in range(3, 64) if is_inheritable(number)]
    attempt = outside(written(ESCAPES[name], machine), tmp_path_factory.mktemp("cwd"), passed)
    (machine["host"] / "escaped").unlink(missing_ok=True)
    assert "escaped" in attempt.stdout, attempt.stderr


def outside(program, folder, passed=()):
    """Runs a program without the sandbox."""
    options = {"capture_output": True, "text": True, "timeout": 60, "pass_fds": passed}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, **options)


def is_inheritable(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


@isolated
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_program_is_ended(name):
    started = time.monotonic()
    assert run(ENDLESS[name], limits=BRIEF).status in ("timeout", "failed")
    assert time.monotonic() - started < 30  # the clock of a busy machine, not a measurement


@isolated
def test_output_is_cut_at_its_limit():
    outcome = run("while True: print('x' * 10_000)", limits=Limits(seconds=20))
    assert outcome.status == "failed" and len(outcome.output) <= 16 << 20


@isolated
def test_nothing_of_one_program_is_left_for_the_next():
    assert run("open('x', 'w'); print('made')").output == "made\n"
    assert run("import os; print(os.listdir('.'))").output == "[]\n"


@isolated
def test_killing_everything_it_sees_hurts_nobody_else(machine):
    program = "import os, signal\nos.kill(-1, signal.SIGKILL)"
    assert run(program).status in ("ok", "failed")
    assert run("print('still here')").output == "still here\n"


@isolated
def test_programs_run_side_by_side_in_order():
    jobs = [("print(int(input()) ** 2)", f"{n}\n") for n in range(6)]
    outcomes = sandbox.runner(USUAL, workers=2).map(jobs)
    assert [outcome.output for outcome in outcomes] == [f"{n * n}\n" for n in range(6)]


def test_the_list_of_escapes_is_long_enough():
    assert len(ESCAPES) + len(ENDLESS) >= 80


@pytest.mark.parametrize(
    ("machine_name", "script", "reason"),
    [
        ("riscv64", "exit 0", "needs Linux on x86_64 or aarch64, not linux riscv64"),
        ("x86_64", None, "bwrap is not installed"),
        ("x86_64", "echo 'not now' >&2; exit 1", "a trial program .not now.; are user"),
        ("x86_64", "exit 0", "a trial program .ok."),
    ],
)
def test_without_isolation_nothing_is_run(machine_name, script, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    monkeypatch.setattr(sandbox.platform, "machine", lambda: machine_name)
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(f"#!/bin/sh\n{script}\n")
    bwrap.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: script and str(bwrap))
    monkeypatch.setattr(sandbox, "_found", sandbox._found.__wrapped__)
    assert re.search(reason, sandbox.unavailable.__wrapped__())
    monkeypatch.setattr(sandbox, "unavailable", sandbox.unavailable.__wrapped__)
    with pytest.raises(NotImplementedError, match=reason):
        sandbox.runner(USUAL).map([("print('escaped')", "")])


def test_the_trial_program_notices_that_nothing_isolates_it(tmp_path):
    trial = outside(sandbox._probe(sandbox._KINDS[0]), tmp_path)
    assert trial.returncode != 0
    assert trial.stderr.count("AssertionError") == 1 and trial.stderr.endswith(": fork\n")
