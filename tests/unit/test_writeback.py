"""Write-back's waiting, without a server: a cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest

from relay.config import Config
from relay.progress import Progress
from relay.writeback import WriteBack
from tests.sinks import make_event


async def test_a_cancellation_that_comes_together_with_progress_is_not_lost() -> None:
    """Two wait; one is told that things moved, and cancels the other in the same turn of the loop."""
    config = Config.model_validate({"outbox": [{"write_back": {"published_at": "now()"}}]})
    write_back = WriteBack(config, Progress())
    write_back._running = True
    write_back.acknowledged([make_event(1)])
    waiting = asyncio.create_task(write_back.caught_up(60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    write_back._moved.set()
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_nothing_at_all_when_it_is_off() -> None:
    assert WriteBack.of(Config(), Progress()) is None
