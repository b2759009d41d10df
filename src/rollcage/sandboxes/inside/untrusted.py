"""Runs a command as the judged: apart from the tests, the reward and the processes of whoever asks for it.

In a verifier: `untrusted [--timeout S] [--max-output N[K|M|G]] [--scratch] [--no-net] [--stdin] [--] CMD...`, or in
Python `from untrusted import run`. Exit codes are the command's own; 124: its time ran out, 153: it printed
more than it may, 125 with a sentence: it was not started.

Started anew for each command, so it imports what Python has built in: `os` alone would take a tenth of its time.
For Python 3.8 and later.
"""

from __future__ import annotations

import _socket
import posix
import sys
from _stat import S_ISFIFO, S_ISREG, S_ISSOCK
from select import POLLHUP, POLLIN, POLLOUT, poll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

MAX_OUTPUT = 64 << 20
"""Unless the caller says otherwise."""
_DOOR = "/run/socket"
_UNITS = {"K": 10, "M": 20, "G": 30}
_CHUNK = 1 << 16
_SEEK_CUR = 1
_TOO_MANY_ON_THEIR_WAY, _PATIENCE = 109, 500
"""ETOOMANYREFS passes; so often it is tried again, every 10 ms."""
TIMED_OUT, NOT_STARTED, TOO_MUCH = 124, 125, 153
USAGE = "usage: untrusted [--timeout S] [--max-output N[K|M|G]] [--scratch] [--no-net] [--stdin] [--] CMD..."
SHARED = "untrusted: the verifier reads this input itself, so the command gets none (--stdin hands it over)\n"


class NotStarted(Exception):
    """The command was not started; the message says why."""


class Completed:
    """How a command ended: `returncode`, `stdout`, `stderr`, and whether it was ended for its time or its output."""

    def __init__(self, args: Sequence[str], returncode: int, stdout: Any, stderr: Any, why: str) -> None:
        self.args, self.returncode, self.stdout, self.stderr = args, returncode, stdout, stderr
        self.timed_out, self.truncated = why == "timeout", why == "output"

    def __repr__(self) -> str:
        return f"Completed(args={self.args!r}, returncode={self.returncode!r})"


def run(
    args: Sequence[str],
    *,
    input: str | bytes | None = None,
    timeout: float | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    text: bool = False,
    scratch: bool = False,
    network: bool = True,
    max_output: int = MAX_OUTPUT,
) -> Completed:
    """Run a command as the judged, like `subprocess.run(args, capture_output=True)`; never raises for how it ended.

    `scratch`: in a copy of the workdir that is gone afterwards. `network=False`: not even loopback.
    """
    import os  # the verifier has it, and may have changed the environment there

    data = input.encode() if isinstance(input, str) else input or b""
    stdin, feed = os.pipe()
    kept: dict[int, list[bytes]] = {1: [], 2: []}

    def keep(stream: int, chunk: bytes) -> bool:
        kept[stream].append(chunk)
        return True

    given = os.environ if env is None else env
    call = _Call(args, cwd, given, timeout=timeout, max_output=max_output, scratch=scratch, network=network)
    try:
        code, why = call.run(stdin, keep, (feed, _slices(data)))
    except NotStarted as error:
        code, why = NOT_STARTED, ""
        kept[2].append(str(error).encode())
    printed: list[Any] = [b"".join(kept[stream]) for stream in (1, 2)]
    if text:
        printed = [data.decode("utf-8", "replace") for data in printed]
    return Completed(list(args), code, printed[0], printed[1], why)


