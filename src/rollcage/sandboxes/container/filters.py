"""The system-call filters of every command in a container, on top of the engine's own, which differ from each other."""

from __future__ import annotations

import platform
import struct
from functools import cache

from rollcage.sandboxes import seccomp

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080
"""Every CLONE_NEW flag: an engine may let commands make user namespaces, and much of the kernel opens up in one."""


@cache
def programs() -> tuple[bytes, ...]:
    """Classic BPF, to be installed one after the other: what local boxes are barred from, and new namespaces."""
    # The flags of clone3 are behind a pointer, out of a filter's sight; every libc falls back to clone.
    instructions = (
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, _CLONE.get(platform.machine(), _CLONE3)),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 3, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _EPERM),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    )
    return seccomp.program(), b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
