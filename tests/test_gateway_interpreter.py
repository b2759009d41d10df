"""The interpreter's habits that a gateway changes, and gives back."""

from __future__ import annotations

import gc
import sys
from contextlib import AsyncExitStack

from rollcage.gateway import Gateway
from rollcage.gateway.interpreter import SWITCH_S, YOUNG


def habits() -> tuple[tuple[int, int, int], float]:
    return gc.get_threshold(), sys.getswitchinterval()


async def test_the_usual_habits_come_back_with_the_end_of_the_last_gateway_whatever_the_order() -> None:
    before = habits()
    first, second = AsyncExitStack(), AsyncExitStack()
    await first.enter_async_context(Gateway.open())
    await second.enter_async_context(Gateway.open())
    assert gc.get_threshold()[0] == YOUNG
    assert sys.getswitchinterval() <= SWITCH_S
    await first.aclose()
    assert gc.get_threshold()[0] == YOUNG
    await second.aclose()
    assert habits() == before


async def test_a_collector_that_was_turned_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        async with Gateway.open():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
