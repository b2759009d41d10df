"""The client against a real server: start, follow, wait, stop, list, and what it does when the line breaks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketStream

from rollcage import Client
from rollcage.client import ServerError, SyncClient
from rollcage.client.connection import RetryBudget
from rollcage.errors import UnknownRollout, UsageError
from rollcage.events import Ended, Entry, Queued
from rollcage.types import Outcome
from support.served import Served, served, shell, steady_port


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("home")) as running:
        yield running


async def followed(client: Client, rollout_id: str, *, after: int = 0) -> list[Entry]:
    async with aclosing(client.follow(rollout_id, after=after)) as entries:
        return [entry async for entry in entries]


async def test_a_rollout_is_started_followed_and_fetched(server: Served) -> None:
    async with server.client() as client:
        started = await client.start(**shell("echo hi > a.txt", verify=["grep hi a.txt"], task_id="t"))  # type: ignore[arg-type]
        entries = await followed(client, started.rollout_id)
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        assert isinstance(entries[-1].event, Ended)
        result = await client.wait(started.rollout_id)
        assert (result.reward, result.outcome, result.task_id) == (1.0, Outcome.FINISHED, "t")
        assert (await client.result(started.rollout_id)) == result
        assert (await client.files(started.rollout_id)).files == {"/home/user/workdir/a.txt": "hi\n"}
        assert (await client.state(started.rollout_id)).status == "done"


async def test_following_can_begin_anywhere_and_an_ended_rollout_ends_at_once(server: Served) -> None:
    async with server.client() as client:
        result = await client.run(**shell("true"))  # type: ignore[arg-type]
        entries = await followed(client, result.rollout_id)
        assert await followed(client, result.rollout_id, after=5) == entries[5:]
        assert await followed(client, result.rollout_id, after=len(entries)) == []


async def test_a_rollout_is_aborted_and_its_box_is_gone_when_the_call_returns(server: Served) -> None:
    async with server.client() as client:
        started = await client.start(**shell("sleep 1000"))  # type: ignore[arg-type]
        aborted = await client.abort(started.rollout_id, "enough", wait_s=60)
        assert aborted.aborted
        assert (await client.result(started.rollout_id)).outcome is Outcome.ABORTED
        assert not (await client.abort(started.rollout_id)).aborted


async def test_lists_are_filtered_and_paged(server: Served) -> None:
    async with server.client() as client:
        for number in range(5):
            await client.run(**shell(f"exit {number % 2}", task_id=f"page-{number}"))  # type: ignore[arg-type]
        first = await client.page(text="page-", limit=3)
        assert [state.task_id for state in first.rollouts] == ["page-4", "page-3", "page-2"]
        second = await client.page(text="page-", limit=3, cursor=first.next_cursor or "")
        assert [state.task_id for state in second.rollouts] == ["page-1", "page-0"]
        assert second.next_cursor is None
        failed = [state.task_id async for state in client.list(text="PAGE-", outcome="agent_failed")]
        assert failed == ["page-3", "page-1"]
        assert [state.task_id async for state in client.list(task_id="page-2")] == ["page-2"]
        assert [state async for state in client.list(text="page-", status="running")] == []


async def test_mistakes_are_told_before_anything_is_sent() -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(UsageError, match="did you mean 'endpoint'"):
            await client.start("x", endpont="scripted")  # type: ignore[call-arg]
        with pytest.raises(UnknownRollout):
            await client.state("../health")


async def test_what_nobody_knows_is_an_error_and_a_server_that_is_not_there_too(server: Served) -> None:
    async with server.client() as client:
        with pytest.raises(UnknownRollout):
            await client.result("0000000000000000")
        with pytest.raises(UnknownRollout):
            await followed(client, "0000000000000000")
    async with Client("http://127.0.0.1:9", retry_s=0) as client:
        with pytest.raises(ServerError, match=r"at http://127\.0\.0\.1:9 cannot be reached"):
            await client.state("0000000000000000")
    with pytest.raises(UsageError, match="is no address of a server"):
        Client("127.0.0.1:8000")


async def test_a_start_has_a_key_of_its_own_even_where_an_empty_one_is_given(server: Served) -> None:
    async with server.client() as client:
        for key in ("", None):
            started = await client.start("true", agent="shell", endpoint="scripted", idempotency_key=key)
            [first] = [entry async for entry in client.follow(started.rollout_id) if entry.seq == 1]
            assert isinstance(first.event, Queued) and first.event.idempotency_key, "else it could be started twice"


BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class Cutting:
    """A line to the server that breaks: each connection is cut after so many bytes of answer."""

    def __init__(self, target: str, after: int) -> None:
        self._target, self._after = httpx.URL(target), after
        self.cuts = 0

    async def serve(self, client: SocketStream) -> None:
        with suppress(*BROKEN):
            upstream = await anyio.connect_tcp(self._target.host, self._target.port or 80)
            async with client, upstream, anyio.create_task_group() as tasks:
                tasks.start_soon(self._requests, client, upstream)
                await self._answers(client, upstream)
                tasks.cancel_scope.cancel()

    async def _answers(self, client: SocketStream, upstream: SocketStream) -> None:
        left = self._after
        with suppress(*BROKEN):
            async for data in upstream:
                await client.send(data[:left])
                left -= len(data)
                if left <= 0:
                    self.cuts += 1
                    return

    async def _requests(self, client: SocketStream, upstream: SocketStream) -> None:
        with suppress(*BROKEN):
            async for data in client:
                await upstream.send(data)


async def test_a_line_that_breaks_again_and_again_loses_no_event_and_doubles_none(server: Served) -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    # Enough for one or two entries (the first carries the whole job): every stream breaks in the middle of something.
    line = Cutting(server.url, 4000)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, line.serve)
        async with server.client() as straight, Client(f"http://127.0.0.1:{port}") as client:
            started = await straight.start(**shell("for i in 1 2 3; do sleep 0.2; done", verify=["true"] * 12))  # type: ignore[arg-type]
            entries = await followed(client, started.rollout_id)
            assert entries == await followed(straight, started.rollout_id)
        tasks.cancel_scope.cancel()
    assert line.cuts >= 1


async def test_a_start_whose_answer_was_lost_is_repeated_and_starts_nothing_twice(server: Served) -> None:
    class Losing(httpx.AsyncHTTPTransport):
        """Delivers every request; loses the first answer."""

        lost = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await super().handle_async_request(request)
            if request.method == "POST" and not self.lost:
                self.lost += 1
                await answer.aread()
                raise httpx.ReadError("lost on the way")
            return answer

    async with Client(server.url, transport=Losing()) as client:
        started = await client.start(**shell("true", task_id="once-only"))  # type: ignore[arg-type]
        assert started.joined
        await client.wait(started.rollout_id)
        assert len([state async for state in client.list(task_id="once-only")]) == 1


class Counting(httpx.AsyncHTTPTransport):
    """Counts the tries that found nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except httpx.ConnectError:
            self.refused[request.method] = self.refused.get(request.method, 0) + 1
            raise


