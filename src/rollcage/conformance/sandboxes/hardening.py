"""Where boxes share the host's kernel, a command gets as little of it as can be. A kernel of one's own replaces it."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

import anyio

from rollcage.conformance.sandboxes.daemons import living, until
from rollcage.conformance.sandboxes.probes import refused
from rollcage.conformance.sandboxes.values import BoxSubject, Family, NotApplicable, expect, said, same

family = Family("hardening", excusable=True)

_MOUNTS = {
    "mount a file system": "call(165, 40, b't', b'/tmp', b'tmpfs', 0, 0)",
    "remount the root": "call(165, 40, 0, b'/', 0, 32 | 4096, 0)",
    "unmount its home": "call(166, 39, b'/home/user', 2)",
    "open a mount tree": "call(428, 428, -100, b'/', 1)",
    "open a file system": "call(430, 430, b'tmpfs', 0)",
    "change its root": "os.chroot('/tmp')",
    "pivot its root": "call(155, 41, b'/tmp', b'/tmp')",
}
_NAMESPACES = {
    "make a user namespace": "call(272, 97, 0x10000000)",
    "make a mount namespace": "call(272, 97, 0x20000)",
    "make a network namespace": "call(272, 97, 0x40000000)",
    "make a user namespace by clone": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) and 'made'",
    "join a namespace": "call(308, 268, os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
}
_OTHERS = {
    "trace its first process": "call(101, 117, 16, 1, 0, 0)",
    "read the memory of its first process": "call(310, 270, 1, 0, 0, 0, 0, 0)",
    "take a descriptor of its first process": "call(438, 438, os.pidfd_open(1), 0, 0)",
}
_KERNEL = {
    "use the kernel's keys": "call(250, 219, 0, -3, 0)",
    "add a key": "call(248, 217, b'user', b'a', b'b', 1, -3)",
    "use io_uring": "call(425, 425, 1, ctypes.create_string_buffer(200))",
    "use bpf": "call(321, 280, 0, packed(120, 1, 4, 4, 1), 120)",
    "use perf": "call(298, 241, packed(112, 1, 112), 0, -1, -1, 0)",
    "use userfaultfd": "call(323, 282, 0)",
    "open a file by its handle": "call(304, 265, -100, ctypes.create_string_buffer(24), 0)",
    "load a kernel module": "call(313, 273, 0, b'', 0)",
    "read the kernel's log": "call(103, 116, 3, ctypes.create_string_buffer(99), 99)",
    "set the clock": "call(227, 112, 0, ctypes.create_string_buffer(16))",
    "reboot": "call(169, 142, 0xfee1dead, 672274793, 0, 0)",
    "add swap": "call(167, 224, b'/tmp/x', 0)",
}
_SETTINGS = {
    "write the core pattern": "write('/proc/sys/kernel/core_pattern')",
    "write kernel settings": "write('/proc/sys/kernel/randomize_va_space')",
    "write the module loader": "write('/proc/sys/kernel/modprobe')",
    "write the machine's memory rules": "write('/proc/sys/vm/overcommit_memory')",
    "write sysrq": "write('/proc/sysrq-trigger')",
    "write a cgroup's limit": "found([write(p) for p in glob.glob('/sys/fs/cgroup/*.max')])",
    "write a cgroup's agent": "found([write(p) for p in glob.glob('/sys/fs/cgroup/*/release_agent')])",
    "see the kernel's symbols": "found([l for l in open('/proc/kallsyms') if not l.startswith('0000000000000000')])",
    "read the kernel's memory": "read('/proc/kcore')",
}
_DEVICES = {
    "make a character device": "os.mknod('/tmp/d', 0o20666, os.makedev(1, 1))",
    "make a block device": "os.mknod('/tmp/b', 0o60666, os.makedev(8, 0))",
    "open a device that matters": "found([os.open(d, os.O_RDONLY | os.O_NONBLOCK) for d in glob.glob('/dev/*') "
    "if os.path.basename(d) not in ('null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', 'console') "
    "and stat.S_IFMT(os.stat(d).st_mode) in (stat.S_IFCHR, stat.S_IFBLK) and os.access(d, os.R_OK)])",
}
_FAMILIES = {
    "AF_VSOCK": (40, 1),
    "AF_PACKET": (17, 3),
    "AF_ALG": (38, 5),
    "AF_BLUETOOTH": (31, 3),
    "AF_KEY": (15, 3),
    "AF_CAN": (29, 3),
    "AF_XDP": (44, 3),
    "AF_RDS": (21, 5),
    "AF_TIPC": (30, 1),
}
_SOCKETS = {
    f"open a socket of {name}": f"socket.socket({number}, {kind})" for name, (number, kind) in _FAMILIES.items()
}
_SOCKETS["open a raw socket"] = "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
_IDENTITY = {
    "become root": "os.setuid(0) or 'root'",
    "become another user": "os.setresuid(1, 1, 1) or 'another'",
    "become another group": "os.setgid(0) or 'root'",
    "type into a terminal": "fcntl.ioctl(os.openpty()[1], 0x5412, b'x')",
}


async def _try(subject: BoxSubject, attempts: dict[str, str]) -> None:
    _needs_a_shared_kernel(subject)
    async with subject.open() as box:
        await refused(box, attempts)


def _needs_a_shared_kernel(subject: BoxSubject) -> None:
    if subject.traits.own_kernel:
        raise NotApplicable("every box has a kernel of its own, which is not the host's")


@family.check("a command can mount nothing, unmount nothing and change no root")
async def mounts(subject: BoxSubject) -> None:
    await _try(subject, _MOUNTS)


@family.check("a command can make no namespace and join none")
async def namespaces(subject: BoxSubject) -> None:
    await _try(subject, _NAMESPACES)


@family.check("a command can neither trace nor look into the first process of its box")
async def tracing(subject: BoxSubject) -> None:
    await _try(subject, _OTHERS)


@family.check("a command gets no kernel keys, bpf, perf, userfaultfd, io_uring, modules, log, clock or file handles")
async def kernel(subject: BoxSubject) -> None:
    await _try(subject, _KERNEL)


@family.check("a command can change no kernel setting and read no kernel memory")
async def settings(subject: BoxSubject) -> None:
    await _try(subject, _SETTINGS)


@family.check("a command can make no device and open none but the harmless ones")
async def devices(subject: BoxSubject) -> None:
    await _try(subject, _DEVICES)


@family.check("a command gets no raw sockets and no families that a network namespace does not confine, as AF_VSOCK")
async def sockets(subject: BoxSubject) -> None:
    await _try(subject, _SOCKETS)


@family.check("a command is no root and cannot become another: no capability, no way to gain one, a filter is in place")
async def identity(subject: BoxSubject) -> None:
    _needs_a_shared_kernel(subject)
    async with subject.open() as box:
        await refused(box, _IDENTITY)
        status = dict(
            line.split(":", 1)
            for line in (await said(box, "print(open('/proc/self/status').read())")).splitlines()
            if line
        )
        capabilities = {
            name: value.strip() for name, value in status.items() if name.startswith("Cap") and int(value, 16)
        }
        same(capabilities, {}, "capabilities of a command")
        same(status["NoNewPrivs"].strip(), "1", "whether it may gain no privileges")
        same(status["Seccomp"].strip(), "2", "its filter of system calls (2 means there is one)")
        expect("0" not in status["Uid"].split(), f"it runs as root: {status['Uid'].split()}")


@family.check("seen from the host, nothing in a box runs as root")
async def host_user(subject: BoxSubject) -> None:
    _needs_a_shared_kernel(subject)
    marker = f"6{secrets.randbelow(10**9)}.5"
    async with subject.open() as box, box.spawn(["bash", "-c", f"echo up; sleep {marker}; true"]) as process:
        await until(process, b"up\n")
        with anyio.move_on_after(10):
            while not living(marker):  # noqa: ASYNC110 (it is another process that does it)
                await anyio.sleep(0.02)
        found = living(marker)
        if not found:
            raise NotApplicable("its processes cannot be seen from here")
        rooted = [pid for pid in found if "0" in _uids(pid)]
        expect(not rooted, "a command in the box runs as root of this machine")


def _uids(pid: int) -> list[str]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return line.split()[1:]
    return []
