"""Several addresses of one model: rollouts are spread, stay where they are, and move when their address dies."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollcage.errors import ModelUnreachable
from rollcage.gateway import Gateway
from rollcage.gateway.replicas import Replicas
from support.hand_made import hand_made, rig, says

pytestmark = pytest.mark.anyio


async def test_rollouts_are_spread_and_each_stays_with_its_address() -> None:
    async with AsyncExitStack() as stack:
        models = [await stack.enter_async_context(hand_made(says("a"))) for _ in range(3)]
        addresses = [model.endpoint().base_url for model in models]
        gateway = await stack.enter_async_context(Gateway.open(replicas=Replicas(addresses)))
        for _ in range(6):
            one = await stack.enter_async_context(rig(models[0].endpoint(), gateway=gateway))
            before = [len(model.asked) for model in models]
            for _ in range(3):
                await one.ask()
            assert sorted(len(model.asked) - had for model, had in zip(models, before, strict=True)) == [0, 0, 3]
        assert [len(model.asked) for model in models] == [6, 6, 6]


async def test_a_rollout_moves_when_its_address_dies_and_the_agent_hears_nothing_of_it() -> None:
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        dying = await first.enter_async_context(hand_made(says("a")))
        other = await stack.enter_async_context(hand_made(says("b")))
        addresses = [model.endpoint().base_url for model in (dying, other)]
        replicas = Replicas(addresses)
        replicas.take(addresses[1], 1)  # busy: the first is chosen
        gateway = await stack.enter_async_context(Gateway.open(replicas=replicas))
        one = await stack.enter_async_context(rig(dying.endpoint(), gateway=gateway))
        await one.ask()
        await first.aclose()
        for _ in range(2):
            await one.ask()
        assert [turn.error for turn in one.recorded] == [None, None, None]
        assert [turn.message["content"] for turn in one.recorded] == ["a", "b", "b"]
        await gateway.check(dying.endpoint(), fresh=True)


async def test_where_no_address_answers_the_model_is_unreachable() -> None:
    async with AsyncExitStack() as stack:
        gone = AsyncExitStack()
        models = [await gone.enter_async_context(hand_made(says("a"))) for _ in range(2)]
        replicas = Replicas([model.endpoint().base_url for model in models])
        gateway = await stack.enter_async_context(Gateway.open(replicas=replicas))
        one = await stack.enter_async_context(rig(models[0].endpoint(), gateway=gateway))
        await gone.aclose()
        await one.ask()
        assert "refused" in (one.recorded[0].error or "")
        with pytest.raises(ModelUnreachable):
            await gateway.check(models[0].endpoint(), fresh=True)


def test_a_list_in_a_file_may_change_and_other_addresses_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# ours\nhttp://a/v1\nhttp://b/v1/\n")
    replicas = Replicas(file=file)
    routes = [replicas.route("http://a/v1") for _ in range(4)]
    assert Counter(route.base_url for route in routes) == {"http://a/v1": 2, "http://b/v1": 2}
    assert replicas.route("http://elsewhere/v1").base_url == "http://elsewhere/v1"
    file.write_text("http://b/v1\nhttp://c/v1\n")
    moved = next(route for route in routes if route.base_url == "http://a/v1")
    assert moved.move() and moved.base_url == "http://c/v1", "c has none yet"
    for route in routes:
        route.close()
    routes = [replicas.route("http://a/v1") for _ in range(2)]
    assert {route.base_url for route in routes} == {"http://b/v1", "http://c/v1"}, "a once was one of them"
