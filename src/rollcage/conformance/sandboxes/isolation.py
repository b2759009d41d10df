"""Nothing of the host and nothing of another box can be seen, reached or changed. No trait excuses any of this."""

from __future__ import annotations

import json
import os
import secrets

import anyio

from rollcage.conformance.sandboxes import host
from rollcage.conformance.sandboxes.daemons import living, until
from rollcage.conformance.sandboxes.probes import refused
from rollcage.conformance.sandboxes.values import BoxSubject, Family, expect, said, same
from rollcage.sandboxes.base import sh

family = Family("isolation")

_VARIABLE = "ROLLCAGE_CONFORMANCE_SECRET"
_LONG = 16
"""A shorter value may well be the same in a box and here by chance."""


def plant() -> str:
    """Put a secret into our own environment, once, so that whatever a backend starts could hand it on."""
    return os.environ.setdefault(_VARIABLE, f"secret-{secrets.token_hex(8)}")


@family.check("files of the host cannot be read, by any path that leads to them")
async def host_files(subject: BoxSubject) -> None:
    attempts = {
        "read a file of the host": "read(given['secret'])",
        "read it by its first process's root": "read('/proc/1/root' + given['secret'])",
        "read it by its own root": "read('/proc/self/root' + given['secret'])",
        "read it by its folder": "read('/proc/self/cwd/../../../../..' + given['secret'])",
        "read it by our process": "read(f\"/proc/{given['pid']}/root{given['secret']}\")",
        "find its folder": "found(glob.glob(given['folder'] + '*'))",
        "find it by another mount": "found([p for p in glob.glob('/*/' + given['name']) + "
        "glob.glob('/*/*/' + given['name']) + glob.glob('/*/*/*/' + given['name'])])",
        "change it": "write(given['secret'])",
    }
    with host.a_secret() as secret:
        given = {"secret": str(secret), "folder": str(secret.parent), "name": secret.parent.name, "pid": os.getpid()}
        async with subject.open() as box:
            await refused(box, attempts, **given)


@family.check("processes of the host cannot be seen, signalled or looked into")
async def host_processes(subject: BoxSubject) -> None:
    script = r"""
import glob, sys
marker = sys.stdin.buffer.read()
for name in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if marker in open(name, "rb").read():
            print(name)
    except OSError: pass
"""
    marker = f"marker-{secrets.token_hex(6)}"
    async with (
        subject.open() as box,
        await anyio.open_process(["sh", "-c", f": {marker}; echo up; read x"]) as process,
    ):
        assert process.stdout
        await process.stdout.receive()
        expect(living(marker), "the process of the host did not start")
        try:
            same(await said(box, script, stdin=marker.encode()), "", "a command saw a process of the host")
        finally:
            process.kill()


@family.check("nothing of our environment is in the box, not in any process that can be seen there")
async def host_environment(subject: BoxSubject) -> None:
    script = r"""
import glob, json, os, sys
wanted, seen = json.load(sys.stdin), set()
for name in glob.glob("/proc/[0-9]*/environ") + ["/proc/self/environ"]:
    try: text = open(name, "rb").read().decode("utf-8", "replace")
    except OSError: continue
    seen |= {variable for variable in wanted if variable in text.split("\0")}
print(json.dumps(sorted(name.partition("=")[0] for name in seen)))
"""
    plant()
    ours = [f"{name}={value}" for name, value in os.environ.items() if len(value) >= _LONG and name != "PATH"]
    async with subject.open() as box:
        seen = await said(box, script, stdin=json.dumps(ours).encode())
        same(seen, "[]\n", "variables of our process that the box has")
        told = await sh(box, "cat /proc/1/cmdline /proc/self/mountinfo /proc/self/cgroup /proc/1/environ; env")
        expect(plant() not in told.stdout.text, "a secret variable of ours can be read in the box")


@family.check("no network: not the host's loopback, addresses or unix sockets, not the internet, not a name")
async def network(subject: BoxSubject) -> None:
    attempts = {
        "reach the internet": "connect(2, ('1.1.1.1', 443))",
        "reach the internet by another port": "connect(2, ('8.8.8.8', 53))",
        "reach the internet by version 6": "connect(10, ('2606:4700:4700::1111', 443))",
        "reach a cloud's metadata": "connect(2, ('169.254.169.254', 80))",
        "resolve a name": "socket.getaddrinfo('example.com', 80)",
        "reach the host's unix socket": "connect(1, given['path'])",
        "reach the host's abstract socket": "connect(1, '\\0' + given['abstract'])",
        "reach the host by version 6": "connect(10, ('::1', given['tcp']))",
    }
    send = "socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ({!r}, given['udp'])) and found([])"
    with host.host_sockets() as sockets:
        for address in (*sockets.addresses, "10.0.2.2", "10.0.2.3", "172.17.0.1", "10.88.0.1"):
            attempts[f"reach {address}"] = f"connect(2, ({address!r}, given['tcp']))"
            attempts[f"send to {address}"] = send.format(address)
        async with subject.open() as box:
            await refused(box, attempts, path=sockets.path, abstract=sockets.abstract, tcp=sockets.tcp, udp=sockets.udp)
            await anyio.sleep(0.1)
        expect(not sockets.reached(), "something from the box arrived at a socket of the host")


