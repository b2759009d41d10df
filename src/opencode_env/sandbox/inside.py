# ruff: noqa: PTH101, PTH104, PTH107, PTH110, PTH118, PTH119, PTH123, PTH208 (speaks to the kernel in its own terms)
"""Runs in a box that offers no more than `run this text and tell me what it printed`: makes live commands of that.

Standard library only, for Python 3.9 and later; its text is written into the box. One process (`serve`) starts
commands, feeds them, and keeps what they print until it is fetched. Short-lived ones (`ask`) hand it messages or wait
for what it has. Messages and events are numbered, so that either may be sent again when an answer was lost.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

MARK = "ROLLCAGE_COMMAND"
"""A variable that tells whose a process is, where the one that serves cannot say any more."""
MOST_HELD = 1 << 20
"""What may wait here to be fetched, and in front of a command that does not read; then others wait."""
MOST_FETCHED = 1 << 18
CHUNK = 1 << 16
PATIENCE_S = 15.0
SUBREAPER = 36

Event = dict[str, Any]


class Command:
    """One command and the threads that look after it."""

    def __init__(self, hub: Hub, number: int, order: Event) -> None:
        self.hub, self.number = hub, number
        # Some programs believe PWD more than the folder they are in.
        environment = {**os.environ, "PWD": order["cwd"], **order["env"], MARK: hub.name(number)}
        self.process = subprocess.Popen(
            order["argv"],
            cwd=order["cwd"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_adopt,
        )
        self.waiting: list[bytes | None] = []
        self.size = 0
        readers = [
            threading.Thread(target=self._read, args=(stream, kind), daemon=True)
            for stream, kind in ((self.process.stdout, "out"), (self.process.stderr, "err"))
        ]
        for thread in readers:
            thread.start()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()

    def _read(self, stream: Any, kind: str) -> None:
        while True:
            data = os.read(stream.fileno(), CHUNK)
            if not data:
                return
            self.hub.say({"id": self.number, kind: base64.b64encode(data).decode()}, len(data))

    def _write(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        while True:
            with self.hub.changed:
                self.hub.changed.wait_for(lambda: self.waiting)
                data = self.waiting.pop(0)
                self.size -= len(data or b"")
                self.hub.changed.notify_all()
            # It may have closed its input, or died: its exit code tells.
            with suppress(OSError):
                if data is not None:
                    stdin.write(data)
                    stdin.flush()
                    continue
                stdin.close()
            if data is None:
                return

    def _wait(self, readers: list[threading.Thread]) -> None:
        code = self.process.wait()
        self.hub.sweep(self.number)
        for thread in readers:
            thread.join()
        self.put(None)
        with self.hub.changed:
            self.hub.commands.pop(self.number, None)
        self.hub.say({"id": self.number, "exit": code if code >= 0 else 128 - code}, 0)

    def put(self, data: bytes | None) -> None:
        """Input for it; None is the end of file."""
        with self.hub.changed:
            self.waiting.append(data)
            self.size += len(data or b"")
            self.hub.changed.notify_all()

    def kill(self) -> None:
        """End it; what it started is found when it is dead."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Hub:
    """All commands of a box."""

    def __init__(self, folder: str, idle_s: float) -> None:
        self._folder, self._idle_s = folder, idle_s
        self.changed, self._hearing = threading.Condition(), threading.Lock()
        self.commands: dict[int, Command] = {}
        self._events: list[Event] = []
        self._held = self._said = self._heard = 0
        self._asked = time.monotonic()

    def name(self, number: int) -> str:
        """What marks the processes of a command."""
        return f"{os.path.basename(self._folder)}-{number}"

    def say(self, event: Event, size: int) -> None:
        """Keep an event until it was fetched, once there is room for it."""
        with self.changed:
            self.changed.wait_for(lambda: not size or self._held < MOST_HELD)
            self._said += 1
            self._events.append({"n": self._said, "size": size, **event})
            self._held += size
            self.changed.notify_all()

    def answer(self, asked: Event) -> Event:
        """Take messages in, and give events out; waits for the first event as long as was asked."""
        self._asked = time.monotonic()
        if asked.get("quit"):
            threading.Thread(target=self.leave, daemon=True).start()
        # Not in line with the messages: one of them may wait for this very command to read.
        if "kill" in asked and (command := self.commands.get(asked["kill"])) is not None:
            command.kill()
        if "messages" in asked:
            self._hear(asked["messages"])
        if "after" not in asked:
            return {"heard": self._heard}
        with self.changed:
            while self._events and self._events[0]["n"] <= asked["after"]:
                self._held -= self._events.pop(0)["size"]
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._events, asked["wait"])
            given, size = [], 0
            for event in self._events:
                given.append(event)
                size += event["size"]
                if size >= MOST_FETCHED:
                    break
        self._asked = time.monotonic()
        return {"events": given}

    def _hear(self, messages: list[Event]) -> None:
        # One at a time: who sends them again may do so while the first time still lasts.
        with self._hearing:
            for message in messages:
                if message["n"] == self._heard + 1:
                    if not self._obey(message):
                        break
                    self._heard += 1

    def _obey(self, message: Event) -> bool:
        number = message.get("id", 0)
        command = self.commands.get(number)
        if "argv" in message:
            try:
                with self.changed:
                    self.commands[number] = Command(self, number, message)
                    self.say({"id": number, "started": True}, 0)
            except (OSError, ValueError) as error:
                self.say({"id": number, "failed": str(error)}, 0)
        elif command is not None and "in" in message:
            with self.changed:
                if not self.changed.wait_for(lambda: command.size < MOST_HELD, PATIENCE_S):
                    return False
            command.put(base64.b64decode(message["in"]) if message["in"] is not None else None)
        return True

    def sweep(self, number: int) -> None:
        """Kill what a command that is over has left running, wherever that went."""
        for _ in range(500):
            strays = self._strays(number)
            if not strays:
                return
            for pid in strays:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)

    def _strays(self, number: int) -> list[int]:
        """Processes below us that belong to this command or to none that lives."""
        # Looked at first: a command that begins in between is not among them.
        parents = _parents()
        with self.changed:
            living = {command.process.pid for key, command in self.commands.items() if key != number}
            ours = {command.process.pid for command in self.commands.values()}
        strays = []
        for pid in parents:
            line, above = [pid], parents.get(pid)
            while above is not None and above != os.getpid() and len(line) < 10000:
                line.append(above)
                above = parents.get(above)
            # What lost its parent is below its command as long as that lives: no mark is believed here.
            if above == os.getpid() and pid not in ours and line[-1] not in living:
                strays.append(pid)
        return strays

    def leave(self) -> None:
        """End everything, and ourselves."""
        with self.changed:
            commands = list(self.commands.values())
        for command in commands:
            command.kill()
        for command in commands:
            command.process.wait()
        with self.changed:
            self.commands.clear()
        self.sweep(0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def serve(self) -> None:
        """Answer until told to leave, or until nobody has asked for long: whoever started us is gone then."""
        # Newer Pythons warn of threads where a child calls a function before it becomes another program.
        warnings.simplefilter("ignore")
        _adopt()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self._folder, "line.part"))
        listener.listen(64)
        os.rename(os.path.join(self._folder, "line.part"), os.path.join(self._folder, "line"))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.leave())
        while time.monotonic() - self._asked < self._idle_s:
            time.sleep(1)
        self.leave()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as file, suppress(OSError, ValueError, KeyError, TypeError):
            file.write(json.dumps(self.answer(json.loads(file.readline()))) + "\n")


