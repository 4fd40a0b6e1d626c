"""The decoder against the bytes of real servers: PostgreSQL 15, 16 and 18."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relay.config import Outbox, Routing
from relay.errors import ProtocolError
from relay.event import Event, Rejected
from relay.lsn import LSN
from relay.outbox import Binding, mappings
from relay.routing import Router
from relay.source.pgoutput import PgoutputDecoder
from tests.fakes import xlog_data
from tests.fix_postgres import Database

TABLE = """
    CREATE TABLE outbox_events (
        seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL DEFAULT gen_random_uuid(),
        aggregate_type text, aggregate_id text, event_type text, topic text, partition_key text,
        payload jsonb, headers jsonb, created_at timestamptz DEFAULT now(), xid xid8 DEFAULT pg_current_xact_id());
    CREATE TABLE orders (id int);
    CREATE PUBLICATION golden FOR TABLE outbox_events, orders;
"""
SLOT = "SELECT pg_create_logical_replication_slot(current_database() || '_golden', 'pgoutput')"
# The walsender pins these on its session; here the session that peeks does.
PINNED = "SET datestyle = 'ISO'; SET timezone = 'UTC'; SET client_encoding = 'UTF8'; SET bytea_output = 'hex'"
PEEK = (
    "SELECT lsn::text, xid::text::bigint, data FROM pg_logical_slot_peek_binary_changes("
    "current_database() || '_golden', NULL, NULL, 'proto_version', '1', 'publication_names', 'golden')"
)


@pytest.fixture(params=["15", "16", "18"])
def golden(request: pytest.FixtureRequest) -> Database:
    """A database with the table, the publication and a slot."""
    database: Database = request.getfixturevalue(
        {"15": "database15", "16": "database16", "18": "database"}[request.param]
    )
    database.execute(TABLE)
    database.execute(SLOT)
    return database


def peek(database: Database) -> list[tuple[LSN, int, bytes]]:
    with database.connect() as connection:
        connection.execute(PINNED)
        return [(LSN.parse(lsn), xid, bytes(data)) for lsn, xid, data in connection.execute(PEEK).fetchall()]


def decoder() -> PgoutputDecoder:
    tables = mappings([Outbox()])

    def bind(table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        if table != tables[0].table:
            return None
        binding = tables[0].bind(columns)
        return Router(Routing(), binding), binding

    return PgoutputDecoder(start=LSN(0), skip=None, bind=bind, stamp=b"")


def decode(database: Database) -> tuple[list[Event], PgoutputDecoder]:
    reading, rejected = decoder(), list[Rejected]()
    events = reading.decode([xlog_data(data) for _, _, data in peek(database)], rejected)
    assert rejected == []
    return events, reading


def test_rows_arrive_as_they_were_written(golden: Database) -> None:
    with golden.connect() as connection:
        with connection.transaction():
            row = connection.execute(
                "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload, headers)"
                " VALUES ('order', %s, 'created', NULL, %s::jsonb, '{\"x\": \"y\"}')"
                " RETURNING id::text, seq, xid::text::bigint, extract(epoch FROM created_at)::float8",
                ('o"1\n✓', '{"total": 1.50, "big": 12345678901234567890, "nested": ["ü", null]}'),
            ).fetchone()
            connection.execute("INSERT INTO orders VALUES (1)")
            connection.execute("INSERT INTO outbox_events (event_type, aggregate_type) VALUES ('b', 'a')")
        assert row is not None
        event_id, seq, xid, created = row
        committed = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert committed is not None
    events, reading = decode(golden)
    assert [event.ordinal for event in events] == [0, 1]
    first = events[0]
    assert first.id == event_id.encode()
    assert (first.topic, first.key) == ("events.order.created", 'o"1\n✓'.encode())
    assert dict(first.headers())["seq"] == str(seq).encode()
    assert dict(first.headers())["x"] == b"y"
    assert first.body is not None
    assert b'"total": 1.50' in first.body and b"12345678901234567890" in first.body and "ü".encode() in first.body
    assert first.transaction.xid == xid % 2**32
    assert abs(first.transaction.committed_at - created) < 60
    assert first.transaction.commit_lsn < reading.end <= LSN.parse(committed[0])


def test_transactions_come_in_commit_order_and_end_where_postgres_says(golden: Database) -> None:
    with golden.connect() as early, golden.connect() as late:
        early.execute("BEGIN")
        early.execute("INSERT INTO outbox_events (aggregate_type, event_type, aggregate_id) VALUES ('a', 'e', 'early')")
        late.execute("INSERT INTO outbox_events (aggregate_type, event_type, aggregate_id) VALUES ('a', 'e', 'late')")
        early.execute("COMMIT")
        late.execute("BEGIN")
        late.execute("INSERT INTO outbox_events (aggregate_type, event_type, aggregate_id) VALUES ('a', 'e', 'undone')")
        late.execute("ROLLBACK")
    changes = peek(golden)
    events, reading = decode(golden)
    assert [event.key for event in events] == [b"late", b"early"]
    assert [count for _, _, count in reading.transactions] == [1, 1]
    commits = [lsn for lsn, _, data in changes if data[:1] == b"C"]
    assert reading.end == commits[-1]  # a commit's message stands at the commit's end
    assert [event.transaction.commit_lsn for event in events] == sorted(e.transaction.commit_lsn for e in events)


def test_large_values_nulls_and_other_tables(golden: Database) -> None:
    golden.execute("INSERT INTO orders SELECT generate_series(1, 50)")
    golden.execute(
        "INSERT INTO outbox_events (aggregate_type, event_type, payload)"
        " SELECT 'a', 'e', jsonb_build_object('text', string_agg(md5(i::text), '')) FROM generate_series(1, 20000) i"
    )
    golden.execute("INSERT INTO outbox_events (topic, created_at) VALUES ('t', 'infinity')")
    golden.execute("TRUNCATE orders")
    events, _ = decode(golden)
    assert len(events) == 2
    assert events[0].body is not None and len(events[0].body) > 600_000
    assert events[1].body is not None and b'"occurred_at":"infinity","payload":null' in events[1].body
    assert events[1].key is None


def test_a_changed_table_is_announced_before_its_rows(golden: Database) -> None:
    golden.execute("INSERT INTO outbox_events (aggregate_type, event_type) VALUES ('a', 'before')")
    golden.execute("ALTER TABLE outbox_events ADD COLUMN extra text DEFAULT 'x', DROP COLUMN partition_key")
    golden.execute("ALTER TABLE outbox_events ADD COLUMN partition_key text")
    golden.execute("INSERT INTO outbox_events (aggregate_type, event_type, partition_key) VALUES ('a', 'after', 'p')")
    events, _ = decode(golden)
    assert [(event.topic, event.key) for event in events] == [("events.a.before", None), ("events.a.after", b"p")]


def test_no_truncation_of_real_messages_is_taken_for_a_message(golden: Database) -> None:
    golden.execute("INSERT INTO outbox_events (aggregate_type, event_type) VALUES ('a', 'e')")
    messages = [xlog_data(data) for _, _, data in peek(golden)]
    assert {message[25:26] for message in messages} >= {b"B", b"R", b"I", b"C"}
    for place, message in enumerate(messages):
        if message[25:26] not in b"BRIC":
            continue
        for length in range(1, len(message)):
            with pytest.raises(ProtocolError):
                decoder().decode([*messages[:place], message[:length]], [])