@family.check("the only network is loopback: no other interface is up, and no route leads anywhere")
async def interfaces(subject: BoxSubject) -> None:
    script = r"""
import fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _, name in socket.if_nameindex():
    flags = struct.unpack("16xh", fcntl.ioctl(s, 0x8913, struct.pack("16s16x", name.encode()))[:18])[0]
    if flags & 1: print(name)
print(len(open("/proc/net/route").readlines()) - 1)
"""
    async with subject.open() as box:
        seen = (await said(box, script)).split()
    expect(seen == ["lo", "0"], f"interfaces that are up and the number of routes: {' '.join(seen)}")


@family.check("two boxes share nothing: no files, no processes, no loopback, no abstract sockets, no shared memory")
async def other_boxes(subject: BoxSubject) -> None:
    hold = r"""
import ctypes, os, socket, sys
for folder in ("/home/user", "/tmp", "/dev/shm", "/var/tmp"):
    try: open(f"{folder}/{sys.argv[1]}", "w").write("mine")
    except OSError: pass
tcp = socket.create_server(("127.0.0.1", 5056))
hidden = socket.socket(socket.AF_UNIX); hidden.bind("\0" + sys.argv[1]); hidden.listen()
key = int(sys.argv[1][-6:], 16)
ctypes.CDLL(None).shmget(key, 4096, 0o1666)
print("up", flush=True)
sys.stdin.read()
"""
    # Its first line, put together only there: whoever looks for it would find itself.
    line = "b'import ctypes, os, ' + b'socket, sys'"
    attempts = {
        "find its files": "found([p for f in ('/home/user', '/tmp', '/dev/shm', '/var/tmp') "
        "for p in glob.glob(f + '/' + given['name'])])",
        "find its process": f"found([p for p in glob.glob('/proc/[0-9]*/cmdline') if {line} in read(p)])",
        "reach its port": "connect(2, ('127.0.0.1', 5056))",
        "reach its abstract socket": "connect(1, '\\0' + given['name'])",
        "open its shared memory": "found([n for n in [libc.shmget(given['key'], 4096, 0)] if n >= 0])",
    }
    name = f"held-{secrets.token_hex(6)}"
    async with (
        subject.open() as first,
        subject.open() as second,
        first.spawn(["python3", "-I", "-c", hold, name]) as process,
    ):
        await until(process, b"up\n")
        await refused(second, attempts, name=name, key=int(name[-6:], 16))
        same((await sh(first, f"cat ~/{name}")).stdout.text, "mine", "the first box's own file says")


@family.check("what a command changes in the system is not on the host and not in the next box")
async def system(subject: BoxSubject) -> None:
    name = f"planted-{secrets.token_hex(6)}"
    folders = "/ /usr /usr/bin /usr/local/bin /etc /etc/profile.d /opt /var /var/tmp /run /root /home /lib /dev /tmp"
    plant = (
        f"for f in {folders}; do (echo x > $f/{name}) 2>/dev/null; done; (echo {name} >> /etc/passwd) 2>/dev/null; true"
    )
    look = f"for f in {folders}; do [ -e $f/{name} ] && echo $f; done; grep -l {name} /etc/passwd; true"
    async with subject.open() as box:
        same((await sh(box, plant)).code, 0, "planting ended with")
        here = [folder for folder in folders.split() if os.path.exists(f"{folder}/{name}")]  # noqa: ASYNC240, PTH110
        expect(not here, f"a command in the box made files on the host: in {', '.join(here)}")
    async with subject.open() as box:
        same((await sh(box, look)).stdout.text, "", "the next box has what was planted in")


@family.check("a command gets its three streams and no other descriptor, and none leads to a file of the host")
async def inherited(subject: BoxSubject) -> None:
    script = r"""
import os
for number in sorted(map(int, os.listdir("/proc/self/fd"))):
    try: print(number, os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    except OSError: pass
"""
    with host.a_secret() as secret:
        fd = os.open(secret, os.O_RDONLY)
        try:
            os.set_inheritable(fd, True)
            async with subject.open() as box:
                seen = dict(line.split(" ", 1) for line in (await said(box, script)).splitlines())
        finally:
            os.close(fd)
    expect(set(seen) <= {"0", "1", "2"}, f"descriptors that were inherited: {seen}")
    expect(all(kind in ("pipe", "socket", "/dev/null") for kind in seen.values()), f"its streams are {seen}")
