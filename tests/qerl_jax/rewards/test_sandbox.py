"""The sandbox: what programs may do, and escapes that it stops, each tried for real."""

import contextlib
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from qerl_jax.rewards import sandbox
from qerl_jax.rewards.sandbox import Limits

WHY_NOT = sandbox.unavailable()
isolated = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
USUAL, BRIEF = Limits(), Limits(seconds=0.5)


def run(program, stdin="", limits=USUAL):
    return sandbox.run(textwrap.dedent(program), stdin, limits)


HONEST = {
    "reads and writes": ("a = int(input()); print(a + int(input()))", "1\n2\n", "3\n"),
    "all of the input": ("import sys; print(len(sys.stdin.read()))", "x" * 1_000_000, "1000000\n"),
    "unicode": ("print(input()[::-1])", "京東 🙂\n", "🙂 東京\n"),
    "standard library": (
        "import bisect, collections, heapq, itertools, math, re; print(math.comb(5, 2))",
        "",
        "10\n",
    ),
    "is the main module": (
        "print(__name__)\nclass A: pass\nprint(A.__module__)",
        "",
        "__main__\n" * 2,
    ),
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
    "seconds of work": (
        "import time\nwhile time.process_time() < 1.5: pass\nprint('done')",
        "",
        "done\n",
    ),
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
    assert run("print('before', flush=True)\nwhile True: pass", limits=BRIEF) == sandbox.Outcome(
        "timeout", "before\n"
    )


# Each program prints "escaped" if it gets anywhere; CALL makes system calls by their x86_64 number.
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) >= 0:
        print("escaped")
    else:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
