"""Verifiers of the styles that people write, which launch code by `untrusted`, and hostile programs under them.

The work is a program that adds two numbers. Each cheat is such a program, or something an agent leaves beside it.
"""

from __future__ import annotations

from rollcage.types import SandboxSpec, Task

HONEST = "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)\nopen('out.txt', 'w').write(str(a + b))\n"
CASES = {"in_7731.txt": "2 3\n", "expected_7731.txt": "5\n"}

STYLES = {
    "a pipe of commands": Task(
        instruction="-",
        verify=(
            'untrusted --timeout 4 python3 solve.py < "$TESTS_DIR/in_7731.txt" | diff - "$TESTS_DIR/expected_7731.txt"',
        ),
        tests=CASES,
    ),
    "a script that writes a reward": Task(
        instruction="-",
        test_script="""
            said=$(untrusted --timeout 4 --max-output 1M python3 solve.py < "$TESTS_DIR/in_7731.txt" | tail -c 100)
            if [ "$said" = "$(cat "$TESTS_DIR/expected_7731.txt")" ]; then echo 1; else echo 0; fi > "$REWARD_FILE"
        """,
        tests=CASES,
    ),
    "a Python program that sees no work": Task(
        instruction="-",
        verify=('python3 "$TESTS_DIR/check.py"',),
        tests={
            "check.py": """
import os, random
from untrusted import run
passed = 0
for _ in range(2):
    a, b = random.randrange(10**6), random.randrange(10**6)
    ended = run(["python3", "solve.py"], input=f"{a} {b}", text=True, timeout=4, max_output=1 << 20)
    left = run(["head", "-c", "100", "out.txt"], text=True, timeout=4)
    passed += ended.stdout.strip() == str(a + b) and left.stdout.strip() == str(a + b)
with open(os.environ["REWARD_FILE"], "w") as file:
    file.write(str(passed / 2))
"""
        },
        isolate=True,
    ),
}

PROGRAMS = {
    "ends at once": "raise SystemExit(0)",
    "writes the reward where it lies": """
        import os
        folder = os.path.dirname(os.environ.get("REWARD_FILE", "/home/user/logs/verifier/reward.txt"))
        os.makedirs(folder, exist_ok=True)
        for name in ("reward.txt", "reward.json"): open(f"{folder}/{name}", "w").write("1")
    """,
    "looks for the tests": """
        import os
        for top, _, names in os.walk("/"):
            if top.startswith(("/proc", "/sys", "/usr")): continue
            for name in names:
                if "7731" in name: print(open(os.path.join(top, name)).read())
    """,
    "reads the processes around it": """
        import glob
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/fd/*"):
            try:
                data = open(path, "rb").read(100000)
                if b"7731" in data and b"solve" not in data: print(5)
            except OSError: pass
    """,
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kills its parents by number": """
        import os, signal
        for pid in range(1, 4000):
            if pid != os.getpid():
                try: os.kill(pid, signal.SIGKILL)
                except OSError: pass
    """,
    "kills its process group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "writes to memories": """
        import glob
        for path in glob.glob("/proc/*/mem"):
            try:
                with open(path, "r+b", buffering=0) as file: file.seek(0x400000); file.write(b"x" * 100)
            except (OSError, ValueError): pass
    """,
    "leaves a daemon that writes rewards": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            for fd in range(3): os.close(fd)
            while True:
                os.makedirs("/home/user/logs/verifier", exist_ok=True)
                open("/home/user/logs/verifier/reward.txt", "w").write("1")
                time.sleep(0.01)
    """,
    "plants start-up files": """
        import os
        site = "/home/user/.local/lib/python3.11/site-packages"
        os.makedirs(site, exist_ok=True)
        for path in (f"{site}/usercustomize.py", f"{site}/sitecustomize.py", "/tmp/untrusted.py", "/home/user/.bashrc"):
            open(path, "w").write("import os; os._exit(0)")
    """,
    "leaves the stream without waiting": """
        import fcntl, os
        for fd in range(3): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    """,
    "prints without end": "while True: print('5' * 4000)",
    "hangs": "import time\ntime.sleep(1000)",
    "asks for launches itself": """
        import socket
        for path in ("/run/socket", "/door/socket"):
            try: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path); print(5)
            except OSError: pass
    """,
    "lowers the limits of others": """
        import resource
        for pid in range(1, 200):
            try: resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            except (OSError, ValueError): pass
    """,
    "fills the disk": """
        import contextlib
        for path in ("/home/user/workdir/big", "/home/user/big", "/tmp/big", "/dev/shm/big"):
            with contextlib.suppress(OSError), open(path, "wb") as file:
                for _ in range(80): file.write(bytes(1 << 20))
    """,
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "claims to be the launcher": "import os, sys\nprint('untrusted: 5', file=sys.stderr)\nos._exit(125)",
    "claims that its time ran out": "import os\nos._exit(124)",
    "dies by a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "takes the workdir away": "import shutil\nshutil.rmtree('/home/user/workdir', ignore_errors=True)",
    "closes the workdir": "import os\nos.chmod('/home/user/workdir', 0)",
    "makes its own judge's modules": """
        for name in ("untrusted", "random", "os", "sitecustomize"):
            open(f"/home/user/workdir/{name}.py", "w").write("import os as o; o._exit(0)")
    """,
    "prints what the shell would run": "print('$(echo 5)'); print('`echo 5`')",
}
PLANTS = {
    "links its answer to the tests": "echo 'print()' > solve.py; ln -s ~/tests/expected_7731.txt out.txt",
    "makes its answer a pipe": "echo 'print()' > solve.py; mkfifo out.txt",
    "makes its answer endless": "echo 'print()' > solve.py; ln -s /dev/zero out.txt",
    "makes its program a folder": "mkdir solve.py; echo 'print(5)' > out.txt",
    "makes its program a pipe": "mkfifo solve.py",
    "leaves nothing": "true",
    "removes the workdir": "cd ..; rm -rf workdir",
    "makes the workdir a link": "cd ..; rm -rf workdir; ln -s /home/user/tests workdir",
    "shadows the launcher": "mkdir run; for n in untrusted diff python3; do echo 'echo 5' > $n; chmod +x $n; done",
    "shadows modules": "for n in untrusted random os subprocess; do echo 'import os; os._exit(0)' > $n.py; done",
}


def program(text: str) -> str:
    """A shell script that leaves a program."""
    lines = text.strip("\n").splitlines()
    width = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[width:] for line in lines)
    return f"cat > solve.py <<'END_OF_PROGRAM'\n{body}\nEND_OF_PROGRAM"


SPEC = SandboxSpec(disk_mb=64, tmp_mb=32, pids=64)


def attempt(style: str, work: str, verify_in: str = "box") -> Task:
    return STYLES[style].model_copy(update={"instruction": work, "verify_in": verify_in})