class _Call:
    """One command: what is asked for, and its streams while it runs."""

    def __init__(
        self,
        args: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | Mapping[bytes, bytes],
        *,
        timeout: float | None,
        max_output: int,
        scratch: bool,
        network: bool,
    ) -> None:
        if not args or isinstance(args, (str, bytes)):
            what = "a text" if args else "empty"
            raise ValueError(f"the command is {what}, and has to be a list of words; ['sh', '-c', text] runs a shell's")
        words = [_bytes(word) for word in args]
        flags = ("s" if scratch else "") + ("" if network else "n")
        limit = "" if timeout is None else repr(float(timeout))
        head = [b"1", limit.encode(), flags.encode(), _bytes(cwd) if cwd else posix.getcwdb(), b"%d" % len(words)]
        pairs = [_bytes(name) + b"=" + _bytes(value) for name, value in env.items()]
        self._order = b"\0".join(head + words + pairs)
        self._left = max_output

    def run(
        self,
        stdin: int,
        take: Callable[[int, bytes], bool],
        feed: tuple[int, Iterator[bytes]] = (-1, iter(())),
        *,
        one_output: bool = False,
    ) -> tuple[int, str]:
        """Ask for it, hand out what it prints, and return its exit code and why it was ended early, if it was."""
        door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            door.connect(_DOOR)
        except OSError as error:
            raise NotStarted(f"untrusted: nobody is there to launch commands here ({error.strerror})") from None
        outputs: dict[int, int] = {}
        order = posix.memfd_create("order")
        out, theirs_out = posix.pipe()
        outputs[out] = 1
        theirs_err = theirs_out
        if not one_output:
            err, theirs_err = posix.pipe()
            outputs[err] = 2
        posix.write(order, self._order)
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (order, stdin, theirs_out, theirs_err))
        tries = _PATIENCE
        while tries:
            tries -= 1
            try:
                door.sendmsg([b"launch"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
                break
            except OSError as error:
                if error.errno != _TOO_MANY_ON_THEIR_WAY or not tries:
                    raise NotStarted(f"untrusted: its streams cannot be handed over ({error.strerror})") from None
            poll().poll(10)
        # Held here too, none of these pipes would ever end.
        for fd in {order, stdin, theirs_out, theirs_err}:
            posix.close(fd)
        return self._attend(door, outputs, take, feed)

    def _attend(
        self,
        door: _socket.socket,
        outputs: dict[int, int],
        take: Callable[[int, bytes], bool],
        feed: tuple[int, Iterator[bytes]],
    ) -> tuple[int, str]:
        """Serve its streams until its exit code is there and they have ended, or hold no more.

        With the exit code it is dead, and whatever it printed is in the pipes. It may have handed their other ends to a
        command that goes on: nobody waits for that.
        """
        wait = poll()
        wait.register(door.fileno(), POLLIN)
        for fd in outputs:
            posix.set_blocking(fd, False)  # it may read what it printed itself
            wait.register(fd, POLLIN)
        (pipe, chunks), data = feed, b""
        if pipe >= 0:
            posix.set_blocking(pipe, False)
            wait.register(pipe, POLLOUT)
        answer, answered = "", False
        while outputs or not answered:
            ready = wait.poll(0 if answered else None)
            if not ready:
                break
            for fd, _ in ready:
                if fd == pipe:
                    data = data or next(chunks, b"")
                    data, ended = _feed(pipe, data)
                    if ended:
                        wait.unregister(pipe)
                        posix.close(pipe)
                        pipe = -1
                elif fd == door.fileno():
                    answer, answered = door.recv(4096).decode("utf-8", "replace"), True
                    wait.unregister(fd)
                elif not self._pass_on(fd, outputs[fd], take):
                    wait.unregister(fd)
                    posix.close(fd)
                    del outputs[fd]
            if self._left < 0:
                door.close()  # whoever serves it takes that as an order to kill
                return TOO_MUCH, "output"
        for fd in (*outputs, *([pipe] if pipe >= 0 else ())):
            posix.close(fd)
        code, _, why = answer.partition(" ")
        if not code:
            raise NotStarted("untrusted: whoever launches commands went away")
        if code == "refused":
            raise NotStarted("untrusted: " + why)
        return int(code), why

    def _pass_on(self, fd: int, stream: int, take: Callable[[int, bytes], bool]) -> bool:
        """Hand out what came; false at the end, or where nobody wants more."""
        try:
            chunk = posix.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        room, self._left = self._left, self._left - len(chunk)
        return bool(chunk) and take(stream, chunk[: max(0, room)])


def _bytes(text: Any) -> bytes:
    """As the kernel takes it; a path may be an object."""
    plain = posix.fspath(text)
    return plain if isinstance(plain, bytes) else plain.encode(sys.getfilesystemencoding(), "surrogateescape")


def _feed(pipe: int, data: bytes) -> tuple[bytes, bool]:
    """Write what fits; returns the rest, and whether it is over: nothing is left, or nobody reads any more."""
    try:
        return data[posix.write(pipe, data) :], not data
    except BlockingIOError:
        return data, False
    except OSError:
        return b"", True


def _slices(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def _rest_of(file: int) -> Iterator[bytes]:
    """What a file has from where it is read next; it is left there."""
    place = posix.lseek(file, 0, _SEEK_CUR)
    while True:
        chunk = posix.pread(file, _CHUNK, place)
        if not chunk:
            return
        place += len(chunk)
        yield chunk


def _write(stream: int, chunk: bytes) -> bool:
    """Pass output on; false where nobody reads it any more, so that the command hears of it as it would have."""
    try:
        while chunk:
            chunk = chunk[posix.write(stream, chunk) :]
    except BrokenPipeError:
        return False
    return True


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ValueError(text)
    return seconds


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 0)
    size = int(text[:-1] if unit else text) << unit
    if size < 0:
        raise ValueError(text)
    return size


_VALUES: dict[str, tuple[str, Callable[[str], float], str]] = {
    "--timeout": ("timeout", _seconds, "seconds, as in 2.5"),
    "--max-output": ("max_output", _size, "a number of bytes, as in 65536, 64K or 1M"),
}


def _options(words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"timeout": None, "max_output": MAX_OUTPUT, "scratch": False, "network": True}
    options["stdin"] = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, _, value = word.partition("=")
        if word == "--":
            break
        if word == "--scratch":
            options["scratch"] = True
        elif word == "--no-net":
            options["network"] = False
        elif word == "--stdin":
            options["stdin"] = True
        elif name in _VALUES:
            option, reads, wanted = _VALUES[name]
            text = value or (words.pop(0) if words else "")
            try:
                options[option] = reads(text)
            except ValueError:
                raise ValueError(f"{name} is {text!r}, and has to be {wanted}") from None
        else:
            raise ValueError(f"there is no option {word}; a command that begins with - follows --")
    if not words:
        raise ValueError("there is no command")
    return options


def _same(one: int, other: int) -> bool:
    a, b = posix.fstat(one), posix.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def _is_over(pipe: int) -> bool:
    """Whether nothing is left in it, and nobody can write more."""
    wait = poll()
    wait.register(pipe, POLLIN)
    return any(event & POLLHUP and not event & POLLIN for _, event in wait.poll(0))


def _judge_reads_it() -> bool:
    """Whether standard input is what the verifier itself is reading: the list of its loop, with all that it expects.

    So it is where a file was read from already, or a pipe is the standard input of whoever started us, too.
    """
    mode = posix.fstat(0).st_mode
    if S_ISREG(mode):
        if not posix.lseek(0, 0, _SEEK_CUR):
            return False
    elif not (S_ISFIFO(mode) or S_ISSOCK(mode)) or _is_over(0):
        return False
    starter = posix.getppid()
    while True:
        try:
            with open(f"/proc/{starter}/stat", "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
            theirs = posix.stat(f"/proc/{starter}/fd/0")
        except OSError:
            return False
        if name != b"timeout":  # it hands its input on, and reads none
            ours = posix.fstat(0)
            return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
        starter = int(rest.split()[1])


def _fill_gaps() -> None:
    """A stream that was closed would be the next descriptor that is opened here."""
    for stream in range(3):
        try:
            posix.fstat(stream)
        except OSError:
            posix.open("/dev/null", posix.O_RDWR)


def main(words: list[str]) -> int:
    """The launcher."""
    _fill_gaps()
    try:
        options = _options(words)
        hand_over = options.pop("stdin") or not _judge_reads_it()
        call = _Call(words, None, posix.environ, **options)
    except ValueError as error:
        posix.write(2, f"untrusted: {error}\n{USAGE}\n".encode("utf-8", "backslashreplace"))
        return NOT_STARTED
    try:
        if not hand_over:
            if not _same(1, 2):
                posix.write(2, SHARED.encode())
            code, why = call.run(posix.open("/dev/null", posix.O_RDONLY), _write, one_output=_same(1, 2))
        elif S_ISREG(posix.fstat(0).st_mode):
            # A file of the judge's itself could be opened anew, and written to. Its content goes through a pipe.
            stdin, pipe = posix.pipe()
            code, why = call.run(stdin, _write, (pipe, _rest_of(0)), one_output=_same(1, 2))
        else:
            code, why = call.run(0, _write, one_output=_same(1, 2))
    except NotStarted as error:
        posix.write(2, f"{error}\n".encode())
        return NOT_STARTED
    except KeyboardInterrupt:
        return 130
    said = {"timeout": "its time ran out", "output": "it printed more than it may"}.get(why)
    if said:
        posix.write(2, f"untrusted: {said}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
