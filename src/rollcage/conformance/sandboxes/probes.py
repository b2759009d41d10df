"""Attempts made from inside a box: many in one Python program, which says which of them worked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollcage.conformance.sandboxes.values import Failed, said
from rollcage.sandboxes.base import Sandbox

_HEAD = r"""
import ctypes, errno, fcntl, glob, json, os, socket, stat, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
given = json.loads(sys.argv[1])
worked = {}

class Barred(Exception):
    pass

def call(x86, arm, *arguments):
    result = libc.syscall(x86 if X86 else arm, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        s.connect(address)
        return address

def read(path):
    with open(path, "rb") as file:
        return file.read(200)

def write(path):
    with open(path, "w"):
        return path

def packed(size, *numbers):
    return ctypes.create_string_buffer(struct.pack(f"{len(numbers)}I", *numbers), size)

def found(things):
    if not things:
        raise Barred
    return things

def attempt(name, text):
    try:
        worked[name] = repr(eval(text))[:200]
    except (OSError, ValueError, Barred):
        pass

"""


async def refused(box: Sandbox, attempts: Mapping[str, str], **given: object) -> None:
    """Fail where one of these Python expressions can be evaluated in the box without an OSError.

    `given` are values the expressions find in the dictionary `given`.
    """
    script = _HEAD + "".join(f"attempt({name!r}, {text!r})\n" for name, text in attempts.items())
    told = await said(box, script + "print(json.dumps(worked))\n", json.dumps(given), limit=1 << 20)
    worked: dict[str, str] = json.loads(told)
    if worked:
        raise Failed("a command could " + "; ".join(f"{name} ({value})" for name, value in worked.items()))
