"""Short seeded runs of the chaos verifier, one on each broker; the long ones are `make chaos` (docs/chaos.md).

The verifier itself is tested on the way: a run in which it saw nothing, or hit nothing, is a failure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import uuid
from pathlib import Path

import pytest

from tests.chaos.harness.run import run_within
from tests.chaos.harness.schedule import KINDS, PROFILES, Options, schedule
from tests.chaos.harness.stage import RelayKeeper
from tests.chaos.harness.verifier import Comparison, Held
from tests.chaos.harness.writers import Entry, body_of
from tests.fix_services import loudly
from tests.relays import write_config

_SHORT = Options(minutes=0.08, events=1_200, keys=24, writers=8, settle=60.0)
_JETSTREAM = "relay-kill,slot-drop,postgres-kill,broker-kill,prepared-transaction"
_KAFKA = "relay-kill,slot-drop,broker-cut,postgres-cut"
_PATIENCE = 200.0  # less than a test has: whoever hangs shall say where


async def _passes(options: Options) -> None:
    said: list[str] = []
    with loudly():
        try:
            report = await run_within(_PATIENCE, options, said.append)
        except TimeoutError as error:
            pytest.fail("\n".join([*said, str(error)]), pytrace=False)
    report.write(options.report)
    assert report.passed, f"{report.text()}\nlogs and report: {options.report}"
    assert report.findings.committed > 500
    assert report.summary["faults"] >= options.faults - 2, report.text()
    assert report.summary["rolled_back"]
    page = (options.report / "report.html").read_text()
    assert "<svg" in page and options.command() in page


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G5")
async def test_a_short_run_on_each_broker(tmp_path: Path) -> None:
    """Both at the same time: most of a short run is waiting for servers and processes to start."""
    for_kafka = dataclasses.replace(_SHORT, broker="kafka", mode="idempotent", relays=1)
    async with asyncio.TaskGroup() as both:
        both.create_task(
            _passes(dataclasses.replace(_SHORT, seed=5, faults=5, profile=_JETSTREAM, report=tmp_path / "jetstream"))
        )
        both.create_task(
            _passes(dataclasses.replace(for_kafka, seed=6, faults=4, profile=_KAFKA, report=tmp_path / "kafka"))
        )


@pytest.mark.parametrize("turns", [0, 2])
async def test_a_relay_that_was_killed_a_moment_ago_is_stopped_too(tmp_path: Path, turns: int) -> None:
    """While it ends, and while it is started again: the exit code is that of the new one, and nobody is left."""
    nobody = {"kind": "jetstream", "jetstream": {"servers": ["nats://127.0.0.1:1"]}}
    config = write_config(tmp_path, {"database": {"dsn": "postgresql://nobody@127.0.0.1:1/none"}, "sink": nobody})
    keeper = RelayKeeper("relay", config, tmp_path, None)
    keeping = asyncio.create_task(keeper.keep())
    while not await keeper.state():
        await asyncio.sleep(0.02)
    keeper.signal(signal.SIGKILL)
    while turns and keeper.running:
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await keeper.stop() == 0
    await asyncio.wait_for(keeping, 60.0)
    assert keeper.started == 2 and not keeper.ends


def test_the_seed_repeats_the_schedule() -> None:
    options = Options(seed=42, faults=200, minutes=10)
    faults = schedule(options)
    assert faults == schedule(options)
    assert faults != schedule(dataclasses.replace(options, seed=43))
    assert {fault.kind for fault in faults} == set(PROFILES["all"]) <= set(KINDS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[0].at >= 0 and faults[-1].at <= options.seconds


def test_the_verifier_finds_what_is_wrong() -> None:
    entries = [Entry(uuid.uuid4(), key, number) for key in ("k1", "k2") for number in (1, 2, 3)]
    one, two, three, first, second, third = entries

    def held(entry: Entry, at: int, where: str = "s", **changed: object) -> Held:
        body = repr(body_of(entry) | changed).replace("'", '"').encode()
        return Held(entry.id, entry.key, body, where, at)

    rolled_back, stranger = Entry(uuid.uuid4(), "k1", 9), Entry(uuid.uuid4(), "k2", 9)
    comparison = Comparison(entries, {rolled_back.id})
    messages = [one, three, two, three, one, rolled_back, stranger, first]
    for at, entry in enumerate(messages):
        comparison.take(held(entry, at))
    comparison.take(held(second, 8, n=7))
    found = comparison.done()
    assert [each["id"] for each in found.lost] == [str(third.id)]
    assert [each["was"] for each in found.phantom] == ["rolled back", "unknown"]
    assert [(each["key"], each["number"]) for each in found.reordered] == [("k1", 2)]
    assert [each["number"] for each in found.duplicates] == [3, 1]
    assert found.count("late_repeats") == 1
    assert [each["id"] for each in found.wrong_bodies] == [str(second.id)]
    assert found.stored == 9 and found.committed == 6


def test_a_key_in_two_partitions_is_disorder() -> None:
    entries = [Entry(uuid.uuid4(), "k1", number) for number in (1, 2)]
    comparison = Comparison(entries, set())
    for entry, where in zip(entries, ("t/0", "t/1"), strict=True):
        comparison.take(Held(entry.id, "k1", repr(body_of(entry)).replace("'", '"').encode(), where, 0))
    assert comparison.done().count("reordered") == 1
