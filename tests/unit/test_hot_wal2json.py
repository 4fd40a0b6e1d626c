"""wal2json's rows in C against the Python reference: the same events, whatever the rows look like. See test_hot.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay import hot
from relay.checkpoint import Sample, Snapshot
from relay.config import Routing
from relay.errors import RelayError
from relay.event import Event, HeaderNames, Rejected
from relay.lsn import LSN
from relay.outbox import Binding, Mapping
from relay.routing import Router
from relay.source.wal2json import Catalogue, Wal2jsonDecoder
from tests.fakes import keepalive, left_to_python, xlog_data
from tests.unit import test_hot
from tests.unit.test_hot import mapping, routings

COLUMNS = [*test_hot.COLUMNS[:8], ("amount", 1700), *test_hot.COLUMNS[8:]]  # with one more that is not ours
NOTE, AMOUNT, PAYLOAD, HEADERS = 7, 8, 9, 10
Values = list[bytes]  # of a row, as JSON
USUAL: Values = [
    *(b"7", b'"0192-id"', b'"order"', b'"k1"', b'"order.made"', b"null", b"null", b'"?"', b"1.50"),
    *(rb'"{\"a\":1,\"b\":\"c\\nd\"}"', b"null", b'"2026-11-16 04:13:30.12+00"'),
]
TIME = b"2026-11-16 04:13:30.2+00"
pytestmark = pytest.mark.skipif(not hot.NATIVE, reason="the C part was not built: there is no C compiler")


def quoted(text: str) -> bytes:
    """As Postgres' escape_json writes it."""
    return json.dumps(text, ensure_ascii=False).encode()


def changed(place: int, value: bytes) -> Values:
    return [*USUAL[:place], value, *USUAL[place + 1 :]]


