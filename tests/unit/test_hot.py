"""The hot path in C against the Python reference: the same events, the same frames, whatever the rows look like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay import hot
from relay.checkpoint import Sample, Snapshot
from relay.config import Outbox, Routing
from relay.errors import ProtocolError
from relay.event import Batch, Event, HeaderNames, Rejected, Transaction
from relay.lsn import LSN
from relay.outbox import Binding, Mapping
from relay.routing import Router
from relay.sink import nats_fence, nats_runs
from relay.sink.nats_chain import Chain
from relay.source import pgoutput
from tests.fakes import begin, commit, insert, keepalive, relation, xlog_data

OID = 16385
COLUMNS = [
    ("seq", 20),
    ("id", 2950),
    ("aggregate_type", 25),
    ("aggregate_id", 25),
    ("event_type", 25),
    ("topic", 25),
    ("partition_key", 25),
    ("note", 25),  # not ours
    ("payload", 3802),
    ("headers", 3802),
    ("created_at", 1184),
]
NOTHING = [None] * len(COLUMNS)
USUAL = [
    *(b"7", b"0192-id", b"order", b"k1", b"order.made", None, None, b"?", b'{"a":1}', None),
    b"2026-11-16 04:13:30.12+00",
]
pytestmark = pytest.mark.skipif(not hot.NATIVE, reason="the C part was not built: there is no C compiler")

texts = (
    st.none()
    | st.sampled_from([b"", b"order", b"\xc3\xa9", b"\xff", b'a"b', b"back\\slash", b"tab\t"])
    | st.binary(max_size=9)
)
cells = st.builds(
    lambda *values: list(values),
    st.none() | st.integers(-5, 1 << 63).map(lambda n: b"%d" % n),
    st.none() | st.uuids().map(lambda u: str(u).encode()) | st.just(b""),
    *[texts] * 6,
    st.none() | st.sampled_from([b"{}", b'{"n": 12345678901234567890}', b"null", b"[1]"]),
    st.none() | st.sampled_from([b"null", b"{}", b'{"trace": "x"}', b"[]"]),
    st.none()
    | st.sampled_from([USUAL[-1], b"infinity", b"2026-11-16 04:13:30.12+01", b"0044-03-15 12:00:00+00 BC", b"+00"]),
)
routings = st.sampled_from(
    [
        Routing(),
        Routing(topic="shop.{aggregate_type}", key="{id}"),
        Routing(topic="{topic}.{event_type}", fallback_topic="{aggregate_type}"),
        Routing(format="payload"),
        Routing(key="{aggregate_type}-{aggregate_id}"),
        Routing(headers=("id", "type")),
    ]
)


def mapping(columns: dict[str, str] | None = None) -> Mapping:
    outbox = Outbox.model_validate({"table": "public.outbox_events", "columns": columns or {}})
    return Mapping.of(outbox, 0, several=False)


class Decoded(NamedTuple):
    """What a decoder made of messages, and the state that it is in."""

    events: list[Event]
    rejected: list[Rejected]
    state: tuple[Any, ...] = ()
    refused: str = ""


def decode(
    messages: list[bytes],
    routing: Routing,
    table: Mapping,
    *,
    native: bool,
    at_once: int = 1000,
    skip: Sample | None = None,
) -> Decoded:
    def bind(name: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        if name == "public.other":
            return None
        binding = table.bind(columns)
        router = Router(routing, binding)
        if not native:
            router.recipe = None
        return router, binding

    decoder = pgoutput.PgoutputDecoder(start=LSN(0), skip=skip, bind=bind, stamp=b"r:")
    made = Decoded([], [])
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(pgoutput, "walk", None)
        for start in range(0, len(messages), at_once):
            try:
                made.events.extend(decoder.decode(messages[start : start + at_once], made.rejected))
            except ProtocolError as exc:
                return made._replace(refused=str(exc))
    state = (decoder.end, decoder.commit_lsn, decoder.transactions, decoder.skipped, decoder.reply_due)
    return made._replace(state=(*state, type(decoder.end), type(decoder.commit_lsn)))


def stream(rows: Sequence[list[bytes | None]]) -> list[bytes]:
    head = [xlog_data(relation(OID, "public", "outbox_events", COLUMNS)), xlog_data(begin(100, 700))]
    return [*head, *(xlog_data(insert(OID, row)) for row in rows), xlog_data(commit(100, 108))]


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(cells | st.just(USUAL), max_size=8), routing=routings, shared=st.booleans())
@example(rows=[USUAL, USUAL, NOTHING, USUAL], routing=Routing(), shared=False)
def test_the_same_events(rows: list[list[bytes | None]], routing: Routing, shared: bool) -> None:
    table = mapping({"partition_key": "aggregate_id"} if shared else None)
    native, reference = (decode(stream(rows), routing, table, native=is_native) for is_native in (True, False))
    assert native == reference
    for event in native.events:
        assert type(event) is Event
        assert type(event.transaction) is Transaction
        assert event.header_names is HeaderNames.of(event.header_names.names)


LSNS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x1_0000_00AB, (1 << 64) - 1]
lsns = st.sampled_from(LSNS) | st.integers(0, (1 << 64) - 1)
times = st.sampled_from([0, -1, 831_234_567_890_123, 1 << 53, -(1 << 53), (1 << 63) - 1]) | st.integers(0, 1 << 52)
begins = st.builds(begin, lsns, st.integers(0, (1 << 32) - 1), times)
commits = st.builds(commit, lsns, lsns, times)
inserts = st.builds(insert, st.sampled_from([OID, OID + 1, OID + 2, OID + 9]), st.just(USUAL) | cells)
tables = st.builds(
    relation,
    st.sampled_from([OID, OID + 1, OID + 2]),
    st.just("public"),
    st.sampled_from(["outbox_events", "other"]),
    st.sampled_from([COLUMNS, COLUMNS[::-1]]),
)
transactions = st.builds(lambda one, rows, other: [one, *rows, other], begins, st.lists(inserts, max_size=3), commits)
pieces = st.one_of(
    transactions.map(lambda some: [xlog_data(each) for each in some]),
    st.one_of(begins, commits, inserts, tables, st.just(b"Y"), st.binary(max_size=30)).map(
        lambda one: [xlog_data(one)]
    ),
    st.builds(lambda end, reply: [keepalive(end, reply=reply)], lsns, st.booleans()),
    st.binary(max_size=3).map(lambda one: [one]),
)
samples = st.none() | st.builds(lambda lsn: Sample(Snapshot(1 << 20, 1 << 30), LSN(lsn)), lsns)


@settings(max_examples=300, deadline=None)
@given(some=st.lists(transactions, max_size=6), others=st.lists(pieces, max_size=4), skip=samples, data=st.data())
def test_whole_sessions_are_walked_alike(
    some: list[list[bytes]], others: list[list[bytes]], skip: Sample | None, data: st.DataObject
) -> None:
    messages = [xlog_data(relation(OID + n, "public", name, COLUMNS)) for n, name in enumerate(["a", "b", "other"])]
    parts = data.draw(st.permutations([*([xlog_data(each) for each in one] for one in some), *others]))
    messages += [message for part in parts for message in part]
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(messages) - 1))
        messages[place] = messages[place][: data.draw(st.integers(0, len(messages[place])))]
    at_once = data.draw(st.integers(1, 8))
    native, reference = (
        decode(messages, Routing(), mapping(), native=is_native, at_once=at_once, skip=skip)
        for is_native in (True, False)
    )
    assert native == reference


def test_usual_transactions_are_walked_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison above would compare Python with Python."""
    one = [xlog_data(begin(100, 700)), xlog_data(insert(OID, USUAL)), xlog_data(commit(100, 108))]
    slow: list[str] = []

    def count(name: str, whole: Callable[..., Any]) -> None:
        def counted(*args: Any) -> Any:
            slow.append(name)
            return whole(*args)

        monkeypatch.setattr(pgoutput, name, counted)

    for name in ("decode_begin", "decode_insert", "decode_commit"):
        count(name, getattr(pgoutput, name))
    made = decode([*stream([USUAL]), *one * 20], Routing(), mapping(), native=True)
    assert len(made.events) == 21
    assert slow == ["decode_insert"]  # the first row: its topic was not known


