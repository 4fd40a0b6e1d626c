"""Walsender bytes → batches: the decoder and the stream source together, with a scripted walsender.

What real servers send is in integration; here are the orders, cuts and corruptions that no server sends on demand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.checkpoint import Sample, Snapshot
from relay.config import Outbox, Routing
from relay.errors import ContractError, ProtocolError, RelayError, SourceUnavailable
from relay.event import Batch
from relay.lsn import LSN
from relay.outbox import Binding, mappings
from relay.progress import Progress
from relay.routing import Router
from relay.source.pgoutput import PgoutputDecoder
from relay.source.stream import StreamSource
from tests.fakes import ScriptedWalSender, TricklingWalSender, begin, commit, insert, keepalive, relation, xlog_data

OURS, SECOND, FOREIGN = 16385, 16390, 16400
COLUMNS = [
    ("seq", 20),
    ("id", 2950),
    ("aggregate_type", 25),
    ("aggregate_id", 25),
    ("event_type", 25),
    ("topic", 25),
    ("partition_key", 25),
    ("payload", 3802),
    ("headers", 3802),
    ("created_at", 1184),
]
TABLES = mappings([Outbox(table="public.outbox_events"), Outbox(table="shop.second")])
ANNOUNCE = xlog_data(relation(OURS, "public", "outbox_events", COLUMNS))


def bind(table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
    for mapping in TABLES:
        if mapping.table == table:
            binding = mapping.bind(columns)
            return Router(Routing(), binding), binding
    return None


def row(number: int, oid: int = OURS) -> bytes:
    cells = [b"%d" % number, b"id-%d" % number, b"order", b"k", b"made", None, None, b"{}", None, None]
    return xlog_data(insert(oid, cells))


def transaction(xid: int, lsn: int, rows: Sequence[bytes]) -> list[bytes]:
    """Commit record at `lsn`, its end 8 bytes later."""
    return [xlog_data(begin(lsn, xid)), *rows, xlog_data(commit(lsn, lsn + 8))]


def make(
    chunks: Sequence[Sequence[bytes]],
    *,
    start: int = 0,
    skip: Sample | None = None,
    limit: int = 500,
    silent: bool = False,
    sender: type[ScriptedWalSender] = ScriptedWalSender,
) -> tuple[StreamSource, ScriptedWalSender, Progress]:
    wal = sender(chunks, silent=silent)
    decoder = PgoutputDecoder(start=LSN(start), skip=skip, bind=bind, stamp=b"r:")
    progress = Progress()
    return StreamSource(wal, decoder, progress, max_batch_events=limit, silence=1.0), wal, progress


async def drain(source: StreamSource) -> list[Batch]:
    """All batches until the script is over."""
    batches: list[Batch] = []
    try:
        async for batch in source.batches():
            batches.append(batch)  # noqa: PERF401  the end is an exception
    except SourceUnavailable as exc:
        assert str(exc) == "the script is over"  # noqa: PT017
    return batches


def ids(batches: Sequence[Batch]) -> list[bytes]:
    return [event.id for batch in batches for event in batch.events]


async def test_rows_become_events_with_their_transaction_and_place() -> None:
    source, _, progress = make([[ANNOUNCE, *transaction(700, 0x1_0000_0010, [row(1), row(2)])]])
    (batch,) = await drain(source)
    assert ids([batch]) == [b"id-1", b"id-2"]
    assert batch.end_lsn == 0x1_0000_0018
    assert [event.ordinal for event in batch.events] == [0, 1]
    assert dict(batch.events[1].headers())["relay-position"] == b"r:1/10:1"
    assert (progress.received_events, progress.received_transactions, progress.received_lsn) == (2, 1, batch.end_lsn)


async def test_several_tables_and_tables_that_are_not_ours() -> None:
    messages = [
        xlog_data(begin(100, 700)),
        ANNOUNCE,
        row(1),
        xlog_data(relation(SECOND, "shop", "second", COLUMNS)),
        row(2, SECOND),
        xlog_data(relation(FOREIGN, "public", "orders", [("id", 20)])),
        xlog_data(insert(FOREIGN, [b"9"])),
        row(3),
        xlog_data(commit(100, 108)),
    ]
    source, *_ = make([messages])
    (batch,) = await drain(source)
    assert [(event.table, event.ordinal) for event in batch.events] == [
        ("public.outbox_events", 0),
        ("shop.second", 1),
        ("public.outbox_events", 2),
    ]


async def test_a_transaction_that_begins_like_the_one_before_is_awaited() -> None:
    """It has fewer rows so far: the rest is on its way, and travels in the same batch."""
    whole = [ANNOUNCE, *transaction(700, 100, [row(1), row(2), row(3)])]
    again = transaction(701, 200, [row(4), row(5), row(6)])
    source, _, progress = make([whole, again[:2], again[2:]], sender=TricklingWalSender)
    first, second = await drain(source)
    assert (ids([first]), ids([second])) == ([b"id-1", b"id-2", b"id-3"], [b"id-4", b"id-5", b"id-6"])
    assert second.end_lsn == progress.received_lsn == 208
    assert second.size_bytes == sum(map(len, again))
    assert [count for *_, count in second.transactions] == [3]


@pytest.mark.parametrize("rows", [1, 2])
async def test_a_transaction_that_has_as_many_rows_as_the_one_before_is_not_awaited(rows: int) -> None:
    """So a row that comes alone, as the ones before it did, is handed on at once."""
    whole = [ANNOUNCE, *transaction(700, 100, [row(n) for n in range(rows)])]
    again = transaction(701, 200, [row(n + rows) for n in range(rows + 1)])
    source, *_ = make([whole, again[:-2], again[-2:]], sender=TricklingWalSender)
    assert [len(batch.events) for batch in await drain(source)] == [rows, rows, 1]


async def test_what_is_awaited_in_vain_is_handed_on() -> None:
    whole = [ANNOUNCE, *transaction(700, 100, [row(1), row(2)])]
    source, *_ = make([whole, [xlog_data(begin(200, 701)), row(3)], [xlog_data(commit(200, 208))]])
    assert [(ids([batch]), int(batch.end_lsn)) for batch in await drain(source)] == [
        ([b"id-1", b"id-2"], 108),
        ([b"id-3"], 108),
        ([], 208),
    ]


def sent(message: bytes, lsn: int, seconds: float) -> bytes:
    return xlog_data(message, lsn, int(seconds * 1_000_000))


class Asked(TricklingWalSender):
    """Counts who waits until the socket is readable, and how often it is to be kept small."""

    asked = narrowed = 0

    def narrow(self) -> None:
        self.narrowed += 1

    async def readable(self, timeout: float) -> bool:
        self.asked += 1
        return await super().readable(timeout)


def in_turn(late: Sequence[float]) -> list[list[bytes]]:
    """Chunks of a transaction each, sent so many seconds after its commit."""
    chunks = [
        [sent(begin(100 * n, 700 + n), 100 * n, late[n]), row(n), sent(commit(100 * n, 100 * n + 8), 100 * n, late[n])]
        for n in range(len(late))
    ]
    return [[ANNOUNCE, *chunks[0]], *chunks[1:]]


async def test_a_backlog_fills_the_socket_while_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the socket has nothing even so: then it is over, and the next row is taken when it comes."""
    monkeypatch.setattr("relay.source.stream._GULP", 0)
    source, wal, _ = make(in_turn([60, 60, 0.7, 0.7]), sender=Asked)
    assert isinstance(wal, Asked)
    seen = [(ids([batch]), wal.asked) async for batch in _each(source)]
    assert seen == [([b"id-0"], 0), ([b"id-1"], 0), ([b"id-2"], 0), ([b"id-3"], 0)]
    assert wal.asked == 1  # the gulp after the last one was empty