ESCAPES = {
    # the network
    "connect to the internet": """
        import socket
        socket.create_connection(("1.1.1.1", 53), timeout=1)
        print("escaped")
        """,
    "connect to a server of this machine": """
        import socket
        socket.create_connection(("127.0.0.1", {port}), timeout=1)
        print("escaped")
        """,
    "look up a name": "import socket; socket.gethostbyname('example.com'); print('escaped')",
    "connect to a unix socket of this machine": """
        import socket
        socket.socket(socket.AF_UNIX).connect("{host}/server.sock")
        print("escaped")
        """,
    "listen": """
        import socket
        socket.create_server(("127.0.0.1", 0))
        print("escaped")
        """,
    # files
    "write to the root": "open('/escaped', 'w'); print('escaped')",
    "write beside the program": "open('/program.py', 'w'); print('escaped')",
    "write to the system": "open('/usr/escaped', 'w'); print('escaped')",
    "write to the Python installation": """
        import os
        open(os.path.join(os.path.dirname(os.__file__), "escaped.py"), "w")
        print("escaped")
        """,
    "write to a folder of this machine": """
        import os
        os.makedirs("{host}", exist_ok=True)
        open("{host}/escaped", "w")
        print("escaped")
        """,
    "read a secret of this machine": "print('escaped', open('{host}/secret').read())",
    "read the secret from above the folder": """
        print("escaped", open("/box/../../../../{host}/secret").read())
        """,
    "read the secret through a symbolic link": """
        import os
        os.symlink("{host}/secret", "link")
        print("escaped", open("link").read())
        """,
    "read the secret through a hard link": """
        import os
        os.link("{host}/secret", "link")
        print("escaped", open("link").read())
        """,
    "read the list of users": "print('escaped', open('/etc/passwd').read())",
    "read the home folder, where Python may be installed": """
        import os, sys
        for name in os.listdir("{home}"):
            if not sys.base_prefix.startswith(os.path.join("{home}", name)):
                print("escaped")
        """,
    "read the project": "print('escaped', open('{project}').read())",
    "read an inherited file": """
        import os
        for number in range(3, 64):
            try:
                print("escaped", os.read(number, 10))
            except OSError:
                pass
        """,
    "make a device": """
        import os, stat
        os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
        print("escaped")
        """,
    "open the terminal": "open('/dev/tty', 'w'); print('escaped')",
    "leave the root": "import os; os.chroot('/box'); print('escaped')",
    "mount": CALL + "call(165, b'none', b'/box', b'tmpfs', 0, None)",
    # what others know
    "read the environment": """
        import os
        if os.environ.get("SECRET"):
            print("escaped")
        """,
    "read the environment of the first process": """
        print("escaped", open("/proc/1/environ").read())
        """,
    "read the memory of others": """
        print("escaped", open("/proc/{pid}/maps").read())
        """,
    "see other processes": "import os; print('escaped', os.listdir('/proc'))",
    "trace its parent": CALL + "call(101, 16, os.getppid(), 0, 0)",
    "read the memory of its parent": CALL + "call(310, os.getppid(), None, 0, None, 0, 0)",
    "use the kernel's keys": CALL + "call(250, 0, -3, 0)",
    # other processes
    "signal a process of this machine": """
        import os
        os.kill({pid}, 0)
        print("escaped")
        """,
    "fork": "import os; os.fork(); print('escaped')",
    "spawn": "import subprocess; subprocess.run(['/bin/true'], check=True); print('escaped')",
    "fork by the raw call": CALL + "call(57)",
    "clone by the raw call": CALL + "call(56, 17, 0, 0, 0, 0)",
    "clone by the newer call": CALL + "call(435, (ctypes.c_uint64 * 8)(), 64)",
    "fork by the second table of calls": CALL + "call(0x40000000 | 57)",
    "enter another namespace": CALL + "call(272, 0x10000000)",
    # the kernel
    "load a program into the kernel": CALL + "call(321, 0, None, 0)",
    "use the asynchronous interface": CALL + "call(425, 8, (ctypes.c_uint64 * 15)())",
    "become root": "import os; os.setuid(0); print('escaped')",
    "raise a limit": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        print("escaped")
        """,
    # resources
    "take memory": "x = bytearray(2 << 30); print('escaped')",
    "take memory bit by bit": """
        x = []
        while len(x) < 4096:
            x.append(bytearray(1 << 20))
        print("escaped")
        """,
    "take memory in a file that has no name": CALL + "call(319, b'x', 0)",
    "take shared memory": CALL + "call(29, 0, 1 << 30, 0o1600)",
    "fill the folder with one file": """
        with open("x", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        print("escaped")
        """,
    "fill the folder with many files": """
        for number in range(64):
            with open(str(number), "wb") as file:
                file.write(bytes(1 << 20))
        print("escaped")
        """,
}
# Those that a limit on time must end; they never print.
ENDLESS = {
    "sleep": "import time; time.sleep(1000)",
    "loop": "while True: pass",
    "loop and ignore the signal of the limit": """
        import signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True: pass
        """,
    "loop in one step of the interpreter": "7 ** 10**9",
    "wait for a thread that never ends": """
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        """,
    "start threads without end": """
        import threading, time
        while True:
            try:
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            except RuntimeError:
                pass
        """,
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Things of this machine that a program might reach: secrets, servers, a process."""
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


def written(attempt, machine):
    if attempt.startswith(CALL) and platform.machine() != "x86_64":
        pytest.skip("the numbers of its system calls are x86_64's")
    program = textwrap.dedent(attempt)
    for name, value in machine.items():
        program = program.replace("{" + name + "}", str(value))
    return program


@isolated
@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_stopped(name, machine):
    outcome = run(written(ESCAPES[name], machine))
    assert "escaped" not in outcome.output
    # Ended by an error of the attempt itself, or at its end without a result; not by a limit on
    # time, which would say nothing about what it tried.
    assert outcome.status in ("failed", "ok")


@pytest.mark.parametrize(
    "name",
    [
        "connect to a server of this machine",
        "connect to a unix socket of this machine",
        "write to a folder of this machine",
        "read a secret of this machine",
        "read the secret through a symbolic link",
        "read the secret through a hard link",
        "read an inherited file",
        "read the environment",
        "read the memory of others",
        "see other processes",
        "signal a process of this machine",
        "spawn",
        "listen",
        "fill the folder with many files",
    ],
)
def test_the_same_attempt_succeeds_outside(name, machine, tmp_path_factory):
    """The attempts are real: without the sandbox they get where they want."""
    attempt = subprocess.run(
        [sys.executable, "-c", written(ESCAPES[name], machine)],
        cwd=tmp_path_factory.mktemp("outside"),
        pass_fds=[number for number in range(3, 64) if is_inheritable(number)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    (machine["host"] / "escaped").unlink(missing_ok=True)
    assert "escaped" in attempt.stdout, attempt.stderr


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
    assert len(ESCAPES) + len(ENDLESS) >= 20


@pytest.mark.parametrize(
    ("machine_name", "script", "reason"),
    [
        ("riscv64", "exit 0", "needs Linux on x86_64 or aarch64, not linux riscv64"),
        ("x86_64", None, "bwrap is not installed"),
        (
            "x86_64",
            "echo 'no permissions' >&2; exit 1",
            "a trial program .no permissions.; are user",
        ),
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
    assert re.search(reason, sandbox.unavailable.__wrapped__())
    monkeypatch.setattr(sandbox, "unavailable", sandbox.unavailable.__wrapped__)
    with pytest.raises(NotImplementedError, match=reason):
        sandbox.runner(USUAL).map([("print('escaped')", "")])


def test_the_trial_program_notices_that_nothing_isolates_it(tmp_path):
    trial = subprocess.run(
        [sys.executable, "-c", sandbox._PROBE],
        capture_output=True,
        cwd=tmp_path,
        text=True,
        timeout=60,
    )
    assert trial.returncode != 0
    assert trial.stderr.count("AssertionError") == 1 and trial.stderr.endswith(": fork\n")