@settings(max_examples=300, deadline=None)
@given(row=cells | st.just(USUAL), data=st.data())
def test_what_is_corrupt_is_refused_alike(row: list[bytes | None], data: st.DataObject) -> None:
    messages = stream([USUAL, USUAL, row])
    whole = messages[-2]
    cut = data.draw(st.integers(1, len(whole) - 26))
    place, value = data.draw(st.integers(26, len(whole) - 1)), data.draw(st.integers(0, 255))
    for broken in (whole[:-cut], whole + b"x", whole[:place] + bytes([value]) + whole[place + 1 :]):
        outcomes = [
            decode([*messages[:-2], broken, messages[-1]], Routing(), mapping(), native=native)
            for native in (True, False)
        ]
        assert outcomes[0] == outcomes[1]


def test_bad_arguments_are_refused() -> None:
    recipe = Router(Routing(), mapping().bind(COLUMNS)).recipe
    assert recipe is not None
    binding = mapping().bind(COLUMNS)
    walk = hot.walk
    assert walk is not None
    good: list[Any] = [[], 0, {}, Transaction, b"", None, 0, [], []]
    assert walk(*good) == (0, None, 0, None, None)
    bad: list[Any] = [(), "0", [], Event(*[b""] * 9), "", Transaction(1, 2, 3.0, ""), None, (), ()]  # type: ignore[arg-type]
    for place, value in enumerate(bad):
        with pytest.raises(TypeError):
            walk(*good[:place], value, *good[place + 1 :])
    with pytest.raises(TypeError):
        walk()
    reader = hot.reader(OID, binding, recipe)
    assert reader is not None
    with pytest.raises(TypeError):  # it is not of wal2json
        reader.read([], 0, Transaction(1, 2, 3.0, b""), b"", 0, [])
    assert hot.reader(OID, binding, recipe._replace(id=99)) is None
    assert hot.reader(OID, binding, recipe._replace(topic_places=(99,))) is None
    assert hot.reader(OID, binding, recipe._replace(values=(99,))) is None
    assert hot.reader(OID, binding, recipe._replace(body=((b"", 99, 0),))) is None


