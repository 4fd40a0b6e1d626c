"""The hall: whatever the order of completions and failures, acknowledged is a prefix, and keys stay in order.

The sink is a fake that fails on demand; the last tests check that it keeps the seam's contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.config import Delivery
from relay.errors import (
    EventRejected,
    OperatorError,
    ProtocolError,
    RelayError,
    SetupError,
    SinkUnavailable,
    SourceUnavailable,
    decisive,
)
from relay.event import Batch, Event, HeaderNames, Rejected, Transaction
from relay.lsn import LSN, NOWHERE
from relay.metrics import Metrics
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.sink import Sink
from tests.fakes import Act, FaultySink, ListSource

QUICK = Delivery(backoff_initial=1e-6, backoff_max=1e-6, shutdown_timeout=30.0)


def event(number: int, key: bytes | None = b"k", size: int = 10) -> Event:
    origin = Transaction(number, number, 1.0, b"")
    return Event(b"id-%d" % number, "t", key, HeaderNames.of(()), (), b"x" * size, "public.o", origin, 0)


def batch(*numbers: int, end: int | None = None, key: bytes | None = b"k", size: int = 10) -> Batch:
    """The events with these numbers; the number is the commit's LSN, too."""
    events = [event(number, key, size) for number in numbers]
    lsn = end if end is not None else numbers[-1]
    return Batch(events, LSN(lsn), size * len(events), 1.0)


def make(sink: Sink, delivery: Delivery = QUICK, progress: Progress | None = None) -> tuple[Pipeline, Progress]:
    progress = progress or Progress()
    return Pipeline(sink, delivery, progress, Metrics(progress, relay_name="t", stalled_after=30.0), NOWHERE), progress


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until it is so."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def running(pipeline: Pipeline, source: ListSource) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(pipeline.run(source))
        try:
            yield task
        finally:
            task.cancel()


async def failure_of(pipeline: Pipeline, source: ListSource) -> RelayError:
    with pytest.raises((RelayError, ExceptionGroup)) as caught:
        await asyncio.wait_for(pipeline.run(source), 60)
    return decisive(caught.value)


@pytest.mark.guarantee("G4")
async def test_a_destination_met_within_a_transaction_is_not_covered_by_opening_again() -> None:
    """Its mark is ahead of the LSN: saved as if it were covered, a crash would look for stored events behind it."""
    sink = FaultySink()
    pipeline, _ = make(sink)
    sink.marks = {"known": 10}
    await pipeline.open()
    assert pipeline.coverage.whole["known"] == 10
    pipeline.coverage.marks = pipeline.coverage.marks | {"known": 15, "new": 7}  # acknowledged: parts of a transaction
    sink.marks = {"known": 15, "new": 7, "just made": 3}
    await pipeline.open()
    covered = {name: mark for name, mark in pipeline.coverage.whole.items() if name in sink.marks}
    assert covered == {"known": 10, "just made": 3}
    assert pipeline.coverage.marks["new"] == 7


# ------------------------------------------------------------------------------------------------------- any history

ACTS = st.lists(
    st.builds(
        Act, st.sampled_from(["store", "store", "hold", "hold", "refuse", "part", "lose"]), turns=st.integers(0, 4)
    ),
    max_size=25,
)
SHAPES = st.lists(
    st.tuples(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=4), st.booleans()), min_size=1, max_size=14
)


def batches_of(shapes: Sequence[tuple[list[bytes], bool]]) -> tuple[list[Batch], list[Event]]:
    """Batches with ever higher commit LSNs; a batch that is not `whole` is cut inside its last transaction."""
    batches, events, number, closed = [], [], 1, 0
    for keys, whole in shapes:
        mine = [event(number + i, key) for i, key in enumerate(keys)]
        number += len(mine)
        if whole:
            closed = number = number + 1  # a keepalive behind it
        elif mine:
            closed = max(closed, mine[-1].transaction.commit_lsn - 1)
        batches.append(Batch(mine, LSN(closed), 10 * len(mine), 1.0))
        events += mine
    batches.append(Batch([], LSN(number), 0, 1.0))
    return batches, events


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G8")
@settings(max_examples=150)
@given(SHAPES, ACTS, st.lists(st.integers(0, 10), min_size=1), st.integers(1, 8), st.lists(st.booleans(), max_size=3))
async def test_any_history(
    shapes: list[tuple[list[bytes], bool]], acts: list[Act], releases: list[int], window: int, opens: list[bool]
) -> None:
    batches, events = batches_of(shapes)
    end = batches[-1].end_lsn
    largest = max(b.count for b in batches)
    sink = FaultySink(acts, opens=[None if fine else SinkUnavailable("not yet") for fine in opens])
    delivery = QUICK.model_copy(update={"max_in_flight_events": window})
    pipeline, progress = make(sink, delivery)
    source = ListSource(batches)
    turn = 0
    async with asyncio.timeout(20), running(pipeline, source):
        while pipeline.acknowledged < end:
            await asyncio.sleep(0)
            turn += 1
            done = pipeline.acknowledged
            # G1: nothing before the acknowledged LSN is unacknowledged by the sink.
            assert all(e.id in sink.acknowledged for e in events if e.transaction.commit_lsn < done)
            # G8: the window is bounded; a batch is let in while there is room.
            assert progress.in_flight_events < window + largest
            if sink.held and turn % 3 == 0:
                sink.release(releases[turn % len(releases)])
    assert pipeline.acknowledged == end
    assert (progress.in_flight_events, progress.in_flight_bytes) == (0, 0)
    assert progress.published_events == len(events)
    # G2: a consumer that dedupes sees each key in commit order; and nothing is missing.
    seen = sink.first_occurrences()
    for key in (b"a", b"b", b"c"):
        assert [e.id for e in seen if e.key == key] == [e.id for e in events if e.key == key]
    assert source.confirmed == []  # that is for the checkpoint to do