async def test_a_client_outlasts_a_restart_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcage.client.connection.LONGEST_PAUSE_S", 0.2)
    port = str(steady_port())
    address, transport = f"http://127.0.0.1:{port}", Counting()
    async with Client(address, transport=transport, retry_s=600) as client:
        async with served(tmp_path, "--at-once", "1", "--port", port) as first:
            await client.start(**shell("sleep 1000"))  # type: ignore[arg-type]
            queued = (await client.start(**shell("true", verify=["true"]))).rollout_id  # type: ignore[arg-type]
            first.kill()
        got: list[object] = []

        async def wait() -> None:
            got.append((await client.wait(queued)).reward)

        async def follow() -> None:
            got.append([entry.seq for entry in await followed(client, queued)])

        async def start() -> None:
            got.append((await client.run(**shell("true", verify=["true"]))).reward)  # type: ignore[arg-type]

        async with anyio.create_task_group() as tasks:
            for each in (wait, follow, start):
                tasks.start_soon(each)
            with anyio.fail_after(120):
                while transport.refused.get("GET", 0) < 20 or transport.refused.get("POST", 0) < 10:
                    await anyio.sleep(0.01)
            async with served(tmp_path, "--port", port):
                with anyio.fail_after(120):
                    while len(got) < 3:
                        await anyio.sleep(0.05)
        assert got.count(1.0) == 2
        seqs = next(each for each in got if isinstance(each, list))
        assert seqs == list(range(1, len(seqs) + 1))