async def test_in_a_backlog_the_socket_is_kept_small_also_while_it_always_has_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel opens its window again between two looks."""
    monkeypatch.setattr("relay.source.stream._GULP", 0)
    source, wal, _ = make([[each for chunk in in_turn([60, 60, 60]) for each in chunk]], limit=4, sender=Asked)
    assert isinstance(wal, Asked)
    looks = [wal.narrowed async for _ in _each(source)]
    assert looks == list(range(len(looks))) and len(looks) > 2


async def test_what_is_sent_soon_after_its_commit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.source.stream._GULP", 3600)
    source, wal, _ = make(in_turn([0, 0.4, 0.1]), sender=Asked)
    assert isinstance(wal, Asked)
    assert [(ids([batch]), wal.asked) async for batch in _each(source)] == [
        ([b"id-0"], 0),
        ([b"id-1"], 1),
        ([b"id-2"], 2),
    ]
    assert wal.narrowed == 0


async def _each(source: StreamSource) -> AsyncIterator[Batch]:
    with suppress(SourceUnavailable):
        async for batch in source.batches():
            yield batch


async def test_the_beginning_of_a_transaction_alone_is_nothing_to_hand_on() -> None:
    begun, *rest = transaction(700, 100, [row(1)])
    alive = keepalive(50)
    source, _, progress = make([[ANNOUNCE], [alive], [alive], [begun], rest, [keepalive(150)]])
    assert [(ids([batch]), int(batch.end_lsn)) for batch in await drain(source)] == [
        ([], 50),
        ([b"id-1"], 108),
        ([], 150),
    ]
    assert progress.received_lsn == 150


async def test_a_batch_stays_within_its_cap_when_the_rest_is_awaited() -> None:
    whole = [ANNOUNCE, *transaction(700, 100, [row(n) for n in range(9)])]
    again = transaction(701, 200, [row(n) for n in range(10, 19)])
    source, *_ = make([whole, again[:4], again[4:]], limit=6, sender=TricklingWalSender)
    batches = await drain(source)
    assert len(ids(batches)) == 18
    assert max(len(batch.events) for batch in batches) <= 6


async def test_unknown_messages_are_not_ours() -> None:
    """Types, origins, truncates, logical messages, and what is yet to be invented."""
    strange = [xlog_data(kind + b"anything at all") for kind in (b"Y", b"O", b"T", b"M", b"U", b"D", b"z", b"\xff")]
    source, *_ = make([[*strange, ANNOUNCE, *transaction(700, 100, [*strange, row(1), *strange])]])
    assert ids(await drain(source)) == [b"id-1"]


async def test_a_relation_that_is_announced_anew_is_read_anew() -> None:
    wider = [("extra", 25), *COLUMNS]
    new_row = xlog_data(insert(OURS, [b"new", b"2", b"id-2", b"order", b"k", b"made", None, None, b"{}", None, None]))
    source, *_ = make(
        [
            [ANNOUNCE, *transaction(700, 100, [row(1)])],
            [xlog_data(relation(OURS, "public", "outbox_events", wider)), *transaction(701, 200, [new_row])],
        ]
    )
    assert ids(await drain(source)) == [b"id-1", b"id-2"]


async def test_a_renamed_column_stops_the_relay() -> None:
    renamed = [(name if name != "payload" else "body", oid) for name, oid in COLUMNS]
    source, *_ = make([[ANNOUNCE, xlog_data(relation(OURS, "public", "outbox_events", renamed))]])
    with pytest.raises(ContractError, match="no column payload"):
        await drain(source)


async def test_a_row_that_cannot_be_an_event_is_handed_on_as_rejected_in_its_place() -> None:
    nameless = xlog_data(insert(OURS, [b"2", None, b"order", b"k", b"made", None, None, b"{}", None, None]))
    source, _, progress = make([[ANNOUNCE, *transaction(700, 100, [row(1), nameless, row(3)])]])
    (batch,) = await drain(source)
    assert ids([batch]) == [b"id-1", b"id-3"]
    assert [(event.ordinal, "id" in reason) for event, reason in batch.rejected] == [(1, True)]
    assert progress.received_events == 3


@pytest.mark.parametrize(
    "messages",
    [
        [row(1)],  # not announced
        [ANNOUNCE, row(1)],  # outside of a transaction
        [ANNOUNCE, *transaction(700, 100, [row(1)]), row(2)],
        [b"x"],
        [b"k" + bytes(16)],
        [b"k" + bytes(18)],
    ],
)
async def test_what_makes_no_sense_stops_the_relay(messages: list[bytes]) -> None:
    source, *_ = make([messages])
    with pytest.raises(ProtocolError):
        await drain(source)


@pytest.mark.parametrize("limit", [1, 500])
async def test_every_truncation_of_every_message_is_refused(limit: int) -> None:
    whole = [ANNOUNCE, *transaction(700, 100, [row(1)]), keepalive(200)]
    for place, message in enumerate(whole):
        for length in range(1, len(message)):  # libpq has no empty CopyData
            source, *_ = make([[*whole[:place], message[:length]]], limit=limit)
            with pytest.raises(ProtocolError):
                await drain(source)


@settings(max_examples=250)
@given(st.data())
async def test_corruption_never_escapes_as_anything_but_our_errors(data: st.DataObject) -> None:
    whole = [ANNOUNCE, *transaction(700, 100, [row(1), row(2)]), keepalive(200)]
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole[place])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    source, *_ = make([[*whole[:place], bytes(damaged), *whole[place + 1 :]]])
    with suppress(RelayError):
        await drain(source)


async def test_a_silent_server_is_a_lost_one() -> None:
    source, *_ = make([[keepalive(100)]], silent=True)
    with pytest.raises(SourceUnavailable, match="silent"):
        async for _ in source.batches():
            pass


async def test_postgres_gets_an_answer_when_it_asks_and_learns_only_what_was_confirmed() -> None:
    source, wal, _ = make([[keepalive(100)], [keepalive(200, reply=True)], [keepalive(300)]], start=50)
    await drain(source)
    assert wal.statuses == [(200, 50, False)]
    await source.confirm(LSN(250))
    assert wal.statuses[-1] == (300, 250, False)
    await source.confirm(LSN(240))  # never back
    assert len(wal.statuses) == 2


@pytest.mark.guarantee("G7")
async def test_keepalives_move_the_end_of_an_idle_outbox() -> None:
    source, *_ = make([[keepalive(100)], [keepalive(90)], [keepalive(300)]])
    assert [(batch.events, batch.end_lsn) for batch in await drain(source)] == [([], 100), ([], 300)]


Step = tuple[int, list[bool], int]


@pytest.mark.guarantee("G1")
@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.booleans(), max_size=3), st.integers(0, 20)), max_size=8),
    st.lists(st.integers(1, 9), min_size=1),
    st.integers(1, 7),
)
async def test_a_batch_never_closes_a_transaction_that_is_not_all_in(
    steps: list[Step], cuts: list[int], limit: int
) -> None:
    """However the stream is cut: restarting from any batch's end brings every event that was not handed on by then."""
    messages, expected, lsn, closed = [ANNOUNCE], [], 1000, 0
    for number, (rows, pings, gap) in enumerate(steps):
        commit_at = lsn + 100
        inside: list[bytes] = []
        for index in range(rows):
            event_id = b"id-%d" % (number * 100 + index)
            expected.append((event_id, commit_at, index))
            inside.append(row(number * 100 + index))
            # Inside a transaction Postgres names the end of the last record before the commit.
            inside += [keepalive(commit_at - 1) for ping in pings[:index] if ping]
        messages += transaction(700 + number, commit_at, inside)
        closed, lsn = commit_at + 8, commit_at + 8 + gap
        if any(pings):
            messages.append(keepalive(lsn))
            closed = lsn
    chunks, rest, turn = [], messages, 0
    while rest:
        size = cuts[turn % len(cuts)]
        chunks.append(rest[:size])
        rest, turn = rest[size:], turn + 1
    source, *_ = make(chunks, limit=limit)
    batches = await drain(source)
    handed = [(event.id, event.transaction.commit_lsn, event.ordinal) for batch in batches for event in batch.events]
    assert handed == expected
    assert all(earlier.end_lsn <= later.end_lsn for earlier, later in pairwise(batches))
    count = 0
    for batch in batches:
        count += len(batch.events)
        assert len(batch.events) <= limit
        # Postgres sends again what has its commit record at or after the confirmed LSN.
        assert all(commit_at >= batch.end_lsn for _, commit_at, _ in expected[count:])
    assert (batches[-1].end_lsn if batches else 0) == closed