@pytest.mark.guarantee("G8")
async def test_bytes_are_bounded_too() -> None:
    sink = FaultySink([Act("hold")] * 10)
    pipeline, progress = make(sink, QUICK.model_copy(update={"max_in_flight_bytes": 250}))
    source = ListSource([batch(n, size=100) for n in range(1, 11)])
    async with running(pipeline, source):
        await until(lambda: len(sink.held) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert progress.in_flight_bytes == 300  # 200 left room for one more
        assert len(source.handed) == 4  # one is waiting at the door
        while pipeline.acknowledged < 10:
            await asyncio.sleep(0)
            assert progress.in_flight_bytes <= 300
            if sink.held:
                sink.release()


@pytest.mark.guarantee("G1")
async def test_a_later_acknowledgement_does_not_pass_an_earlier_batch() -> None:
    sink = FaultySink([Act("hold"), Act("store"), Act("hold")])
    pipeline, _ = make(sink)
    async with running(pipeline, ListSource([batch(1), batch(2), batch(3)])):
        await until(lambda: b"id-2" in sink.acknowledged and len(sink.held) == 2)
        sink.release(1)
        await until(lambda: b"id-3" in sink.acknowledged)
        for _ in range(10):
            await asyncio.sleep(0)
        assert pipeline.acknowledged == 0
        sink.release()
        await until(lambda: pipeline.acknowledged == 3)


@pytest.mark.guarantee("G7")
async def test_a_keepalive_takes_effect_with_what_stands_before_it() -> None:
    sink = FaultySink([Act("hold")])
    pipeline, _ = make(sink)
    async with running(pipeline, ListSource([Batch([], LSN(5)), batch(7, end=6), Batch([], LSN(50))])):
        await until(lambda: len(sink.held) == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert pipeline.acknowledged == 5
        sink.release()
        await until(lambda: pipeline.acknowledged == 50)


async def test_only_what_is_not_known_to_be_durable_is_sent_again() -> None:
    sink = FaultySink([Act("part")])
    pipeline, progress = make(sink)
    async with running(pipeline, ListSource([batch(1, 2, 3, 4)])):
        await until(lambda: pipeline.acknowledged == 4)
    assert sink.calls == [[b"id-1", b"id-2", b"id-3", b"id-4"], [b"id-3", b"id-4"]]
    assert [e.id for e in sink.stored] == [b"id-1", b"id-2", b"id-3", b"id-4"]
    assert (progress.published_events, progress.in_flight_events, progress.sink_reconnects) == (4, 0, 1)


# --------------------------------------------------------------------------------------------------------- the ends


async def test_stop_drains() -> None:
    sink = FaultySink([Act("hold"), Act("hold")])
    pipeline, progress = make(sink)
    source = ListSource([batch(1), batch(2)])
    async with running(pipeline, source) as task:
        await until(lambda: len(sink.held) == 2)
        pipeline.stop()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        sink.release()
        sink.release()
        await task
    assert pipeline.acknowledged == 2
    assert progress.in_flight_events == 0


async def test_stop_drains_also_what_waits_for_a_broker_that_is_away() -> None:
    sink = FaultySink([Act("refuse"), Act("lose")], opens=[SinkUnavailable("away")] * 3)
    pipeline, _ = make(sink)
    source = ListSource([batch(1), batch(2)])
    async with running(pipeline, source) as task:
        await until(lambda: len(source.handed) == 2)
        await asyncio.sleep(0)
        pipeline.stop()
        await task
    assert pipeline.acknowledged == 2


async def test_stop_gives_up_in_time_when_the_broker_stays_away() -> None:
    sink = FaultySink([Act("hold")])
    pipeline, _ = make(sink, QUICK.model_copy(update={"shutdown_timeout": 0.01}))
    async with asyncio.timeout(60), running(pipeline, ListSource([batch(1)])) as task:
        await until(lambda: len(sink.held) == 1)
        pipeline.stop()
        await task
    assert pipeline.acknowledged == 0


async def test_a_source_that_ends_is_drained() -> None:
    pipeline, _ = make(FaultySink([Act("store", 5), Act("lose"), Act("refuse")]))
    await asyncio.wait_for(pipeline.run(ListSource([batch(1), batch(2)], ends=True)), 60)
    assert pipeline.acknowledged == 2


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_a_source_that_has_ended_is_done_only_when_everything_is_acknowledged() -> None:
    """A recovery takes the return of `run` as "all published": a broker that is away must not look like that."""
    sink = FaultySink([Act("hold")])
    pipeline, _ = make(sink, QUICK.model_copy(update={"shutdown_timeout": 0.001}))
    async with running(pipeline, ListSource([batch(1)], ends=True)) as task:
        await until(lambda: len(sink.held) == 1)
        await asyncio.wait((task,), timeout=0.05)
        assert not task.done()
        sink.release()
        await task
        assert pipeline.acknowledged == 1


async def test_stop_ends_also_a_source_that_has_ended() -> None:
    sink = FaultySink([Act("hold")])
    pipeline, _ = make(sink, QUICK.model_copy(update={"shutdown_timeout": 0.001}))
    async with running(pipeline, ListSource([batch(1)], ends=True)) as task:
        await until(lambda: len(sink.held) == 1)
        pipeline.stop()
        await asyncio.wait_for(task, 60)
    assert pipeline.acknowledged == 0


async def test_what_was_handed_on_before_the_source_failed_does_not_come_twice() -> None:
    sink = FaultySink([Act("store", 5), Act("lose"), Act("store", 5)])
    pipeline, progress = make(sink)
    failure = await failure_of(pipeline, ListSource([batch(1), batch(2)], failure=SourceUnavailable("gone")))
    assert isinstance(failure, SourceUnavailable)
    assert pipeline.acknowledged == 2
    assert progress.in_flight_events == 0


async def test_a_source_that_makes_no_sense_ends_it_at_once() -> None:
    sink = FaultySink([Act("hold")])
    pipeline, _ = make(sink)
    failure = await failure_of(pipeline, ListSource([batch(1)], failure=ProtocolError("what?")))
    assert isinstance(failure, ProtocolError)
    assert pipeline.acknowledged == 0


@pytest.mark.guarantee("G8")
@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("failure", [SourceUnavailable("gone"), ProtocolError("what?")])
async def test_the_next_pipeline_begins_with_an_empty_window(failure: RelayError) -> None:
    """What the last session left unacknowledged comes again: it must not occupy the window for ever."""
    delivery = QUICK.model_copy(update={"shutdown_timeout": 0.01, "max_in_flight_events": 2})
    pipeline, progress = make(FaultySink([Act("hold")] * 2), delivery)
    await failure_of(pipeline, ListSource([batch(1), batch(2)], failure=failure))
    assert pipeline.acknowledged == 0
    assert (progress.in_flight_events, progress.in_flight_bytes, progress.oldest_in_flight) == (0, 0, None)
    again, _ = make(FaultySink(), delivery, progress)
    async with running(again, ListSource([batch(1), batch(2), batch(3)])):
        await until(lambda: again.acknowledged == 3)


async def test_cancelling_ends_it_at_once() -> None:
    sink = FaultySink([Act("hold")])
    pipeline, progress = make(sink)
    async with running(pipeline, ListSource([batch(1)])) as task:
        await until(lambda: len(sink.held) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert pipeline.acknowledged == 0
    assert progress.in_flight_events == 0


class Deaf(FaultySink):
    """A sink whose publish does not hear that it is cancelled, and succeeds afterwards."""

    def __init__(self) -> None:
        super().__init__([])
        self.freed = asyncio.Event()

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        while not self.freed.is_set():
            with suppress(asyncio.CancelledError):
                await self.freed.wait()
        return await super().publish(batch)


async def test_cancelling_ends_it_also_when_a_publish_swallows_it() -> None:
    sink = Deaf()
    pipeline, progress = make(sink)
    async with running(pipeline, ListSource([batch(1), batch(2)], ends=False)) as task:
        await until(lambda: progress.in_flight_events == 2)
        task.cancel()
        await asyncio.sleep(0)
        sink.freed.set()
        done, _ = await asyncio.wait((task,), timeout=60)
        assert done


@pytest.mark.guarantee("G4")
async def test_what_the_broker_held_is_settled_only_when_no_older_transaction_can_show_rows() -> None:
    """Settled too early, ids that were read back are forgotten, and their events stored again when they come."""
    pipeline, _ = make(FaultySink([]))
    batches = [batch(1), batch(2), batch(3)]

    class Rounds(ListSource):
        async def batches(self) -> AsyncIterator[Batch]:
            for each, before in zip(self._batches, (None, 9, 10), strict=True):
                if before is not None:
                    pipeline.coverage.settle(before)
                yield each
                await until(lambda each=each: pipeline.acknowledged == each.end_lsn)  # type: ignore[misc]
                pipeline.coverage.horizon = 10  # as its owner notes when the sink is open

    await asyncio.wait_for(pipeline.run(Rounds(batches)), 60)
    assert [each.settled for each in batches] == [False, False, True]


# ------------------------------------------------------------------------------------------ what a person must cure


@pytest.mark.guarantee("G1")
async def test_a_rejected_event_is_named_and_nothing_past_it_is_acknowledged() -> None:
    sink = FaultySink([Act("store"), Act("reject"), Act("store")])
    pipeline, progress = make(sink)
    failure = await failure_of(pipeline, ListSource([batch(1), batch(2, 3), batch(4)]))
    assert isinstance(failure, EventRejected)
    assert "id-2" in str(failure) and "too large" in str(failure) and "public.o" in str(failure) and failure.hint
    assert pipeline.acknowledged == 1
    assert progress.rejected_events > 0
    assert [e.id for e in sink.stored] == [b"id-1"]


@pytest.mark.guarantee("G1")
async def test_a_row_that_cannot_be_routed_is_named_and_nothing_past_it_is_acknowledged() -> None:
    bad = batch(2, 4)
    bad.rejected.append(Rejected(event(3), "no topic"))
    pipeline, _ = make(FaultySink())
    failure = await failure_of(pipeline, ListSource([batch(1), bad, batch(5)]))
    assert isinstance(failure, EventRejected)
    assert "id-3" in str(failure) and "no topic" in str(failure)
    assert pipeline.acknowledged <= 1


async def test_an_operator_error_of_the_sink_goes_up_at_once() -> None:
    fault: OperatorError = SetupError("no such stream")
    pipeline, progress = make(FaultySink([Act("hold"), Act("refuse")], fatal=fault))
    assert await failure_of(pipeline, ListSource([batch(1), batch(2)])) is fault
    assert pipeline.acknowledged == 0
    assert progress.sink_reconnects == 0
    pipeline, _ = make(FaultySink(opens=[fault]))
    assert await failure_of(pipeline, ListSource([batch(1)])) is fault


async def test_a_bug_in_the_sink_is_not_retried() -> None:
    class Buggy(FaultySink):
        async def publish(self, batch: Batch) -> Sequence[Rejected]:
            raise ZeroDivisionError

    pipeline, _ = make(Buggy())
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(pipeline.run(ListSource([batch(1)])), 60)
    assert caught.group_contains(ZeroDivisionError)


# ----------------------------------------------------------------------------------------------- the fake's contract


@given(SHAPES, ACTS, st.lists(st.integers(0, 5), min_size=1))
async def test_the_fake_keeps_the_contract_of_a_sink(
    shapes: list[tuple[list[bytes], bool]], acts: list[Act], releases: list[int]
) -> None:
    batches, _ = batches_of(shapes)
    sent = [list(b.events) for b in batches]
    sink: FaultySink = FaultySink(acts)
    await sink.open()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(sink, b)) for b in batches]
        turn = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1
            if sink.held:
                sink.release(releases[turn % len(releases)])
    stored = [e.id for e in sink.stored]
    assert len(stored) == len(set(stored))
    failed = False
    missing: set[bytes | None] = set()
    for b, before, task in zip(batches, sent, tasks, strict=True):
        if isinstance(task.result(), RelayError):
            failed = True
            left = {e.id for e in b.events}
            assert all(e.id in stored for e in before if e.id not in left)  # what was taken out is durable
        else:
            assert all(e.id in stored for e in before)
        for e in before:  # after the first event that is not stored, nothing later of its key
            assert e.id not in stored or e.key not in missing
            if e.id not in stored:
                missing.add(e.key)
    if failed:
        with pytest.raises(SinkUnavailable):
            await sink.publish(batch(10_000))
    await sink.close()
    await sink.close()


async def _outcome(sink: Sink, batch: Batch) -> Sequence[Rejected] | RelayError:
    try:
        return await sink.publish(batch)
    except RelayError as exc:
        return exc
