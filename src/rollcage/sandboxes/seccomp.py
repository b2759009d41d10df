"""The system-call filter of every command in a box: classic BPF, written out for the machine at hand."""

from __future__ import annotations

import platform
import struct
from functools import cache

from rollcage.errors import SetupError

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, on aarch64
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_IO_URING = (425, 426, 427)
_SOCKET, _SOCKETPAIR, _IOCTL, _PRLIMIT = (41, 198), (53, 199), (16, 29), (302, 261)
_FAMILIES = (1, 2, 10, 16)
"""UNIX, INET, INET6, NETLINK. Others are not all confined by a network namespace: AF_VSOCK reaches the hypervisor."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: type into the terminal of whoever started us."""

Instruction = tuple[int, int, int, int]


@cache
def program(machine: str = "") -> bytes:
    """The filter, as bubblewrap takes it."""
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SetupError(f"no system-call filter for {name}: the local sandbox runs on {' and '.join(_MACHINES)}")
    column, architecture = _MACHINES[name]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if name == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for call in (_SOCKET[column], _SOCKETPAIR[column]):
        code += _only_if(call, _FIRST_ARGUMENT, _FAMILIES, _ERROR | _EAFNOSUPPORT)
    # Of its own limits only: whoever can lower those of a process beside it decides how that ends.
    code += _only_if(_PRLIMIT[column], _FIRST_ARGUMENT, (0,), _ERROR | _EPERM)
    code += _never_if(_IOCTL[column], _SECOND_ARGUMENT, _TERMINAL_INPUT, _ERROR | _EPERM)
    for call in _IO_URING:
        code += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _only_if(call: int, argument: int, allowed: tuple[int, ...], otherwise: int) -> list[Instruction]:
    tests = [(_EQUAL, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
    body = [(_LOAD, 0, 0, argument), *tests, (_RETURN, 0, 0, otherwise), (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(body), call), *body]


def _never_if(call: int, argument: int, refused: tuple[int, ...], answer: int) -> list[Instruction]:
    tests = [step for value in refused for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, answer))]
    body = [(_LOAD, 0, 0, argument), *tests, (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(body), call), *body]