# ------------------------------------------------------------------------------------------------------------- frames


class Wire:
    """A connection that keeps what is written."""

    joins = True
    inbox = b"_INBOX.x"
    max_payload = 3000

    def __init__(self) -> None:
        self.out = b""

    def send(self, frames: list[tuple[bytes, ...]]) -> None:
        self.out += b"".join(b"".join(frame) for frame in frames)

    def abort(self) -> None:
        self.out = b"aborted"


NAMES = [
    HeaderNames.of(("id", "type")),
    HeaderNames.of(("id", "type", "x-trace")),
    HeaderNames.of(("bad name", "type")),
]
values = st.binary(max_size=6) | st.sampled_from([b"a\nb", b"\0", b"v" * 2900])
events = st.builds(
    lambda number, topic, names, value, body: Event(
        b"id-%d" % number,
        topic,
        None,
        names,
        (b"id-%d" % number, value, b"t")[: len(names.names)],
        body,
        "public.o",
        Transaction(1, 2, 3.0, b""),
        0,
    ),
    st.integers(0, 999),
    st.sampled_from(["a.x", "a.y", "b.x", "no subject"]),
    st.sampled_from(NAMES),
    values,
    st.none() | st.binary(max_size=40) | st.just(b"b" * 2990),
)


def usual_event(number: int) -> Event:
    return Event(b"id-%d" % number, "a.x", None, NAMES[0], (b"1", b"t"), b"{}", "o", Transaction(1, 2, 3.0, b""), 0)


async def published(made: list[Event], sent: int, *, with_ids: bool, quiet: int) -> tuple[bytes, Any, Any]:
    wire = Wire()
    homes = {name: type("Home", (), {"name": name}) for name in "ab"}
    window = nats_fence.FencedWindow(wire, lambda topic: homes[topic[0]], ack_timeout=9, careful=False)  # type: ignore[arg-type,return-value]
    chains = [Chain("a", sent, []), Chain("b", 5, [])]
    chains[0].quiet = sent + quiet
    window.begin(chains, with_ids=with_ids, dedupes=True, uncountable=False)
    flight = window.submit(Batch(made, LSN(1)))
    asked = [(token, asked.answers, asked.events, asked.seq) for token, asked in window._waiting.items()]
    left = (flight.rejected, flight.remaining, asked, [chain.sent for chain in chains])
    out = wire.out
    if not flight.future.done():
        flight.future.cancel()
    if window._timer is not None:
        window._timer.cancel()
    return out, left, flight.marks


@settings(max_examples=300, deadline=None)
@given(
    made=st.lists(events, max_size=8),
    sent=st.sampled_from([0, 7, 97, 99, 999_998]),
    with_ids=st.booleans(),
    quiet=st.integers(0, 9),
)
def test_the_same_frames(made: list[Event], sent: int, with_ids: bool, quiet: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (nats_fence, nats_runs):
            patch.setattr(module, "RUN", 3)
        native = asyncio.run(published(made, sent, with_ids=with_ids, quiet=quiet))
        patch.setattr(nats_fence, "quick_frames", None)
        assert asyncio.run(published(made, sent, with_ids=with_ids, quiet=quiet)) == native


@pytest.mark.parametrize("native", [True, False])
def test_one_answer_speaks_for_a_run(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where nobody else can write on; before that each event has its own."""
    made = [usual_event(number) for number in range(250)]
    if not native:
        monkeypatch.setattr(nats_fence, "quick_frames", None)
    out, (_, remaining, asked, _), _ = asyncio.run(published(made, 7, with_ids=True, quiet=100))
    assert out.count(b"HPUB a.x _INBOX.x.") == 102
    assert (remaining, asked) == (250, [(b"1", 100, 1, 0), (b"2", 1, 100, 207), (b"3", 1, 50, 257)])
