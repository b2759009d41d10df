"""The interpreter's habits that edges change for the sake of streams, and give back."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack

from rollcage.gateway import Gateway
from rollcage.server.interpreter import SWITCH_S, YOUNG, tuned_for_streams


def habits() -> tuple[tuple[int, int, int], float]:
    return gc.get_threshold(), sys.getswitchinterval()


def test_the_usual_habits_come_back_with_the_end_of_the_last_block_whatever_the_order() -> None:
    before = habits()
    first, second = ExitStack(), ExitStack()
    first.enter_context(tuned_for_streams())
    second.enter_context(tuned_for_streams())
    assert gc.get_threshold()[0] == YOUNG
    assert sys.getswitchinterval() <= SWITCH_S
    first.close()
    assert gc.get_threshold()[0] == YOUNG
    second.close()
    assert habits() == before


def test_a_collector_that_was_turned_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with tuned_for_streams():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


async def test_a_gateway_leaves_the_interpreter_of_whoever_opens_it_alone() -> None:
    before = habits()
    async with Gateway.open():
        assert habits() == before