@pytest.mark.guarantee("G5")
async def test_transactions_that_the_snapshot_sees_are_skipped_until_its_lsn() -> None:
    epoch = 5 << 32
    # In the snapshot 704 was running still; 32-bit ids are of its epoch.
    skip = Sample(Snapshot(epoch + 704, epoch + 706, frozenset({epoch + 704})), LSN(1000))
    source, _, progress = make(
        [
            [
                ANNOUNCE,
                *transaction(703, 100, [row(1), row(2)]),
                *transaction(704, 200, [row(3)]),
                *transaction(706, 300, [row(4)]),
                *transaction(705, 400, [row(5)]),  # skipped, right before the end of skipping
                *transaction(707, 1000, [row(6)]),
                *transaction(703, 1100, [row(7)]),  # the same 32 bits, an epoch later: past the LSN nothing is skipped
            ]
        ],
        skip=skip,
    )
    (batch,) = await drain(source)
    assert ids([batch]) == [b"id-3", b"id-4", b"id-6", b"id-7"]
    assert progress.skipped_events == 3
    assert batch.end_lsn == 1108


@given(st.integers(1, 5))
async def test_skipping_survives_a_cut_inside_the_transaction(limit: int) -> None:
    skip = Sample(Snapshot(800, 800), LSN(1000))
    messages = [
        ANNOUNCE,
        *transaction(700, 100, [row(n) for n in range(5)]),
        *transaction(800, 200, [row(n) for n in range(5, 9)]),
    ]
    source, *_ = make([messages], skip=skip, limit=limit)
    batches = await drain(source)
    assert ids(batches) == [b"id-%d" % n for n in range(5, 9)]
    assert [event.ordinal for batch in batches for event in batch.events] == [0, 1, 2, 3]


async def test_counters_of_a_new_session_do_not_go_back() -> None:
    first, _, progress = make([[ANNOUNCE, *transaction(700, 100, [row(1)])]])
    await drain(first)
    wal = ScriptedWalSender([[ANNOUNCE, *transaction(701, 200, [row(2)])]])
    decoder = PgoutputDecoder(start=LSN(108), skip=None, bind=bind, stamp=b"r:")
    await drain(StreamSource(wal, decoder, progress, max_batch_events=10, silence=1.0))
    assert (progress.received_events, progress.received_transactions) == (2, 2)
