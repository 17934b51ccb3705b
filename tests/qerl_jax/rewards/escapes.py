"""Programs that try to get out of the sandbox, or to take more than it gives.

    python -m tests.qerl_jax.rewards.escapes FACTS

runs all of them in the sandbox, as the user who calls it, and writes a list of those that were not stopped.
FACTS is a JSON object: what this machine has that a program might reach, see `written`.
"""

import json
import sys
import textwrap

# A program that prints nothing itself prints "escaped" after its last line, see `written`. CALL makes system calls by
# their x86_64 number.
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
    "connect to the internet": "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)",
    "connect to a server of this machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "look up a name": "import socket; socket.gethostbyname('example.com')",
    "connect to a unix socket of this machine": """
        import socket
        socket.socket(socket.AF_UNIX).connect("{host}/server.sock")
        """,
    "listen": "import socket; socket.create_server(('127.0.0.1', 0))",
    # files
    "write to the root": "open('/escaped', 'w')",
    "write beside the program": "open('/program.py', 'w')",
    "write to the system": "open('/usr/escaped', 'w')",
    "write to the Python installation": "import os; open(os.path.dirname(os.__file__) + '/escaped.py', 'w')",
    "write to a folder of this machine": """
        import os
        os.makedirs("{host}", exist_ok=True)
        open("{host}/escaped", "w")
        """,
    "read a secret of this machine": "print('escaped', open('{host}/secret').read())",
    "read the secret from above the folder": "print('escaped', open('/box/../../../../{host}/secret').read())",
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
    "make a device": "import os, stat; os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "open the terminal": "open('/dev/tty', 'w')",
    "leave the root": "import os; os.chroot('/box')",
    "mount": CALL + "call(165, b'none', b'/box', b'tmpfs', 0, None)",
    # what others know
    "read the environment": "import os; print('escaped' * ('SECRET' in os.environ))",
    "read the environment of the first process": "print('escaped', open('/proc/1/environ').read())",
    "read the memory of others": "print('escaped', open('/proc/{pid}/maps').read())",
    "see other processes": "import os; print('escaped', os.listdir('/proc'))",
    "trace its parent": CALL + "call(101, 16, os.getppid(), 0, 0)",
    "read the memory of its parent": CALL + "call(310, os.getppid(), None, 0, None, 0, 0)",
    "use the kernel's keys": CALL + "call(250, 0, -3, 0)",
    # other processes
    "signal a process of this machine": "import os; os.kill({pid}, 0)",
    "fork": "import os; os.fork()",
    "spawn": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "fork by the raw call": CALL + "call(57)",
    "clone by the raw call": CALL + "call(56, 17, 0, 0, 0, 0)",
    "clone by the newer call": CALL + "call(435, (ctypes.c_uint64 * 8)(), 64)",
    "fork by the second table of calls": CALL + "call(0x40000000 | 57)",
    "enter another namespace": CALL + "call(272, 0x10000000)",
    # the kernel
    "load a program into the kernel": CALL + "call(321, 0, None, 0)",
    "use the asynchronous interface": CALL + "call(425, 8, (ctypes.c_uint64 * 15)())",
    "become root": "import os; os.setuid(0)",
    "become anyone": "import os; os.setresuid(1, 1, 1)",
    "take the rights of another group": "import os; os.setgroups([0])",
    "run a program that belongs to root": "import os; os.execv('/usr/bin/su', ['su', '-c', 'echo escaped'])",
    "become root by a file's mark": """
        import os, shutil
        shutil.copy("/usr/bin/id", "id")
        os.chmod("id", 0o4755)
        os.execv("id", ["id"])
        """,
    "handle its own page faults": CALL + "call(323, 0)",
    "take a file of memory that is secret": CALL + "call(447, 0)",
    "watch the kernel": CALL + "call(298, (ctypes.c_uint64 * 16)(112), 0, -1, -1, 0)",
    "take another's open file": CALL + "call(438, call(434, 1, 0) or 3, 0, 0)",
    "make a key": CALL + "call(248, b'user', b'a', b'b', 1, -3)",
    "open a file by its number": CALL + "call(304, -100, (ctypes.c_uint64 * 4)(8), 0)",
    "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "set the name of the machine": "import socket; socket.sethostname('x')",
    "write to the terminal's input": """
        import fcntl, termios
        for number in (0, 1, 2):
            try:
                fcntl.ioctl(number, termios.TIOCSTI, b"x")
                print("escaped")
            except OSError:
                pass
        """,
    "read the kernel's messages": CALL + "call(103, 3, ctypes.create_string_buffer(99), 99)",
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)",
    # resources
    "take memory": "x = bytearray(2 << 30)",
    "take memory bit by bit": """
        x = []
        while len(x) < 4096:
            x.append(bytearray(1 << 20))
        """,
    "take memory in a file that has no name": CALL + "call(319, b'x', 0)",
    "take memory in the buffers of sockets": """
        import socket
        pairs = []
        while len(pairs) < 16:
            pairs.append(socket.socketpair())
            for end in pairs[-1]:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
        """,
    "take memory in larger pipes": """
        import fcntl, os
        for _ in range(8):
            fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)
        """,
    "take memory in locks": """
        import fcntl
        with open("x", "w") as file:
            for place in range(0, 2000, 2):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        """,
    "take memory in empty files": """
        for number in range(2000):
            open(str(number), "w").close()
        """,
    "take memory in empty folders": """
        import os
        for number in range(2000):
            os.mkdir(str(number))
        """,
    "take memory in links": """
        import os
        for number in range(2000):
            os.symlink("x" * 4000, str(number))
        """,
    "take memory in more names of one file": """
        import os
        open("x", "w").close()
        for number in range(2000):
            os.link("x", str(number))
        """,
    "take memory in what is noted of a file": """
        import os
        open("x", "w").close()
        for number in range(100):
            os.setxattr("x", f"user.{number}", bytes(1000))
        """,
    "take memory in watches": CALL + "call(294, 0)",
    "take memory in timers": CALL
    + """
for _ in range(2000):
    if libc.syscall(222, 1, None, ctypes.byref(ctypes.c_int())) < 0:
        break
else:
    print("escaped")
""",
    "take memory in asynchronous input": CALL + "call(206, 1000, ctypes.byref(ctypes.c_ulong()))",
    "take memory in filters": CALL + "call(317, 2, 0, None)",
    "take memory in rules": CALL + "call(444, (ctypes.c_uint64 * 2)(1), 8, 0)",
    "take queues": CALL + "call(68, 0, 0o1600)",
    "take semaphores": CALL + "call(64, 0, 1000, 0o1600)",
    "take a queue that has a name": CALL + "call(240, b'x', 0o102, 0o600, None)",
    "start threads that no library knows": """
        import ctypes, mmap, os
        # Calls clone(CLONE_VM | FS | FILES | SIGHAND | THREAD) n times; the threads only wait.
        code = bytes.fromhex(
            "53415489fb4531e4b838000000bf000f010031f631d24d31d24d31c00f0585c0741078"
            "0741ffc4ffcb75dd4489e0415c5bc3b8220000000f05ebf7"
        )
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(code)
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(place)(2000) > 200:
            print("escaped", flush=True)
        os._exit(0)
        """,
    "open many files": """
        files = []
        while len(files) < 200:
            files.append(open("/dev/null"))
        """,
    "take shared memory": CALL + "call(29, 0, 1 << 30, 0o1600)",
    "fill the folder with one file": """
        with open("x", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        """,
    "fill the folder with many files": """
        for number in range(64):
            with open(str(number), "wb") as file:
                file.write(bytes(1 << 20))
        """,
    "fill the disk with a hole that is filled": "import os; os.posix_fallocate(1, 0, 1 << 30)",
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


def written(attempt, machine):
    """Writes the program of an attempt with the facts of a machine: `host`, `home`, `project`, `port`, `pid`."""
    program = textwrap.dedent(attempt)
    program += "" if "print(" in program else "\nprint('escaped')"
    for name, value in machine.items():
        program = program.replace("{" + name + "}", str(value))
    return program


def got_out(name, machine):
    """Returns what an attempt printed if it was not stopped, or only by the clock; None if all is well."""
    from qerl_jax.rewards import sandbox

    outcome = sandbox.run(written(ESCAPES[name], machine), "", sandbox.Limits())
    # Ended by an error of the attempt itself, or at its end without a result; not by a limit on
    # time, which would say nothing about what it tried.
    is_stopped = "escaped" not in outcome.output and outcome.status in ("failed", "ok")
    return None if is_stopped else f"{name}: {outcome}"


if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    out = [found for name in ESCAPES if (found := got_out(name, facts))]
    sys.stdout.write(json.dumps(out))
