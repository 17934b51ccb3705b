"""Runs programs written by a policy in a sandbox.

A program is one process in its own namespaces (bubblewrap), without network and environment. It sees the Python
installation, read-only, and one small writable folder in memory; the folder is read-only where file systems cannot be
mounted. A seccomp filter and resource limits bound the rest. If any of this is not available, no program is run.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import math
import os
import pathlib
import platform
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
from typing import IO, Literal

from qerl_jax.system.early_calls import Ahead

_FOLDER_BYTES = 16 << 20  # also the largest file, output included
_FOLDER_FILES = 256
_THREADS = 64
# Range of user ids that other users do not have.
_FIRST_USER, _USERS = 1 << 30, 1 << 29


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Attributes:
        seconds: CPU time in seconds; the wall-clock limit is twice as long.
        memory_mb: Address space in MiB, at least 64. The default is generous, because solutions start threads with
            large stacks.

    Raises:
        ValueError: If a limit is too small.
    """

    seconds: float = 5.0
    memory_mb: int = 1024

    def __post_init__(self):
        if self.seconds <= 0 or self.memory_mb < 64:
            raise ValueError(f"{self}: seconds must be positive and memory_mb at least 64")


type Status = Literal["ok", "failed", "timeout"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end status and the output of a program.

    Attributes:
        status: "ok" for exit status 0, "timeout" if a time limit ended it, else "failed".
        output: Its standard output, at most 16 MiB.
        errors: Its standard error, at most 16 MiB.
    """

    status: Status
    output: str
    errors: str = dataclasses.field(default="", compare=False, repr=False)


def runner(limits: Limits, workers: int | None = None) -> Ahead[tuple[str, str], Outcome]:
    """Makes a runner of (program, input) pairs, which runs them in parallel, and ahead of time with `begin`.

    Args:
        limits: Limits of each program.
        workers: Number of programs at a time; None means one per processor.

    Returns:
        The runner. Its `map` raises NotImplementedError if programs cannot be isolated; then none has run.
    """

    def isolated(job: tuple[str, str]) -> Outcome:
        require()
        return run(*job, limits)

    return Ahead(isolated, workers or os.cpu_count() or 1)


def require() -> None:
    """Checks, once per process, that programs can be isolated here.

    Raises:
        NotImplementedError: If they cannot, with the reason.
    """
    if (reason := unavailable()) is not None:
        raise NotImplementedError(
            f"programs of the policy cannot be isolated here, so none is run: {reason}"
        )


@functools.cache
def unavailable() -> str | None:
    """Returns why programs cannot be isolated on this machine, or None if they can; runs trial programs once."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"needs Linux on {' or '.join(_MACHINES)}, not {sys.platform} {platform.machine()}"
    if not shutil.which("bwrap"):
        return "bwrap is not installed (package bubblewrap, 0.7 or newer)"
    return _found()[1]


@functools.cache
def _found() -> tuple["_Isolation", str | None]:
    """Returns the first kind of isolation that a trial program finds complete, and None; or the reason if none is."""
    for isolation in _KINDS:
        lacks_root = isolation.own_user and os.geteuid() != 0
        if lacks_root or not all(map(shutil.which, _TOOLS if isolation.folder else ())):
            continue
        outcome = _run(_probe(isolation), "", Limits(seconds=30), isolation)
        if outcome.status == "ok" and outcome.output == "isolated\n":
            return isolation, None
    reason = outcome.errors.strip().rpartition("\n")[2] or outcome.status
    why = f"bwrap could not isolate a trial program ({reason}); are user namespaces allowed?"
    return isolation, why


@dataclasses.dataclass(frozen=True)
class _Isolation:
    """A way to isolate programs.

    Attributes:
        own_user: Whether root gives each program its own user, since the kernel does not count root's threads. Otherwise
            the program runs as nobody in a user namespace, which is the caller's user outside of it.
        folder: Whether there is a writable folder. The number of its files is limited, which bwrap alone cannot do.
    """

    own_user: bool
    folder: bool


# Programs needed for a writable folder: those of util-linux, and a shell.
_TOOLS = ("unshare", "mount", "setpriv", "sh")
# The kinds of isolation, best first.
_KINDS = (_Isolation(True, True), _Isolation(False, True), _Isolation(False, False))


# The trial program: checks that everything forbidden fails. The reason names the assertion that fails.
_PROBE = """
import os, socket
def denied(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
def fork():  # whose child, where there is one, says nothing
    os.fork() or os._exit(0)
assert denied(fork), "fork"
assert denied(socket.socket), "socket"
assert denied(open, "/escaped", "w"), "a file outside of the folder"
assert denied(os.listdir, "/proc"), "/proc"
assert denied(os.kill, os.getppid(), 9) or os.getppid() <= 1, "kill"
assert denied(os.setuid, 0), "root"
assert set(os.environ) <= {{"PWD", "LC_CTYPE"}}, sorted(os.environ)
assert bool(denied(open, "inside", "w")) != {folder}, "a folder to write to"
def many():
    for number in range({files}):
        open(str(number), "w").close()
assert denied(many), "many files"
print("isolated")
"""


def _probe(isolation: _Isolation) -> str:
    return _PROBE.format(folder=isolation.folder, files=_FOLDER_FILES)


# Sets the limits, then runs the program in the same module, so that a thread that outlives the main program still
# finds its globals.
_LAUNCHER = """
import resource
for name, soft, hard in {limits}:
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))
del resource, name, soft, hard
exec(compile(open("/program.py", encoding="utf-8").read(), "/program.py", "exec"))
"""


def run(program: str, stdin: str, limits: Limits) -> Outcome:
    """Runs a Python program with `stdin` as its standard input. Call `require` once before."""
    return _run(program, stdin, limits, _found()[0])


def _run(program: str, stdin: str, limits: Limits, isolation: _Isolation) -> Outcome:
    contents = (program.encode("utf-8", "replace"), stdin.encode("utf-8", "replace"), _seccomp())
    with contextlib.ExitStack() as stack:
        code, standard_input, rules, output, errors = (
            stack.enter_context(_file(content)) for content in (*contents, b"", b"")
        )
        try:
            status = subprocess.run(
                _command(code.fileno(), rules.fileno(), limits, isolation),
                stdin=standard_input,
                stdout=output,
                stderr=errors,
                env={},
                pass_fds=(code.fileno(), rules.fileno()),
                timeout=2 * limits.seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        # 128 + SIGXCPU and, for a program that ignores it, 128 + SIGKILL.
        ends: dict[int | None, Status] = {0: "ok", None: "timeout", 152: "timeout", 137: "timeout"}
        return Outcome(ends.get(status, "failed"), _text(output), _text(errors))


def _file(content: bytes) -> IO[bytes]:
    """Makes a file without a name, positioned at its start. The limit on file size bounds what a program writes."""
    file = tempfile.TemporaryFile()
    file.write(content)
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_FOLDER_BYTES).decode("utf-8", "replace")


def _command(code: int, rules: int, limits: Limits, isolation: _Isolation) -> list[str]:
    seconds, memory = math.ceil(limits.seconds), limits.memory_mb << 20
    rlimits = (
        ("CPU", seconds, seconds + 1),
        ("AS", memory, memory),
        ("FSIZE", _FOLDER_BYTES, _FOLDER_BYTES),
        # Threads; the kernel counts them for ordinary users, not for root.
        ("NPROC", _THREADS, _THREADS),
        *(("NOFILE", 64, 64), ("SIGPENDING", 64, 64), ("CORE", 0, 0), ("MEMLOCK", 0, 0)),
    )
    python = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    folders = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix)
    # Parent folders of the installation are made anew, because the real ones may be private to one user.
    above = [str(path) for path in reversed(pathlib.Path(sys.base_prefix).parents)][1:]
    devices = ("/dev/null", "/dev/zero", "/dev/urandom")
    box = ("--bind", _mount_point(), "/box") if isolation.folder else ("--dir", "/box")
    namespaces = ("ipc", "pid", "net", "uts", "cgroup-try")
    return [
        *_before(isolation),
        shutil.which("bwrap"),
        *(f"--unshare-{namespace}" for namespace in namespaces),
        *("--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL"),
        *(("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if isolation.own_user else ()),
        *(("--unshare-user", "--uid", "65534", "--gid", "65534") * (not isolation.own_user)),
        *(part for folder in above for part in ("--perms", "0755", "--dir", folder)),
        *(part for folder in folders for part in ("--ro-bind-try", folder, folder)),
        *(part for device in devices for part in ("--dev-bind", device, device)),
        *("--perms", "0444", "--ro-bind-data", str(code), "/program.py"),
        *(*box, "--chdir", "/box"),
        # This must come after the last mount point has been made.
        *("--remount-ro", "/", "--seccomp", str(rules), "--"),
        *_as_own_user(isolation),
        # -S, because installed packages are not mounted.
        *(python, "-I", "-S", "-B", "-X", "utf8"),
        *("-c", _LAUNCHER.format(limits=rlimits)),
    ]


def _before(isolation: _Isolation) -> list[str]:
    """Returns a command that mounts the folder, visible only to this program, and then runs the command after it."""
    if not isolation.folder:
        return []
    unshare, shell, mount = map(shutil.which, ("unshare", "sh", "mount"))
    user = [] if isolation.own_user else ["--user", "--map-root-user"]
    options = f"size={_FOLDER_BYTES},nr_inodes={_FOLDER_FILES},mode=0777,nosuid,nodev"
    script = f'{mount} -t tmpfs -o {options} box "$0" && exec "$@"'
    return [str(unshare), *user, "--mount", "--", str(shell), "-c", script, _mount_point()]


def _as_own_user(isolation: _Isolation) -> list[str]:
    """Returns a command that switches from root to a user for this program only: threads are counted per user."""
    if not isolation.own_user:
        return []
    user = str(_FIRST_USER + secrets.randbelow(_USERS))
    return [str(shutil.which("setpriv")), "--reuid", user, "--regid", user, "--clear-groups", "--"]


@functools.cache
def _mount_point() -> str:
    """Makes an empty folder, once per process, over which each program's own folder is mounted."""
    folder = tempfile.TemporaryDirectory(prefix="qerl-box-")
    atexit.register(folder.cleanup)
    return folder.name


# System calls that are refused: name, number on x86_64, number on aarch64 (None if it does not exist there).
_REFUSED = (
    ("fork", 57, None), ("vfork", 58, None), ("socket", 41, 198), ("socketpair", 53, 199),
    ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271),
    ("kcmp", 312, 272), ("pidfd_open", 434, 434), ("pidfd_getfd", 438, 438),
    ("unshare", 272, 97), ("setns", 308, 268), ("mount", 165, 40), ("umount2", 166, 39),
    ("pivot_root", 155, 41), ("chroot", 161, 51), ("open_tree", 428, 428), ("move_mount", 429, 429),
    ("fsopen", 430, 430), ("mount_setattr", 442, 442), ("open_by_handle_at", 304, 265),
    ("bpf", 321, 280), ("perf_event_open", 298, 241), ("userfaultfd", 323, 282),
    ("io_uring_setup", 425, 425), ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    # Memory that belongs to no address space.
    ("memfd_create", 319, 279), ("memfd_secret", 447, 447), ("shmget", 29, 194), ("msgget", 68, 186),
    ("semget", 64, 190), ("mq_open", 240, 180), ("io_setup", 206, 0),
    # Memory of the kernel that no limit counts.
    ("inotify_init", 253, None), ("inotify_init1", 294, 26), ("fanotify_init", 300, 262),
    ("setxattr", 188, 5), ("lsetxattr", 189, 6), ("fsetxattr", 190, 7), ("setxattrat", 463, 463),
    ("landlock_create_ruleset", 444, 444), ("seccomp", 317, 277),
)  # fmt: skip
# Commands of `fcntl` for locks, leases and larger pipes, which take kernel memory too.
_REFUSED_FCNTL = (6, 7, 37, 38, 1024, 1026, 1031)
# AUDIT_ARCH number, column of _REFUSED, numbers of clone and fcntl.
_MACHINES = {"x86_64": (0xC000003E, 1, 56, 72), "aarch64": (0xC00000B7, 2, 220, 25)}
_CLONE3 = 435
_CLONE_THREAD = 0x10000


@functools.cache
def _seccomp() -> bytes:
    """Returns the filter as classic BPF, which bwrap loads right before the program starts.

    `clone` is allowed for threads only. `clone3` passes its flags by a pointer, which a filter cannot read, so the
    filter answers that it does not exist, and the C library falls back to `clone`.
    """
    architecture, column, clone, fcntl = _MACHINES[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, missing = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    # Offsets in struct seccomp_data.
    number, machine, first_argument, second_argument = 0, 4, 16, 24

    def when(test: int, value: int, verdict: int) -> list[tuple[int, int, int, int]]:
        return [(test, 0, 1, value), (give, 0, 0, verdict)]

    refused = (call for row in _REFUSED if isinstance(call := row[column], int))
    program = [
        *((load, 0, 0, machine), (equal, 1, 0, architecture), (give, 0, 0, kill)),
        (load, 0, 0, number),
        *when(at_least, 0x40000000, refuse),  # the x32 system calls of x86_64
        *when(equal, _CLONE3, missing),
        *(step for call in refused for step in when(equal, call, refuse)),
        # A clone: allowed if it is a thread. Any other call continues after these four.
        *((equal, 0, 4, clone), (load, 0, 0, first_argument)),
        *((any_bit, 0, 1, _CLONE_THREAD), (give, 0, 0, allow), (give, 0, 0, refuse)),
        # Not fcntl: jump to the verdict "allow" at the end.
        *((equal, 0, 1 + 2 * len(_REFUSED_FCNTL), fcntl), (load, 0, 0, second_argument)),
        *(step for command in _REFUSED_FCNTL for step in when(equal, command, refuse)),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
