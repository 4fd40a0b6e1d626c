"""Decisions of supervisor and life: which failure counts, how to go on, which table is ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relay.life
import relay.supervisor as module
from relay import errors
from relay.backoff import Backoff
from relay.checkpoint import Checkpoint, Snapshot
from relay.config import Config, Outbox
from relay.errors import (
    ContractError,
    EventRejected,
    ProtocolError,
    RelayError,
    SetupError,
    SinkUnavailable,
    SlotBusy,
    SlotGivenUp,
    SlotLost,
    SourceUnavailable,
    StreamIncomplete,
    Superseded,
    TransientError,
    decisive,
)
from relay.life import Life
from relay.life_memory import Memory
from relay.life_tables import Tables
from relay.lsn import LSN
from relay.metrics import Metrics
from relay.outbox import mappings
from relay.progress import Progress, State
from relay.singleton import STANDBY_INTERVAL
from relay.source.slot import Identity, SlotInfo
from relay.supervisor import Supervisor
from tests.fakes import FaultySink

IDENTITY = Identity("7", 1, LSN(5000), "shop", 5)
SLOT = SlotInfo(name="outbox_relay", plugin="pgoutput", database="shop", confirmed_flush_lsn=LSN(4000))


def supervisor(**sections: Any) -> tuple[Supervisor, Progress, FaultySink]:
    progress, sink = Progress(), FaultySink()
    config = Config.model_validate(sections)
    return Supervisor(config, sink, progress, Metrics(progress, relay_name="t")), progress, sink


# -------------------------------------------------------------------------------------------------- what decides

FAILURES: list[RelayError] = [
    SourceUnavailable("a"),
    SinkUnavailable("b"),
    SlotBusy("c"),
    Superseded("d"),
    SetupError("e"),
    EventRejected("f"),
    ProtocolError("g"),
]


def nested(leaves: list[RelayError], data: st.DataObject) -> BaseException:
    """The leaves, in groups within groups, as task groups raise them."""
    items: list[Exception] = list(leaves)
    while len(items) > 1:
        size = data.draw(st.integers(2, len(items)))
        items = [*items[size:], ExceptionGroup("tasks", items[:size])]
    return ExceptionGroup("tasks", items)


@given(st.lists(st.sampled_from(FAILURES), min_size=1, max_size=6, unique=True), st.data())
def test_what_cannot_be_cured_by_waiting_decides(leaves: list[RelayError], data: st.DataObject) -> None:
    found = decisive(nested(leaves, data))
    assert found in leaves
    if any(not isinstance(leaf, TransientError) for leaf in leaves):
        assert not isinstance(found, TransientError)
    elif any(isinstance(leaf, Superseded) for leaf in leaves):
        assert isinstance(found, Superseded)  # publishing on while another relay writes is the worst


def test_a_plain_error_decides_by_itself() -> None:
    failure = SetupError("x")
    assert decisive(failure) is failure


@pytest.mark.parametrize("bug", [ZeroDivisionError(), KeyboardInterrupt(), MemoryError()])
def test_what_is_not_ours_goes_up_as_it_is(bug: BaseException) -> None:
    group = BaseExceptionGroup("tasks", [SourceUnavailable("a"), bug])
    with pytest.raises(BaseExceptionGroup) as caught:
        decisive(group)
    assert caught.value is group


def test_exit_codes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RelayError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert kind.exit_code == (
            2 if kind is errors.ConfigError else 3 if issubclass(kind, errors.OperatorError) else 1
        ), kind


# ----------------------------------------------------------------------------------------------------- the retry loop


async def outcomes(one: Supervisor, monkeypatch: pytest.MonkeyPatch, *results: BaseException | None) -> list[float]:
    """Run it through sessions that end like this; then it is stopped. Returns how long it would have waited."""
    waits: list[float] = []
    script = list(results)

    async def session() -> None:
        if not script:
            one.stop()
            return
        result = script.pop(0)
        if result is not None:
            raise result

    async def pause(stopping: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(one, "_live", session)
    monkeypatch.setattr(module, "pause", pause)
    await one.run()
    return waits


async def test_transient_failures_are_retried_for_ever_with_growing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    one, progress, _ = supervisor(delivery={"backoff_initial": 100.0, "backoff_max": 10_000.0})
    group = ExceptionGroup("tasks", [SourceUnavailable("gone", hint="wait"), SinkUnavailable("too")])
    waits = await outcomes(one, monkeypatch, *[SourceUnavailable("gone", hint="wait")] * 10, group)
    assert len(waits) == 11
    assert all(100 * 2**n / 2 <= wait <= 100 * 2**n for n, wait in enumerate(waits[:7]))
    assert all(5000 <= wait <= 10_000 for wait in waits[7:])
    assert progress.source_reconnects == 11
    assert progress.state == "stopped"


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("failure", [SlotBusy("in use"), Superseded("epoch 2")])
async def test_where_another_relay_is_active_it_stands_by(failure: RelayError, monkeypatch: pytest.MonkeyPatch) -> None:
    one, progress, _ = supervisor()
    entered: list[State] = []

    def enter(self: Progress, state: State) -> bool:
        entered.append(state)
        return True

    monkeypatch.setattr(Progress, "enter", enter)
    assert await outcomes(one, monkeypatch, failure, failure) == [STANDBY_INTERVAL] * 2
    assert entered == ["standby", "standby", "stopped"]
    assert progress.source_reconnects == 0


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("failure", [SetupError("x"), EventRejected("x"), ContractError("x"), ProtocolError("x")])
async def test_what_only_a_person_can_cure_ends_it(failure: RelayError, monkeypatch: pytest.MonkeyPatch) -> None:
    one, progress, sink = supervisor()
    with pytest.raises(type(failure)) as caught:
        await outcomes(one, monkeypatch, ExceptionGroup("tasks", [SourceUnavailable("a"), failure]))
    assert caught.value is failure
    assert progress.state == "stopped"
    with pytest.raises(SinkUnavailable, match="closed"):
        await sink.publish(None)  # type: ignore[arg-type]


async def test_a_bug_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, progress, _ = supervisor()
    with pytest.raises(ZeroDivisionError):
        await outcomes(one, monkeypatch, ZeroDivisionError())
    assert progress.state == "stopped"


async def test_a_stop_is_heard_while_waiting() -> None:
    one, _, _ = supervisor(delivery={"backoff_initial": 3600.0, "backoff_max": 3600.0})
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(one._wait_after(SourceUnavailable("gone"), Backoff(3600.0, 3600.0)))
        await asyncio.sleep(0)
        assert not waiting.done()
        one.stop()
    await one.run()  # nothing left to do


# ------------------------------------------------------------------------------------------ stream on, or recover


def checkpoint(phase: str = "stream", lsn: int = 4000) -> Checkpoint:
    return Checkpoint(1, "7", 1, "outbox_relay", LSN(lsn), Snapshot(900, 900), LSN(lsn), phase, None)


def life(memory: Memory | None = None, **sections: Any) -> Life:
    progress = Progress()
    made = Life(
        Config.model_validate(sections),
        None,  # type: ignore[arg-type]  # nothing is asked of a server here
        FaultySink(),
        progress,
        Metrics(progress, relay_name="t"),
        asyncio.Event(),
        memory or Memory(),
        None,
    )
    made._frame.identity = IDENTITY
    return made


async def fault(
    monkeypatch: pytest.MonkeyPatch,
    slot: SlotInfo | None,
    saved: Checkpoint,
    mode: str = "auto",
    *,
    memory: Memory | None = None,
    publication: RelayError | None = None,
) -> SlotLost | None:
    async def slot_info(session: Any, name: str) -> SlotInfo | None:
        return slot

    async def check_publication(session: Any, config: Config) -> None:
        if publication is not None:
            raise publication

    monkeypatch.setattr(relay.life, "slot_info", slot_info)
    monkeypatch.setattr(relay.life, "check_publication", check_publication)
    return await life(memory, source={"mode": mode})._fault(saved)


@pytest.mark.guarantee("G5")
async def test_it_streams_on_only_from_a_slot_that_starts_at_or_before_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await fault(monkeypatch, SLOT, checkpoint()) is None
    assert await fault(monkeypatch, SLOT, checkpoint(lsn=4500)) is None
    assert isinstance(await fault(monkeypatch, SLOT, checkpoint(lsn=3999)), SlotLost)
    assert isinstance(await fault(monkeypatch, None, checkpoint()), SlotLost)


async def test_the_first_start_and_an_interrupted_recovery_are_recoveries_in_every_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode in ("auto", "stream"):
        for phase in ("new", "recover", "poll"):
            assert isinstance(await fault(monkeypatch, SLOT, checkpoint(phase), mode), SlotLost)


async def test_in_stream_mode_a_lost_slot_is_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlotLost):
        await fault(monkeypatch, None, checkpoint(), "stream")
    with pytest.raises(SetupError):
        await fault(monkeypatch, SLOT, checkpoint(), "stream", publication=SetupError("no table"))


@pytest.mark.guarantee("G5")
async def test_what_the_last_life_learnt_is_a_reason_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await fault(monkeypatch, SLOT, checkpoint(), memory=Memory(failed_audits=1)) is None
    for memory in (Memory(lost=SlotGivenUp("too much")), Memory(failed_audits=2)):
        assert isinstance(await fault(monkeypatch, SLOT, checkpoint(), memory=memory), SlotLost)
    found = await fault(monkeypatch, SLOT, checkpoint(), publication=SetupError("no table", hint="add it"))
    assert found is not None and "no table" in str(found) and found.hint == "add it"
    with pytest.raises(SetupError):  # at the first start a person is there
        await fault(monkeypatch, SLOT, checkpoint("new"), publication=SetupError("no table"))


def test_a_life_learns_from_what_ended_it() -> None:
    memory = Memory()
    incomplete = StreamIncomplete("x", since="3:3:", until="4:4:", until_lsn="0/1", xids=None, counted=0)
    memory.learn(incomplete)
    memory.learn(incomplete)
    assert (memory.incomplete, memory.failed_audits, memory.lost) == (incomplete, 2, None)
    memory.learn(SourceUnavailable("gone"))
    given_up = SlotGivenUp("too much")
    memory.learn(given_up)
    lost: RelayError | None = memory.lost
    assert memory.gave_up and lost is given_up


async def test_a_slot_that_is_not_ours_to_replace_is_never_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"database": "other"}, {"slot_type": "physical"}):
        slot = SlotInfo(**{"name": "s", "plugin": "pgoutput", "database": "shop", **changes})  # type: ignore[arg-type]
        with pytest.raises(SetupError):
            await fault(monkeypatch, slot, checkpoint())
    busy = SlotInfo(name="s", plugin="pgoutput", database="shop", active=True, active_pid=1)
    with pytest.raises(SlotBusy):
        await fault(monkeypatch, busy, checkpoint())


async def test_a_plugin_that_was_changed_in_the_configuration_is_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = SlotInfo(name="s", plugin="wal2json", database="shop", confirmed_flush_lsn=LSN(1))
    assert isinstance(await fault(monkeypatch, slot, checkpoint()), SlotLost)


# -------------------------------------------------------------------------------------------------- tables, positions


def test_only_configured_tables_are_bound() -> None:
    config = Config.model_validate({"outbox": [Outbox(table="shop.events").model_dump(exclude_unset=True)]})
    tables = Tables(config, None)
    tables.mappings = mappings(config.outbox)
    names = [
        "seq",
        "id",
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "topic",
        "partition_key",
        "payload",
        "headers",
        "created_at",
        "xid",
    ]
    columns = [(name, 25) for name in names]
    assert tables.bind("shop.events", columns) is not None
    assert tables.bind("public.events", columns) is None
    with pytest.raises(ContractError):
        tables.bind("shop.events", columns[:3])


@pytest.mark.guarantee("G3")
def test_positions_name_relay_system_epoch_phase() -> None:
    frame = life(relay={"name": "shop"})._frame
    frame.progress.epoch = 4
    assert frame.stamp("stream", "1") == b"shop:7-5:4:stream:1:"