texts = st.sampled_from(
    [
        *(b'""', b"null", b"true", b"false", b'"order"', b"12", b"-0", b'"\xc3\xa9"', b'"\x7f"'),
        *(rb'"\u0001"', rb'"\u00e9"', rb'"\/"', rb'"a\"b\\c\b\f\n\r\t"'),
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=9).map(quoted)
numbers = (
    st.sampled_from([b"null", b"0", b"-0", b"-1", b"1e5", b"1E+99", b"-1.50e-7", b"-0.0"])
    | st.integers(-(1 << 64), 1 << 65).map(lambda n: b"%d" % n)
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda n: repr(n).encode())
)
documents = st.sampled_from(["{}", '{"n": 12345678901234567890}', '{"é": "\\u0001"}', "null", "[1]"]).map(quoted)
rows = st.builds(
    lambda *values: list(values),
    numbers,
    st.uuids().map(lambda u: b'"%b"' % str(u).encode()) | st.sampled_from([b"null", b'""', b"true"]),
    *[texts] * 6,
    numbers,
    documents | st.just(b"null") | texts,
    st.just(b"null") | documents,
    st.sampled_from([USUAL[-1], b"null", b'"infinity"', b'"2026-11-16 04:13:30.12+01"', b'"+00"']),
) | st.builds(changed, st.integers(1, NOTE), texts)  # most of the others have something that C declines
broken = (  # most of these at least: orjson must refuse them, so C must not take them
    st.sampled_from(
        [b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\x80"', rb'"\ud800"', rb'"\x"', b'"\x01"', b'"a', b"nul", b"truE"]
    )
    | st.sampled_from(
        [b"007", b"1.", b".5", b"1e", b"1e+", b"1e400", b"1" + b"0" * 400, b"-", b"+1", b"", b"{}", b"[", b"NaN"]
    )
    | st.decimals(allow_nan=False, allow_infinity=False).map(lambda n: str(n).encode())
    | st.binary(max_size=6).map(lambda raw: b'"%b"' % raw)
)


def insert(table: str, columns: Sequence[tuple[str, int]], values: Values, xid: int = 700) -> bytes:
    """Byte for byte what wal2json sends."""
    described = b",".join(
        b'{"name":%b,"typeoid":%d,"value":%b}' % (quoted(name), oid, value)
        for (name, oid), value in zip(columns, values, strict=True)
    )
    head = b'{"action":"I","xid":%d,"timestamp":"%b","lsn":"0/1A2B3C"' % (xid, TIME)
    return xlog_data(b'%b,"schema":"public","table":%b,"columns":[%b]}' % (head, quoted(table), described))


def row(values: Values) -> bytes:
    return insert("outbox_events", COLUMNS, values)


def frame(action: bytes, lsn: int, xid: int = 700) -> bytes:
    text = b'{"action":"%b","xid":%d,"timestamp":"%b","lsn":"0/%X","nextlsn":"0/%X"}' % (
        action,
        xid,
        TIME,
        lsn,
        lsn + 8,
    )
    return xlog_data(text, lsn + 8)


def transaction(*messages: bytes, lsn: int = 0x100, xid: int = 700) -> list[bytes]:
    return [frame(b"B", lsn, xid), *messages, frame(b"C", lsn, xid)]


def decode(
    messages: list[bytes],
    routing: Routing | None = None,
    table: Mapping | None = None,
    *,
    native: bool,
    skip: Sample | None = None,
) -> Any:
    """Everything that a decoder has to say: also when it refuses."""
    ours = table or mapping()

    def bind(name: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        if name != ours.table:
            return None
        binding = ours.bind(columns)
        router = Router(routing or Routing(), binding)
        if not native:
            router.recipe = None
        return router, binding

    leaves = {"public.part": ours.table, "public.q'\"é": ours.table}
    catalogue = Catalogue(LSN(0), leaves, frozenset(), ())
    decoder = Wal2jsonDecoder(catalogue=catalogue, start=LSN(0), skip=skip, bind=bind, stamp=b"r:")
    rejected: list[Rejected] = []
    try:
        events = decoder.decode(messages[:3], rejected) + decoder.decode(messages[3:], rejected)
    except RelayError as exc:
        return type(exc), str(exc)
    return events, rejected, decoder.end, decoder.transactions, decoder.skipped


def alike(messages: list[bytes], *args: Any, **options: Any) -> Any:
    native, reference = (decode(messages, *args, native=is_native, **options) for is_native in (True, False))
    assert native == reference
    return native


@settings(max_examples=400, deadline=None)
@given(made=st.lists(rows | st.just(USUAL), max_size=6), routing=routings, shared=st.booleans())
@example(made=[USUAL, USUAL, [b"null"] * len(COLUMNS), USUAL], routing=Routing(), shared=False)
def test_the_same_events(made: list[Values], routing: Routing, shared: bool) -> None:
    table = mapping({"partition_key": "aggregate_id"} if shared else None)
    messages = transaction(row(USUAL), *map(row, made), row(USUAL))
    outcome = alike(messages, routing, table)
    for event in outcome[0] if isinstance(outcome[0], list) else ():
        assert type(event) is Event
        assert event.header_names is HeaderNames.of(event.header_names.names)


@settings(max_examples=400, deadline=None)
@given(value=texts | numbers | documents | broken, place=st.integers(0, len(COLUMNS) - 1), routing=routings)
def test_every_value_in_every_column(value: bytes, place: int, routing: Routing) -> None:
    """Else a value that C must not take is seldom the only unusual one of its row."""
    alike(transaction(row(USUAL), row(changed(place, value)), row(USUAL)), routing)


def test_usual_rows_are_read_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = left_to_python(monkeypatch)
    usual = [
        USUAL,
        changed(0, b"9223372036854775807"),
        changed(3, b"true"),
        changed(NOTE, quoted('é"\\\b\f\n\r\t/')),
        changed(AMOUNT, b"-0.1e+30"),
        changed(PAYLOAD, quoted('{"é": "\\n\\u0001 \\" \\\\ 日本"}')),
        changed(PAYLOAD, quoted("x" * 3_000_000)),
        changed(PAYLOAD, b'""'),
    ]
    messages = [message for lsn in (0x100, 0x200) for message in transaction(*map(row, usual), lsn=lsn)]
    events, rejected, *_ = decode(messages, native=True)
    assert (len(events), rejected) == (16, [])
    assert slow == [row(USUAL)]  # the first one: its table, and then its topic, were not known
    assert decode(messages, native=False)[0] == events


def test_tables_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = left_to_python(monkeypatch)
    tables = ["outbox_events", "part", "q'\"é", "part", "another"]
    messages = transaction(*(insert(table, COLUMNS, USUAL) for table in tables * 3), keepalive(0x90))
    events, *_ = decode(messages, native=True)
    assert [event.ordinal for event in events] == list(range(12))
    assert len(slow) == 6  # the first of each table, and the table that is not ours every time
    alike(messages)


def test_a_table_is_altered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever column changed: its rows are read in C again from the second one on."""
    renamed = [("remark" if name == "note" else name, oid) for name, oid in COLUMNS]
    retyped = [(name, 1043 if name == "note" else oid) for name, oid in COLUMNS]
    moved = [*COLUMNS[::-1]]
    fewer = [COLUMNS[place] for place in range(len(COLUMNS)) if place != NOTE]
    bigger = [(name, 1700 if name == "aggregate_id" else oid) for name, oid in COLUMNS]  # not for C
    messages = transaction(
        *[row(USUAL)] * 5,
        *[insert("outbox_events", renamed, USUAL)] * 5,
        *[insert("outbox_events", retyped, USUAL)] * 5,
        *[insert("outbox_events", moved, USUAL[::-1])] * 5,
        *[insert("outbox_events", fewer, USUAL[:NOTE] + USUAL[NOTE + 1 :])] * 5,
        *[insert("outbox_events", bigger, changed(3, b"1.50"))] * 5,
        *[row(USUAL)] * 5,
    )
    slow = left_to_python(monkeypatch)
    events, *_ = decode(messages, native=True)
    assert [event.ordinal for event in events] == list(range(35))
    assert events[27].key == b"1.50"
    assert len(slow) == 6 + 5
    alike(messages)


def test_rows_that_are_skipped_are_not_read() -> None:
    skip = Sample(Snapshot.parse("5:9:8"), LSN(0x150))
    first, second, third = (
        transaction(row(USUAL), row(USUAL), lsn=lsn, xid=xid) for lsn, xid in ((0x100, 8), (0x110, 7), (0x160, 6))
    )
    events, _, _, transactions, skipped = alike([*first, *second, *third], skip=skip)
    assert ([event.transaction.xid for event in events], skipped) == ([8, 8, 6, 6], 2)
    assert transactions == [(0x100, 8, 2), (0x160, 6, 2)]


def test_a_row_outside_of_a_transaction_is_refused() -> None:
    _, reason = alike([*transaction(row(USUAL), row(USUAL)), row(USUAL)])
    assert "outside of a transaction" in reason


@settings(max_examples=400, deadline=None)
@given(values=rows | st.just(USUAL), data=st.data())
def test_what_is_corrupt_is_refused_alike(values: Values, data: st.DataObject) -> None:
    whole = row(values)
    cut = data.draw(st.integers(1, len(whole) - 26))
    place = data.draw(st.integers(26, len(whole) - 1))
    byte = data.draw(st.integers(0, 255) | st.sampled_from(b'"\\{}[],:0nt '))
    spoilt = [
        whole[:-cut],
        *(whole + more for more in (b"x", b" ", b"}", b"\0")),
        whole[:place] + bytes([byte]) + whole[place + 1 :],
        whole[:place] + bytes([byte]) + whole[place:],
        whole[:place] + whole[place + 1 :],
    ]
    for broken in spoilt:
        alike(transaction(row(USUAL), row(USUAL), broken, row(USUAL)))


@pytest.mark.parametrize(
    "layout",
    [
        lambda usual: usual.replace(b',"lsn":"0/1A2B3C"', b""),
        lambda usual: usual.replace(b'"columns":[', b'"columns": ['),
        lambda usual: usual.replace(b'"xid":700', b'"xid":700,"origin":0'),
        lambda usual: usual.replace(b"}]}", b'}],"pk":[]}'),
        lambda usual: usual.replace(b'"value":7}', b'"value":7,"value":8}'),
        lambda usual: usual.replace(b'"name":"id"', b'"name":"seq"'),  # then there is no id
        lambda usual: usual.replace(b'"xid":700', b'"xid":{}'),
        lambda usual: usual[:60] + usual[60:].replace(b'"note"', b'"id"'),  # and here two
    ],
)
def test_another_layout_is_read_alike(layout: Any) -> None:
    other = layout(row(USUAL))
    assert other != row(USUAL)
    alike(transaction(row(USUAL), other, row(USUAL)))
    alike(transaction(other, other, row(USUAL), other))


def test_bad_arguments_are_refused() -> None:
    binding = mapping().bind(COLUMNS)
    recipe = Router(Routing(), binding).recipe
    assert recipe is not None
    parts = (b"",) * (len(COLUMNS) + 1)
    assert hot.json_reader(parts, binding.slots, binding, recipe) is not None
    assert hot.json_reader(parts[1:], binding.slots, binding, recipe) is None
    wide = (-1,) * 65
    assert hot.json_reader((b"",) * 66, wide, binding, recipe) is None
    assert hot.json_reader((b"",) * 65, wide[1:], binding, recipe) is not None
    with pytest.raises(TypeError):
        hot.json_reader(("",) * len(parts), binding.slots, binding, recipe)  # type: ignore[arg-type]
