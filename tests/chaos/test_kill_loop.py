"""The relay killed (SIGKILL) at random under load, again and again: nothing lost, nothing invented, order kept.

Duplicates carry the same id: JetStream's window swallows them, on Kafka consumers do. The short runs belong to every
test run; the long ones run with `pytest -m chaos`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fix_kafka import Kafka
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.ledger import Ledger
from tests.relays import RelayProcess, create_topic, jetstream, prepare, settings
from tests.relays import kafka as kafka_sink
from tests.sinks import Stored, read_jetstream, read_kafka

KILLS = [5, pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])]


async def kill_again_and_again(
    path: Path, ledger: Ledger, read: Callable[[], Awaitable[list[Stored]]], kills: int
) -> list[Stored]:
    """Kill at a random number of published events: while it starts, recovers, streams, checkpoints."""
    chance = random.Random(kills)
    with ledger.writing(writers=3, pause=0.005):
        for _ in range(kills):
            with RelayProcess(path) as relay:
                goal = chance.choice((0, 1, 50, 150, 300))
                if goal:
                    await relay.has_published(goal)
                else:
                    await relay.says("relay.started")
                assert relay.running, relay.output
                relay.kill()
    with RelayProcess(path) as relay:
        stored = await ledger.arrived(read, relay)
        await relay.ready()
        await relay.stopped()
    return stored


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("kills", KILLS)
async def test_jetstream(database: Database, nats: Nats, prefix: str, tmp_path: Path, kills: int) -> None:
    path = await prepare(tmp_path, settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix}))
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    stored = await kill_again_and_again(path, ledger, lambda: read_jetstream(nats.url, prefix), kills)
    ledger.check(stored)  # the dedupe window outlives the test: not one duplicate
    assert ledger.rolled_back


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("kills", KILLS)
async def test_kafka(database: Database, kafka: Kafka, prefix: str, tmp_path: Path, kills: int) -> None:
    path = await prepare(tmp_path, settings(database.dsn, kafka_sink(kafka.bootstrap), source={"slot": prefix}))
    await asyncio.to_thread(create_topic, kafka.bootstrap, prefix)
    ledger = Ledger(database.dsn, prefix)
    read = lambda: asyncio.to_thread(read_kafka, kafka.bootstrap, prefix)  # noqa: E731
    stored = await kill_again_and_again(path, ledger, read, kills)
    ledger.check(stored, duplicates=len(stored))  # first occurrences: complete, in order, with the same ids
