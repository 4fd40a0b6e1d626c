"""Points, windows and selections without a server; and what the pipeline does with a batch that is not the source's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from relay.config import Delivery, Outbox
from relay.errors import ConfigError, SetupError
from relay.event import Batch, Event, HeaderNames, Rejected, Transaction
from relay.history import Known, Point, end, parse_time, start
from relay.lsn import LSN, NOWHERE
from relay.metrics import Metrics
from relay.outbox import mappings
from relay.pipeline import Pipeline
from relay.progress import Progress
from relay.sink import UNCOUNTABLE
from relay.source.selection import Selection, key_expression, own_ids, replayed
from relay.wish import Wish, check_wish

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def point(minute: int, *, lag: int = 0) -> Point:
    """Written at this minute with all WAL up to it acknowledged, and a snapshot that is older by `lag`."""
    lsn = LSN(minute * 100)
    return Point(NOON + timedelta(minutes=minute), lsn, f"snap-{minute}", LSN((minute - lag) * 100), lsn)


KNOWN = Known([point(1), point(2), point(3, lag=1), point(4)], point(6))


@pytest.mark.parametrize(("minute", "found"), [(1, "1"), (1.5, "1"), (2, "2"), (5, "4"), (6, "6"), (99, "6")])
def test_a_replay_begins_at_the_last_point_before(minute: float, found: str) -> None:
    assert start(KNOWN, lsn=LSN(int(minute * 100))).snap == f"snap-{found}"
    assert start(KNOWN, at=NOON + timedelta(minutes=minute)).snap == f"snap-{found}"


def test_before_the_history_nothing_is_known() -> None:
    with pytest.raises(SetupError, match=r"earliest point is 0/64 \(2026-11-16T12:01:00Z\)"):
        start(KNOWN, lsn=LSN(99))
    with pytest.raises(SetupError, match="reach back to 2026-11-16T12:00:00Z"):
        start(KNOWN, at=NOON)


@pytest.mark.parametrize(("minute", "found"), [(1, "1"), (1.5, "2"), (2.5, "4"), (3, "4"), (5, "6")])
def test_a_replay_ends_with_a_snapshot_from_behind_the_point(minute: float, found: str) -> None:
    """The row of minute 3 was written then, but its snapshot is that of minute 2."""
    assert end(KNOWN, lsn=LSN(int(minute * 100))).snap == f"snap-{found}"
    assert end(KNOWN, at=NOON + timedelta(minutes=minute)).snap == f"snap-{found}"


UUID = "0192f3c4-1111-7000-8000-00000000000a"


@pytest.mark.parametrize(
    ("id_type", "yes", "no"),
    [
        ("uuid", [UUID, UUID.replace("-", "").upper(), f"{{{UUID}}}"], ["nope", "12", UUID[:-1], f"{UUID}0"]),
        ("bigint", ["1", "-7", "9223372036854775807"], ["nope", "1.5", "", "9223372036854775808"]),
        ("smallint", ["32767"], ["32768"]),
        ("text", ["nope", "12", UUID, ""], []),
    ],
)
def test_ids_that_a_table_can_have(id_type: str, yes: list[str], no: list[str]) -> None:
    """The others belong to another table, or to none: Postgres would refuse the whole query."""
    (mapping,) = mappings([Outbox(table="public.outbox_events")])
    assert own_ids([*yes, *no], mapping, id_type) == {each: each for each in yes}


def test_ids_of_several_tables_bear_their_name_unless_they_are_uuids() -> None:
    one, other = mappings([Outbox(table="public.a"), Outbox(table="public.b")])
    asked = ["public.a:1", "public.b:1", "public.b:x", UUID]
    assert own_ids(asked, one, "bigint") == {"public.a:1": "1"}
    assert own_ids(asked, other, "uuid") == {UUID: UUID}


def test_times() -> None:
    assert parse_time("2026-11-16T12:00:00Z", NOON) == NOON
    assert parse_time("2026-11-16 12:00", NOON) == NOON
    assert parse_time("2026-11-16T13:00+01:00", NOON) == NOON
    assert parse_time("90s", NOON) == NOON - timedelta(seconds=90)
    assert parse_time("2h", NOON) == NOON - timedelta(hours=2)
    for text in ("yesterday", "9999999d", "99999999999999999999s", "0001-01-01T00:00+01:00"):
        with pytest.raises(ConfigError, match="not a time"):
            parse_time(text, NOON)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(), "say what to replay"),
        (Wish(seq=2**63), "--seq is beyond"),
        (Wish(seq=1, to_seq=-(2**63) - 1), "--to-seq is beyond"),
        (Wish(seq=1, rate=float("nan")), "--rate must be more"),
        (Wish(seq=1, since="1h"), "--since and --seq: give one beginning"),
        (Wish(seq=1, to_seq=2, until="1h"), "one end"),
        (Wish(ids=("a",), key="k"), "--id stands alone"),
        (Wish(seq=1, rate=0), "--rate"),
        (Wish(seq=2, to_seq=1), "--to-seq is before"),
        (Wish(since="2999-01-01T00:00:00Z"), "in the future"),
        (Wish(seq=1, topic=""), "--topic is empty"),
    ],
)
def test_contradictions(wish: Wish, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_wish(wish)


def test_a_selection_goes_through_json() -> None:
    selection = Selection("3:3:", since="1:1:", ids=("a", "b"), rate=2.5)
    assert Selection.of(selection.to_json()) == selection
    assert selection.ordered
    assert not Selection("3:3:", key="k").ordered


def test_the_key_in_sql() -> None:
    (mapping,) = mappings((Outbox(),))
    assert key_expression("{table}/{aggregate_id}", mapping).as_string(None) == (
        "coalesce(nullif(\"partition_key\"::text, ''), 'public.outbox_events' || '/' || "
        "nullif(\"aggregate_id\"::text, ''))"
    )


def event(number: int, names: tuple[str, ...] = ("id",)) -> Event:
    origin = Transaction(0, 0, 0.0, b"")
    values = tuple(b"e%d" % number for _ in names)
    return Event(b"e%d" % number, "t", b"k", HeaderNames.of(names), values, b"{}", "public.o", origin, number)


@pytest.mark.guarantee("G3")
def test_replayed_events_keep_their_id_and_say_what_they_are() -> None:
    (made,) = replayed([event(1)], "r", None)
    assert (made.id, made.topic, made.key, made.body) == (b"e1:replay:r", "t", b"k", b"{}")
    assert made.headers() == [("id", b"e1"), ("relay-replayed", b"r")]
    (made,) = replayed([event(1, ("Nats-Expected-Stream",))], "r", "other", key=b"lane")
    assert (made.topic, made.key) == ("other", b"lane")
    assert made.headers() == [("id", b"e1"), ("relay-replayed", b"r")]


class Fenced:
    """A sink that stores at once and counts, as one with a fence does."""

    duplicates = 0

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.refuse: set[bytes] = set()

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        """Nothing was there before."""

    @property
    def marks(self) -> dict[str, int]:
        return {"S": len(self.stored)}

    async def open(self) -> None:
        """Always open."""

    async def close(self) -> None:
        """Always open."""

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        self.stored += [each.id for each in batch.events if each.id not in self.refuse]
        batch.marks = {"S": len(self.stored)}
        return [Rejected(each, "no") for each in batch.events if each.id in self.refuse]


class Endless:
    """A source that gives one batch, and then nothing until it is stopped."""

    async def batches(self) -> AsyncIterator[Batch]:
        yield Batch([event(1)], LSN(10), 1, 1.0)
        await asyncio.get_running_loop().create_future()

    async def confirm(self, lsn: LSN) -> None:
        """Nobody asks."""


@pytest.mark.guarantee("G1")
async def test_an_injected_batch_acknowledges_nothing_and_its_refusals_stop_nobody() -> None:
    sink, progress = Fenced(), Progress()
    pipeline = Pipeline(sink, Delivery(), progress, Metrics(progress, relay_name="t", stalled_after=30.0), NOWHERE)
    async with asyncio.timeout(10):
        running = asyncio.create_task(pipeline.run(Endless()))
        while progress.published_events < 1:
            await asyncio.sleep(0)
        with pipeline.injecting():
            assert pipeline.coverage.marks[UNCOUNTABLE] == 1
            assert await pipeline.inject(Batch([event(7)], NOWHERE, 1, 1.0)) == []
            assert pipeline.coverage.marks[UNCOUNTABLE] == 1
            sink.refuse = {b"e8"}
            assert [each.event.id for each in await pipeline.inject(Batch([event(8)], NOWHERE, 1, 1.0))] == [b"e8"]
        assert pipeline.coverage.marks["S"] == 2
        assert pipeline.coverage.marks[UNCOUNTABLE] == 0
        assert (pipeline.acknowledged, pipeline.last_event_lsn) == (LSN(10), LSN(10))
        assert (progress.published_events, progress.in_flight_events, pipeline.injections) == (1, 0, 2)
        pipeline.stop()
        waiting = asyncio.create_task(pipeline.inject(Batch([event(9)], NOWHERE, 1, 1.0)))
        await running
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
    assert sink.stored == [b"e1", b"e7"]
