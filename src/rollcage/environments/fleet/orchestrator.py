"""The HTTP plane of a remote environment: reset, step, state, verify. It is for who orchestrates, not for agents."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import httpx

from rollcage.environments.failures import number_of
from rollcage.environments.fleet.errors import FleetError, InstanceLost, NotOffered, ResetRefused, VerifierFailed
from rollcage.environments.fleet.sdk import Fleet, Instance, boundary
from rollcage.environments.fleet.tools import FleetMCPTools
from rollcage.environments.fleet.types import Observation, Options, State, StepResult
from rollcage.errors import UsageError
from rollcage.types import JsonObject


class RemoteEnvironment:
    """One instance of a remote environment. `rollcage.environments.fleet.open` makes it and releases it."""

    def __init__(self, client: Fleet, instance: Instance, tools: FleetMCPTools, options: Options) -> None:
        self._client, self._instance, self._options = client, instance, options
        self.tools = tools
        """The MCP plane: what an agent may hold."""
        self.lost = ""
        """Why the instance is known to be gone; empty while it lives."""

    @property
    def key(self) -> str:
        """The environment's key, with its version."""
        version = self._instance.version
        return f"{self._instance.env_key}:{version}" if version else self._instance.env_key

    @property
    def instance_id(self) -> str:
        """What the service calls this instance."""
        return self._instance.instance_id

    @property
    def sdk(self) -> Instance:
        """The SDK's own object, for what is not offered here (`env.sdk.instance.db("current")`)."""
        return self._instance

    async def reset(self, seed: int | None = None, timestamp: int | None = None) -> StepResult:
        """Put the environment back to its start. Fleet's reset shows nothing, so the observation is often empty."""
        response = await self._request("POST", "/reset", {"seed": seed, "timestamp": timestamp})
        answer = _json(response)
        said = answer.get("message") or answer.get("detail") or answer.get("error") or ""
        if response.status_code >= 400 or answer.get("success") is False:
            status = f"HTTP {response.status_code}" if response.status_code >= 400 else "success: false"
            note = "not every environment can be reset, and not every one takes a seed"
            remedy = "try without a seed, or provision a new instance, which starts from the same data"
            reason = str(said)[:500] or "it did not say why"
            raise ResetRefused(f"{self.key} did not reset ({status}): {reason}; {note}; {remedy}")
        return _step_result(answer, message=str(said))

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """One step on the HTTP plane, where the instance offers it (Fleet's own do not: they act through tools)."""
        if not isinstance(action, Mapping) or action.get("type") in ("call_tool", "list_tools"):
            raise UsageError(
                "an object is needed, and no tool call: those go through tools.call_tool", argument="action"
            )
        response = await self._request("POST", "/step", {"action": dict(action)})
        if response.status_code in (404, 405, 501):
            raise NotOffered(f"{self.key} offers no step on its HTTP plane; act through its tools (tools.call_tool)")
        return _step_result(self._good(response, "step"))

    async def state(self) -> State:
        """Where the episode is, where the instance tells."""
        response = await self._request("GET", "/state", None)
        if response.status_code in (404, 405, 501):
            remedy = "read it through its tools or its database (env.sdk.instance.db)"
            raise NotOffered(f"{self.key} does not tell its state on its HTTP plane; {remedy}")
        answer = self._good(response, "state")
        episode, steps = answer.pop("episode_id", None), answer.pop("step_count", 0)
        return State(
            episode_id=None if episode is None else str(episode)[:200],
            step_count=steps if isinstance(steps, int) else 0,
            more=answer,
        )

    async def verify(
        self, function: str | Callable[..., Any], name: str = "", *, timeout_s: float | None = None
    ) -> float:
        """The reward that a verifier gives when it runs beside the environment's data.

        `function`: its source, or the function itself; it gets the data before and after. A verifier that breaks is
        VerifierFailed, never 0. `timeout_s`: `request_timeout_s` unless given.
        """
        source = function if isinstance(function, str) else inspect.getsource(function)
        name = name or (getattr(function, "__name__", "") if not isinstance(function, str) else "") or "verify"
        body = {"function_code": source, "function_name": name, "text_solution": None}
        response = await self._request("POST", "/execute_verifier_function", body, timeout_s)
        answer = self._good(response, "verify")
        result = answer.get("result")
        if answer.get("success") is not True:
            said = answer.get("error") or answer.get("message") or "no reason"
            raise VerifierFailed(f"{self.key}: the verifier {name!r} did not run to its end: {str(said)[:1000]}")
        reward = number_of(result)
        if reward is None or not math.isfinite(reward):
            raise VerifierFailed(f"{self.key}: the verifier {name!r} gave {reprlib.repr(result)}, which is no reward")
        return reward

    async def _request(
        self, method: str, path: str, body: JsonObject | None, timeout_s: float | None = None
    ) -> httpx.Response:
        """Ask the instance's manager; the SDK adds the runner token."""
        if self.lost:
            raise InstanceLost(f"{self.key}: instance {self.instance_id} is gone ({self.lost}); provision another")
        seconds = timeout_s or self._options.request_timeout_s
        try:
            # httpx counts from byte to byte; who sends one now and then would never be late.
            with anyio.fail_after(seconds):
                response: httpx.Response = await self._instance.instance.client.request(
                    method, path, json=body, timeout=seconds
                )
        except (httpx.TimeoutException, TimeoutError) as error:
            message = f"{self.key}: no answer to {path} within {seconds:g} s; raise request_timeout_s, or try again"
            raise FleetError(message) from error
        except httpx.DecodingError as error:
            raise FleetError(f"{self.key}: the answer to {path} cannot be read: {error}") from error
        except httpx.HTTPError as error:
            raise await self._gone(f"{type(error).__name__}: {error}") from error
        if response.status_code == 404 and not await self._alive():
            raise await self._gone("its manager answers 404 to everything")
        return response

    async def _alive(self) -> bool:
        """Whether the manager is there at all: where it is not (or the token is wrong), everything is 404."""
        try:
            with anyio.fail_after(10):
                response = await self._instance.instance.client.request("GET", "/health", timeout=10)
        except (httpx.HTTPError, TimeoutError):
            return False
        return bool(response.status_code < 400)

    async def _gone(self, reason: str) -> FleetError:
        try:
            with boundary(f"look at instance {self.instance_id}"), anyio.fail_after(30):
                status = (await self._client.instance(self.instance_id)).status
        except InstanceLost:
            status = "unknown to the service"
        except (FleetError, TimeoutError):
            status = "out of reach, and so is the service"
        if status == "running":
            remedy = "it runs, so check the network to it, and RUNNER_AUTH_TOKEN if that is set"
            message = f"{self.key}: the manager of instance {self.instance_id} is out of reach ({reason})"
            return FleetError(f"{message}; {remedy}")
        message = f"{self.key}: instance {self.instance_id} is lost: it is {status} ({reason}); provision another"
        return InstanceLost(message)

    def _good(self, response: httpx.Response, what: str) -> JsonObject:
        answer = _json(response)
        if response.status_code >= 400:
            said = str(answer.get("detail") or answer.get("message") or response.text)[:500]
            raise FleetError(f"{self.key}: {what} failed with HTTP {response.status_code}: {said}")
        return answer


def _json(response: httpx.Response) -> JsonObject:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return {"message": response.text[:500]}
    return answer if isinstance(answer, dict) else {"result": answer}


def _step_result(answer: JsonObject, message: str = "") -> StepResult:
    shown = answer.get("observation")
    reward, done = answer.get("reward"), bool(answer.get("done"))
    number = number_of(reward)
    metadata = shown if isinstance(shown, dict) else {} if shown is None else {"observation": shown}
    observation = Observation(done=done, reward=number, metadata=metadata)
    return StepResult(observation=observation, reward=number, done=done, message=message)
