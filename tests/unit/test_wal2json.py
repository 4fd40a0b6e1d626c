"""The wal2json decoder: right, or a ProtocolError. Real servers: integration/test_plugin_conformance.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.checkpoint import Sample, Snapshot
from relay.config import Config
from relay.errors import ContractError, ProtocolError, SourceUnavailable
from relay.event import Event, Rejected
from relay.lsn import LSN
from relay.outbox import BYTEA, JSONB, Binding, mappings
from relay.routing import Router
from relay.source.wal2json import Catalogue, Wal2jsonDecoder
from tests.fakes import keepalive, xlog_data

TEXT, BIGINT, NUMERIC, BOOL = 25, 20, 1700, 16
COLUMNS = {"id": TEXT, "event_type": TEXT, "topic": TEXT, "payload": JSONB}
NOTHING = Catalogue(LSN(0), {}, frozenset(), ())
BEGIN = {"action": "B", "xid": 7, "timestamp": "2026-01-02 03:04:05.5+00", "lsn": "0/100", "nextlsn": "0/140"}
COMMIT = {"action": "C", "xid": 7, "timestamp": "2026-01-02 03:04:05.5+00", "lsn": "0/100", "nextlsn": "0/140"}


def message(content: dict[str, Any], lsn: int = 0) -> bytes:
    return xlog_data(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(), lsn)


def begin(lsn: int = 0x100, xid: int = 7) -> bytes:
    return message({**BEGIN, "lsn": f"0/{lsn:X}", "xid": xid})


def commit(end: int = 0x140) -> bytes:
    return message(COMMIT, end)


def row(table: str = "public.outbox_events", types: dict[str, int] | None = None, **values: Any) -> bytes:
    schema, name = table.split(".")
    values = {"id": "e1", "event_type": "t", "topic": "a.b", "payload": "{}"} | values
    kinds = COLUMNS | (types or {})
    columns = [{"name": column, "typeoid": kinds[column], "value": value} for column, value in values.items()]
    head = {"action": "I", "xid": 7, "timestamp": BEGIN["timestamp"], "lsn": "0/80"}
    return message({**head, "schema": schema, "table": name, "columns": columns})


def decoder(catalogue: Catalogue = NOTHING, skip: Sample | None = None, **outbox: Any) -> Wal2jsonDecoder:
    parts = ("seq", "xid", "aggregate_type", "aggregate_id", "partition_key", "headers", "created_at")
    config = Config.model_validate({"outbox": [{"columns": dict.fromkeys(parts, ""), **outbox}]})
    (mapping,) = mappings(config.outbox)

    def bind(table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        if table != mapping.table:
            return None
        binding = mapping.bind(columns)
        return Router(config.routing, binding), binding

    return Wal2jsonDecoder(catalogue=catalogue, start=LSN(0), skip=skip, bind=bind, stamp=b"")


def decode(reader: Wal2jsonDecoder, *messages: bytes) -> list[Event]:
    rejected: list[Rejected] = []
    events = reader.decode([*messages], rejected)
    assert not rejected
    return events


def test_a_transaction() -> None:
    reader = decoder()
    first, second = decode(reader, begin(), row(), row(id="e2"), commit())
    assert (first.id, first.topic, first.ordinal, second.id, second.ordinal) == (b"e1", "a.b", 0, b"e2", 1)
    assert first.transaction is second.transaction
    assert first.transaction.xid == 7 and first.transaction.commit_lsn == 0x100
    assert first.transaction.committed_at == 1767323045.5
    assert (reader.end, reader.transactions) == (0x140, [(0x100, 7, 2)])


def test_the_position_moves_at_commits_and_keepalives_only() -> None:
    reader = decoder()
    decode(reader, begin(), row())
    assert reader.end == 0
    decode(reader, commit(), keepalive(0x200, reply=True))
    assert reader.end == 0x200 and reader.reply_due


def test_empty_transactions_are_not_even_parsed() -> None:
    reader = decoder()
    noise = xlog_data(b'{"action":"B" this is not JSON')
    assert decode(reader, *[noise, commit()] * 100) == []
    assert reader.transactions == [] and reader.end == 0x140


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_texts(text: str) -> None:
    (event,) = decode(decoder(), begin(), row(event_type=text, payload=json.dumps(text)))
    assert json.loads(event.body or b"")["event_type"] == text
    assert json.loads(event.body or b"")["payload"] == text


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_numbers_are_exact(amount: Any, count: int, flag: bool) -> None:
    reader = decoder(header_columns={"amount": "amount", "count": "count", "flag": "flag"})
    types = {"amount": NUMERIC, "count": BIGINT, "flag": BOOL}
    data = row(types=types, amount=0, count=count, flag=flag).replace(
        b'"name":"amount","typeoid":1700,"value":0', b'"name":"amount","typeoid":1700,"value":%b' % str(amount).encode()
    )
    (event,) = decode(reader, begin(), data)
    headers = dict(event.headers())
    assert (headers["amount"], headers["count"]) == (str(amount).encode(), str(count).encode())
    assert headers["flag"] == (b"t" if flag else b"f")


def test_bytes_get_their_prefix_back() -> None:
    (event,) = decode(decoder(), begin(), row(types={"payload": BYTEA}, payload="deadbeef"))
    assert json.loads(event.body or b"")["payload"] == "\\xdeadbeef"


def test_nulls() -> None:
    (event,) = decode(decoder(), begin(), row(event_type=None, payload=None))
    assert json.loads(event.body or b"") | {"event_type": None, "payload": None} == json.loads(event.body or b"")


def test_unroutable_rows_are_rejected_and_counted_in_order() -> None:
    reader, rejected = decoder(), list[Rejected]()
    (event,) = reader.decode([begin(), row(id=None), row(id="e2")], rejected)
    assert (event.ordinal, rejected[0].event.ordinal) == (1, 0)
    assert "id is NULL" in rejected[0].reason


def test_transactions_that_the_checkpoint_sees_are_skipped() -> None:
    reader = decoder(skip=Sample(Snapshot.parse("5:9:8"), LSN(0x150)))
    assert decode(reader, begin(0x100, 7), row(), commit()) == []
    (event,) = decode(reader, begin(0x110, 8), row(id="in progress then"), commit())
    assert (event.id, reader.skipped) == (b"in progress then", 1)
    (event,) = decode(reader, begin(0x160, 6), row(id="behind the sample"), commit())
    assert event.id == b"behind the sample"


def test_a_table_is_altered() -> None:
    reader = decoder()
    types = {"extra": NUMERIC}
    events = decode(
        reader, begin(), row(), row(types=types, extra=1, id="e2"), row(id="e3"), row(types={"id": BIGINT}, id=4)
    )
    assert [event.id for event in events] == [b"e1", b"e2", b"e3", b"4"]
    renamed = row(id="e5").replace(b'"payload"', b'"body"')
    with pytest.raises(ContractError, match="has no column payload"):
        decode(reader, renamed)


@pytest.mark.parametrize(
    "broken",
    [
        xlog_data(b""),
        xlog_data(b"{"),
        xlog_data(b'{"action":"I"'),
        xlog_data(b'{"action":"I"}'),
        xlog_data(b'{"action":"I","schema":"public","table":"outbox_events"}'),
        xlog_data(b'{"action":"I","schema":"public","table":"outbox_events","columns":[{}]}'),
        xlog_data(b'{"action":"I","schema":1,"table":2,"columns":3}'),
        xlog_data(b'{"action":"I","schema":"public","table":"outbox_events","columns":["\xff"]}'),
        row()[:-5],
        b"?",
        b"w",
    ],
)
def test_what_is_broken_is_refused(broken: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(decoder(), begin(), broken)


def test_a_row_outside_of_a_transaction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="outside of a transaction"):
        decode(decoder(), row())
    with pytest.raises(ProtocolError, match="outside of a transaction"):
        decode(decoder(), begin(), row(), commit(), row())


# --- partitions: the catalogue as it was at LSN 0/200


def partitioned(*, others: frozenset[str] = frozenset()) -> Wal2jsonDecoder:
    return decoder(Catalogue(LSN(0x200), {"public.p1": "public.outbox_events"}, others, ("public.outbox_events",)))


def test_a_known_partition_is_the_table() -> None:
    (event,) = decode(partitioned(), begin(0x900), row("public.p1"))
    assert event.table == "public.outbox_events"


def test_a_table_without_the_columns_cannot_be_a_partition() -> None:
    stranger = message({"action": "I", "schema": "public", "table": "x", "columns": [
        {"name": "id", "typeoid": 23, "value": 1}]})  # fmt: skip
    (event,) = decode(partitioned(), begin(0x900), stranger, row("public.p1"), stranger)
    assert event.ordinal == 0


def test_a_table_that_may_be_a_new_partition_asks_for_the_catalogue() -> None:
    with pytest.raises(SourceUnavailable, match="a new partition"):
        decode(partitioned(), begin(0x200), row("public.p2"))


def test_a_table_that_existed_and_was_no_partition() -> None:
    reader = partitioned(others=frozenset({"public.archive"}))
    assert decode(reader, begin(0x100), row("public.archive"), row("public.archive"), commit()) == []
    with pytest.raises(SourceUnavailable):  # it may have been attached since
        decode(reader, begin(0x300), row("public.archive"))


def test_a_table_that_is_gone_was_a_partition() -> None:
    """Its rows were committed before we looked, and it has the outbox's columns: better once too often than lost."""
    reader = partitioned()
    other = row("public.p0").replace(b'"payload"', b'"body"')
    (event,) = decode(reader, begin(0x100), row("public.p0"), other)
    assert event.table == "public.outbox_events"


# --- options


def test_options_name_the_tables() -> None:
    options = Wal2jsonDecoder.options(["public.outbox_events", "Shop a.b,c *'\\d"], ["other schema"])
    assert options["add-tables"] == r"public.outbox_events,Shop\ a.b\,c\ \*\'\\d,other\ schema.*"
    assert options["actions"] == "insert" and options["include-transaction"] == "1"
