"""The part of `mini` that is in the box: asks a model, runs the commands it names, until it names none.

The box's own interpreter runs it (`python3 -I -c`), so it is standard library alone, from Python 3.8 on. Its orders
are one JSON object on stdin. What it does goes to stdout, one neutral event (`rollcage.agent_events`) per line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

MOST_CALLS = 32
"""Commands of one answer that are run; what a model asks for beyond that is refused."""
RETRIES_S = (1, 2, 4, 8)
"""Pauses before a call that failed is made again."""
PASSING = (408, 409, 429, 500, 502, 503, 504)

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a new bash shell, in the working folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class ModelFailed(Exception):
    """The model gave no answer to go on with."""


class Conversation:
    """One instruction, from the first question to the answer that calls no tool."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders = orders
        self.parts = self.turn = 0
        # The model is on the box's own loopback: a proxy that the image sets is not for it.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def run(self) -> None:
        """Go round. The model's messages go back to it as they came: thoughts and all."""
        self.say("session")
        messages = list(self.orders["messages"])
        while True:
            message = self.ask({"model": self.orders["model"], "messages": messages, "tools": [BASH]})
            calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
            for call in calls:
                renderable(call)
            messages.append(message)
            for number, call in enumerate(calls):
                said = self.call(call) if number < MOST_CALLS else "error: too many calls at once"
                messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": said})
            if not calls:
                return
            self.turn += 1

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The model's message."""
        answer = self.post(json.dumps(body).encode())
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise ModelFailed("the model's answer holds no message")
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought:
            self.say("reasoning", text=str(thought))
        if message.get("content"):
            self.say("text", text=str(message["content"]))
        usage = answer.get("usage") or {}
        tokens = {"input_tokens": usage.get("prompt_tokens") or 0, "output_tokens": usage.get("completion_tokens") or 0}
        self.say("usage", finish_reason=str(choice and choice.get("finish_reason")), **tokens)
        # A member that is null says nothing, and some engines refuse it on the way back.
        return {name: value for name, value in message.items() if value is not None or name == "content"}

    def post(self, body: bytes) -> dict[str, Any]:
        """The answer to one request, which is made again where the failure looks passing."""
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + self.orders["key"]}
        headers["X-Session-Id"] = self.orders["session"]
        url = self.orders["base_url"] + "/chat/completions"
        problem = ""
        for pause in (0, *RETRIES_S):
            time.sleep(pause)
            try:
                request = urllib.request.Request(url, body, headers)  # noqa: S310 - our own gateway's address
                with self.opener.open(request) as response:
                    answer = json.loads(response.read())
                    return answer if isinstance(answer, dict) else {}
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode("utf-8", "replace")
                problem = f"the model answered with HTTP {error.code}: {said}"
                if error.code not in PASSING:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"the model's answer broke off: {type(error).__name__}: {error}"
        raise ModelFailed(problem)

    def call(self, call: dict[str, Any]) -> str:
        """Run one command; what the model is told of it."""
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = str(function.get("name", "")), object_in(function.get("arguments")) or {}
        command = arguments.get("command")
        event = {"id": self.place(), "call_id": str(call.get("id", "")), "name": name, "arguments": arguments}
        if name != "bash" or not isinstance(command, str):
            said = "error: there is one tool, bash, and its one argument is the text `command`"
            self.say("tool_call", **event, status="error", error=said)
            return said
        event.update(kind="execute", title=command)
        self.say("tool_call", **event, status="running")
        began = time.monotonic()
        said, code = self.bash(command)
        seconds = round(time.monotonic() - began, 3)
        self.say("tool_call", **event, status="completed", result=said, exit_code=code, seconds=seconds)
        return said

    def bash(self, command: str) -> tuple[str, int]:
        """What a command printed, and how it ended. What it put into the background goes on."""
        seconds = self.orders["command_timeout_s"]
        with tempfile.TemporaryFile() as output:
            # Printed to a file: a pipe would stay open for as long as something in the background holds it.
            process = subprocess.Popen(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ending = ""
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code, ending = 124, f"[killed after {seconds:g} s]"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed = clipped(output, self.orders["output_limit"])
        if code and not ending:
            ending = f"[exit code {code}]"
        lines = [part for part in (printed.rstrip("\n"), ending) if part]
        return "\n".join(lines) or "(no output)", code

    def place(self) -> str:
        """A name for the next part of the transcript."""
        self.parts += 1
        return f"{self.parts:06}"

    def say(self, type: str, **fields: Any) -> None:
        """One event, for whoever started this."""
        event = {"type": type, "session": self.orders["session"], "message": f"turn {self.turn}", **fields}
        event.setdefault("id", self.place())
        print(json.dumps(event), flush=True)


def object_in(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments; None where they are no JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def renderable(call: dict[str, Any]) -> None:
    """Arguments that are no JSON object are told as one: chat templates read them, and refuse the whole history."""
    function = call.get("function")
    if isinstance(function, dict) and object_in(function.get("arguments")) is None:
        function["arguments"] = json.dumps({"invalid": function.get("arguments")})


def clipped(output: Any, limit: int) -> str:
    """What was printed: its beginning and its end, where it is long."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= limit:
        return str(output.read().decode("utf-8", "replace"))
    head = output.read(limit // 2)
    output.seek(size - limit // 2)
    left_out = f"\n[{size - 2 * (limit // 2)} bytes are left out]\n"
    return str(head.decode("utf-8", "replace") + left_out + output.read().decode("utf-8", "replace"))


def main() -> int:
    """Work; 0 where the model came to an end."""
    conversation = Conversation(json.load(sys.stdin))
    try:
        conversation.run()
    except ModelFailed as failure:
        conversation.say("error", text=str(failure))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
