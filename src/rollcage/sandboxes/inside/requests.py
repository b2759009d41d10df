"""Requests to the program that makes a box: what they say, how they are refused, and the listener they may ask for."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from errno import EINPROGRESS, ETOOMANYREFS
from typing import Any

_BACKLOG = 512
AGAIN_S = 0.01
"""How soon it is tried again to hand over descriptors, where too many of the uid's are on their way."""


class NoFolder(OSError):
    """The command's working directory is not in the box."""


def read_request(fd: int) -> dict[str, Any]:
    """What a request says: JSON in a file."""
    request: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return request


def refusal_of(error: Exception) -> dict[str, Any]:
    """Why a request was not met, in fields for programs and in words for people."""
    number, text = (error.errno, error.strerror) if isinstance(error, OSError) else (0, "")
    return {
        "error": type(error).__name__,
        "errno": number or 0,
        "text": text or str(error),
        "step": getattr(error, "step", ""),
        "about": getattr(error, "about", ""),
    }


def hand_over(reply: socket.socket, data: bytes, fds: Sequence[int]) -> int:
    """Send descriptors along with data, as soon as it can be done; returns how many bytes went with them."""
    while True:
        try:
            return socket.send_fds(reply, [data], fds)
        except OSError as error:
            if error.errno != ETOOMANYREFS:
                raise
        time.sleep(AGAIN_S)


def connect(port: int) -> int:
    """A descriptor that is, or is about to be, connected to a port of this network: nobody has to accept it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as connection:
        number = connection.connect_ex(("127.0.0.1", port))
        if number not in (0, EINPROGRESS):
            raise OSError(number, os.strerror(number))
        return connection.detach()


def listen(port: int) -> int:
    """A descriptor that listens at a port of this network."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener.detach()
