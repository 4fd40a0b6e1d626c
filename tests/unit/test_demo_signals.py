"""Signals of the demo: none is forgotten, wherever in Python it strikes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from relay.demo.signals import Signals, first_sets

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


class Struck:
    """Its destructor is where the signal strikes: what a handler raises there is dropped."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)
        sum(range(10))


@pytest.mark.parametrize("number", NUMBERS)
def test_one_that_strikes_a_destructor_is_acted_on_at_the_next_step(number: signal.Signals) -> None:
    signals = Signals()
    signals.act()
    Struck(number)
    with pytest.raises(KeyboardInterrupt):
        signals.act()


@pytest.mark.parametrize("number", NUMBERS)
def test_one_that_came_before_is_acted_on_when_nothing_is_started_any_more(number: signal.Signals) -> None:
    signals = Signals()
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        signals.interrupt()


def test_the_second_one_interrupts_at_once() -> None:
    Signals()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_in_the_loop_the_first_one_stops_and_the_second_one_interrupts() -> None:
    stopped = False

    async def play() -> None:
        nonlocal stopped
        stop = asyncio.Event()
        async with first_sets(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 10.0)
            stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(play())
    assert stopped