def test_patience_lasts_for_a_time_with_pauses_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rollcage.client.connection.time.monotonic", lambda: now[0])
    runs = []
    for _ in range(2):
        patience, pauses, now[0] = RetryBudget(60), [], 0.0
        while (pause := patience.pause()) is not None:
            pauses.append(pause)
            now[0] += pause
        runs.append(pauses)
        assert 60 <= now[0] < 64
        assert max(pauses) <= 4
    assert runs[0] != runs[1]
    assert RetryBudget(0).pause() is None


async def test_waiting_has_an_end(server: Served) -> None:
    async with server.client() as client:
        started = await client.start(**shell("sleep 1000"))  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await client.wait(started.rollout_id, wait_s=0.5)
        await client.abort(started.rollout_id, wait_s=60)


def test_the_sync_client_has_every_method_of_the_other() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in found if name[0] != "_"}

    assert methods(Client).items() <= methods(SyncClient).items()
    assert methods(SyncClient).keys() - methods(Client).keys() == {"close"}


async def test_a_sync_client_works_with_and_without_a_running_loop_and_leaves_no_thread(server: Served) -> None:
    def use() -> None:
        with SyncClient(server.url) as client:
            started = client.start("echo hi > a.txt", agent="shell", endpoint="scripted", task_id="sync-1")
            kinds = [entry.event.kind for entry in client.follow(started.rollout_id)]
            assert (kinds[0], kinds[-1]) == ("queued", "ended")
            assert client.wait(started.rollout_id).files == {"/home/user/workdir/a.txt": "hi\n"}
            assert [state.rollout_id for state in client.list(task_id="sync-1")][:1] == [started.rollout_id]
            assert client.state(started.rollout_id).status == "done"
            with pytest.raises(UnknownRollout):
                client.result("0000000000000000")
            with pytest.raises(UsageError, match="did you mean 'endpoint'"):
                client.start("x", endpont="scripted")  # type: ignore[call-arg]
            follower = client.follow(started.rollout_id)
            assert next(follower).seq == 1
        follower.close()
        client.close()
        with pytest.raises(UsageError, match="closed"):
            client.state(started.rollout_id)

    before = threading.active_count()
    use()  # a loop runs in this thread
    assert threading.active_count() <= before  # idle threads of others may end meanwhile
    await anyio.to_thread.run_sync(use)


async def test_what_the_server_refuses_names_its_argument_here_too(server: Served) -> None:
    async with server.client() as client:
        with pytest.raises(UsageError, match=r"^agent: no 'vim' here; known") as refused:
            await client.start("x", endpoint="scripted", agent="vim")
        assert refused.value.argument == "agent"


async def test_what_the_caller_attaches_comes_back(server: Served) -> None:
    async with server.client() as client:
        attached = {"group_id": "g-1", "policy_version": "step-7", "metadata": {"split": ["train", 3]}}
        result = await client.run("true", agent="shell", endpoint="scripted", **attached)  # type: ignore[arg-type]
        assert (result.group_id, result.policy_version, result.metadata) == tuple(attached.values())
        with pytest.raises(UsageError, match=r"metadata: is .* bytes of JSON; at most 65536 are kept"):
            await client.start("true", metadata={"a": "x" * (64 << 10)})


def test_the_client_is_where_its_name_says(tmp_path: Path) -> None:
    import rollcage

    assert rollcage.Client is Client
    with pytest.raises(AttributeError):
        _ = rollcage.Nonsense  # type: ignore[attr-defined]