def _bound() -> Any:
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda *_: -1


_PRCTL = _bound()


def _adopt() -> None:
    """Have what loses its parent below this process put below it again; a program that it becomes keeps that."""
    _PRCTL(SUBREAPER, 1, 0, 0, 0)


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return parents


def _mark(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for item in file.read().split(b"\0"):
            if item.startswith(MARK.encode() + b"="):
                return item.partition(b"=")[2].decode("utf-8", "replace")
    return ""


def ask(folder: str, asked: str) -> None:
    """Hand a request to the one that serves, and print its answer behind the folder's name."""
    ends = time.monotonic() + 20
    # It may still be starting; where its folder is gone, it has left.
    while not os.path.exists(os.path.join(folder, "line")) and os.path.exists(folder) and time.monotonic() < ends:
        time.sleep(0.02)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.path.join(folder, "line"))
        with connection.makefile("rw") as file:
            file.write(asked + "\n")
            file.flush()
            answer = file.readline()
    print(os.path.basename(folder), base64.b64encode(answer.encode()).decode(), flush=True)


def sweep(name: str, kept: list[str]) -> None:
    """Kill what carries the mark of a command of that name, but for the commands that are `kept`, by number."""
    spared = {f"{name}-{number}" for number in kept}
    for _ in range(500):
        marks = {pid: _mark(pid) for pid in _parents()}
        strays = [pid for pid, mark in marks.items() if mark.startswith(f"{name}-") and mark not in spared]
        if not strays:
            return
        for pid in strays:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    sys.exit("processes come back faster than they can be killed")


def unpack(folder: str, target: str) -> None:
    """Put together an archive that came in pieces, and take out what is in it."""
    pieces = sorted(name for name in os.listdir(folder) if name.startswith("piece-"))
    with open(os.path.join(folder, "archive"), "wb") as archive:
        for name in pieces:
            with open(os.path.join(folder, name)) as piece:
                archive.write(base64.b64decode(piece.read()))
            os.remove(os.path.join(folder, name))
    with tarfile.open(os.path.join(folder, "archive"), "r:gz") as packed:
        for member in packed:
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            packed.extract(member, target)
    os.remove(os.path.join(folder, "archive"))


def main() -> None:
    """`serve FOLDER IDLE_S`, `ask FOLDER REQUEST` or `ask FOLDER @FILE` (base64), `sweep FOLDER NUMBERS`,
    `unpack FOLDER TARGET`.
    """
    action, folder, word = sys.argv[1:4]
    if action == "serve":
        os.chmod(folder, 0o700)
        Hub(folder, float(word)).serve()
    elif action == "ask":
        if word.startswith("@"):
            with open(word[1:]) as file:
                text = file.read()
            os.remove(word[1:])
            word = text
        ask(folder, base64.b64decode(word).decode())
    elif action == "sweep":
        sweep(os.path.basename(folder), word.split(","))
    elif action == "unpack":
        unpack(folder, word)


if __name__ == "__main__":
    main()
