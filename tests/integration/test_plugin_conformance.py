"""Both output plugins tell the same story: every test runs the whole relay, on pgoutput and on wal2json side by side.

`Readers` is one relay per plugin that the server has (15: both; 16 and 18: pgoutput, their wheels have no wal2json), on
the same database. What they published must be equal event by event, and equal to what the test wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psycopg
import pytest
from pydantic import ValidationError

from relay import hot
from relay.app import Relay
from relay.check import Finding, check
from relay.config import Config
from relay.embedded import PostgresServer
from relay.errors import ContractError, SetupError
from relay.event import Batch, Event, Rejected
from relay.lsn import LSN
from relay.setup import setup
from tests.fakes import left_to_python
from tests.fix_postgres import Database, Postgres
from tests.relays import eventually

PLUGINS = {"15": ("pgoutput", "wal2json"), "16": ("pgoutput",), "18": ("pgoutput",)}
TABLE = "public.outbox_events"
Connection = psycopg.Connection[tuple[Any, ...]]


class Recorder:
    """A sink that keeps what it is given. From `hold` events on it acknowledges nothing."""

    def __init__(self, hold: int | None = None) -> None:
        self.events: list[Event] = []
        self.duplicates = 0
        self.marks: dict[str, int] = {}
        self._hold = hold

    def resume(self, marks: Mapping[str, int], origin: str) -> None: ...

    async def open(self) -> None: ...

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        self.events += batch.events
        if self._hold is not None and len(self.events) >= self._hold:
            await asyncio.get_running_loop().create_future()
        return ()

    async def close(self) -> None: ...


class Reader(NamedTuple):
    plugin: str
    relay: Relay
    sink: Recorder


class Seen(NamedTuple):
    """An event without what differs between two relays: their names and their slots."""

    id: str
    topic: str
    key: bytes | None
    headers: dict[str, bytes]
    body: bytes | None
    table: str
    position: str
    xid: int
    committed_at: float

    @property
    def payload(self) -> bytes:
        """The payload as it stands in the envelope, digit by digit."""
        assert self.body is not None
        return self.body.partition(b'"payload":')[2][:-1]


def seen(event: Event) -> Seen:
    headers = dict(event.headers())
    position = headers.pop("relay-position").decode().split(":", 3)[3]  # after relay, system and epoch
    assert position.endswith(f":{event.ordinal}")
    return Seen(
        event.id.decode(),
        event.topic,
        event.key,
        headers,
        event.body,
        event.table,
        position,
        event.transaction.xid,
        round(event.transaction.committed_at, 3),
    )


class Readers:
    """The relays of one test, and the writing that they read."""

    def __init__(self, database: Database, connection: Connection, readers: Sequence[Reader]) -> None:
        self.database = database
        self.readers = readers
        self.sql = connection
        self._marks = 0

    async def events(
        self,
        table: str = TABLE,
        columns: str = "(aggregate_type, aggregate_id, event_type, payload)",
        values: str = "('mark', 'm', %s, '{}')",
        *,
        reread: bool = False,
    ) -> list[Seen]:
        """What was published until now, the same for all plugins. `reread`: a relay may have begun anew meanwhile."""
        self._marks += 1
        mark = f"mark{self._marks}".encode()
        name = ".".join(f'"{part}"' for part in table.split("."))
        self.sql.execute(f"INSERT INTO {name} {columns} VALUES {values}".encode(), (mark.decode(),))
        for reader in self.readers:
            await until(reader, lambda sink: any(_marked(e, mark) for e in reversed(sink.events[-50:])), repr(mark))
        first, *others = [
            [seen(e) for e in (_first(r.sink.events) if reread else r.sink.events) if not _type(e).startswith(b"mark")]
            for r in self.readers
        ]
        for other in others:
            assert other == first
        return first


def _type(event: Event) -> bytes:
    return dict(event.headers()).get("type", b"")


def _first(events: Sequence[Event]) -> list[Event]:
    """Without repetitions, as a consumer that dedupes sees them."""
    return list({event.id: event for event in events}.values())


def _marked(event: Event, mark: bytes) -> bool:
    return _type(event) == mark


async def until(reader: Reader, condition: Callable[[Recorder], bool], what: str) -> None:
    def answer() -> bool:
        task = reader.relay._task
        if task is not None and task.done():
            task.result()
            raise AssertionError("the relay ended")
        return condition(reader.sink)

    await eventually(answer, f"{reader.plugin}: {what}", context=lambda: repr(reader.relay.progress))


def config_of(database: Database, plugin: str, **sections: Any) -> Config:
    name = f"{plugin}_{database.name}"
    return Config.model_validate(
        {
            "relay": {"name": name},
            "database": {"dsn": database.dsn},
            "source": {"plugin": plugin, "slot": name},
            "admin": {"listen": ""},
            "checkpoint": {"interval": "100ms"},
            "delivery": {"backoff_initial": "50ms", "backoff_max": "200ms"},
            **sections,
        }
    )


@asynccontextmanager
async def running(config: Config, *, hold: int | None = None, from_now: bool = True) -> AsyncIterator[Reader]:
    sink = Recorder(hold)
    relay = Relay(config, sink=sink, from_now=from_now)
    async with relay:
        reader = Reader(config.source.plugin, relay, sink)
        await until(reader, lambda _: relay.progress.state == "streaming", "streaming")
        yield reader


@asynccontextmanager
async def reading(database: Database, **sections: Any) -> AsyncIterator[Readers]:
    async with AsyncExitStack() as stack:
        connection = stack.enter_context(database.connect())
        plugins = PLUGINS[database.server.version]
        readers = [
            await stack.enter_async_context(running(config_of(database, plugin, **sections))) for plugin in plugins
        ]
        yield Readers(database, connection, readers)


@pytest.fixture(params=list(PLUGINS))
def fresh(request: pytest.FixtureRequest) -> Database:
    """A database of each version, not set up."""
    suffix = "" if request.param == "18" else request.param
    found = request.getfixturevalue(f"database{suffix}")
    assert isinstance(found, Database)
    return found


@pytest.fixture
async def outbox(fresh: Database) -> Database:
    """A database of each version with the relay's own table."""
    await setup(config_of(fresh, "pgoutput"))
    return fresh


@pytest.fixture
async def both(database15: Database) -> Database:
    """A database of the version that has both plugins."""
    await setup(config_of(database15, "pgoutput"))
    return database15


INSERT = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) "


def insert(connection: Connection, key: str, count: int = 1, **payload: Any) -> None:
    query = f"{INSERT} SELECT 'order', %s, 'changed', %s::jsonb || jsonb_build_object('n', n) "
    connection.execute(f"{query} FROM generate_series(1, %s) n ORDER BY n".encode(), (key, json.dumps(payload), count))


def ids_in_table(connection: Connection) -> list[str]:
    query = "SELECT id::text FROM outbox_events WHERE event_type NOT LIKE 'mark%' ORDER BY seq"
    return [row[0] for row in connection.execute(query.encode())]


def keys_of(events: Sequence[Seen]) -> list[str]:
    return [(event.key or b"").decode() for event in events]


# --- transactions


async def test_small_and_large_transactions(outbox: Database) -> None:
    async with reading(outbox) as readers:
        insert(readers.sql, "one")
        insert(readers.sql, "large", 100_000)
        insert(readers.sql, "one")
        events = await readers.events()
        assert [event.id for event in events] == ids_in_table(readers.sql)
        large = events[1:-1]
        assert len({event.xid for event in large}) == 1
        assert [int(event.position.rpartition(":")[2]) for event in large] == list(range(100_000))


async def test_interleaved_transactions_come_in_commit_order(outbox: Database) -> None:
    async with reading(outbox) as readers, AsyncExitStack() as stack:
        a, b, c = (stack.enter_context(psycopg.connect(outbox.dsn)) for _ in range(3))
        for round_ in range(3):
            for connection, key in ((a, "a"), (b, "b"), (c, "c")):
                insert(connection, f"{key}{round_}")
        c.commit()
        a.commit()
        insert(b, "b3")
        b.commit()
        assert keys_of(await readers.events()) == ["c0", "c1", "c2", "a0", "a1", "a2", "b0", "b1", "b2", "b3"]


async def test_what_was_rolled_back_is_no_event(outbox: Database) -> None:
    async with reading(outbox) as readers:
        with psycopg.connect(outbox.dsn) as connection:
            insert(connection, "kept")
            with contextlib.suppress(psycopg.errors.DivisionByZero), connection.transaction():
                insert(connection, "lost", 10)
                with connection.transaction():
                    insert(connection, "lost inside")
                connection.execute("SELECT 1 / 0")
            with connection.transaction():
                insert(connection, "kept in a savepoint")
            connection.execute("SAVEPOINT s")
            insert(connection, "lost")
            connection.execute("ROLLBACK TO s")
            insert(connection, "kept at last")
            connection.commit()
            insert(connection, "lost with all")
            connection.rollback()
        events = await readers.events()
        assert keys_of(events) == ["kept", "kept in a savepoint", "kept at last"]
        assert [event.position.rpartition(":")[2] for event in events] == ["0", "1", "2"]


async def test_copy_and_many_rows_in_one_insert(outbox: Database) -> None:
    """Several rows share an LSN: only the ordinal tells them apart."""
    async with reading(outbox) as readers:
        copy = "COPY outbox_events (aggregate_type, aggregate_id, event_type, payload) FROM STDIN"
        with readers.sql.cursor().copy(copy) as rows:
            for number in range(5000):
                rows.write_row(("order", f"copied{number}", "changed", "{}"))
        readers.sql.execute(f"{INSERT} VALUES {', '.join(['(%s, %s, %s, %s)'] * 3)}".encode(),
                            ["order", "x", "t", "1", "order", "y", "t", "2", "order", "z", "t", "3"])  # fmt: skip
        events = await readers.events()
        assert keys_of(events) == [f"copied{number}" for number in range(5000)] + ["x", "y", "z"]
        assert len({event.position for event in events}) == 5003


async def test_only_inserts_into_the_outbox_are_events(outbox: Database) -> None:
    """Empty transactions of busy tables cost next to nothing, and move the position on (G7)."""
    outbox.execute("CREATE TABLE busy (id int PRIMARY KEY, outbox_events text)")
    async with reading(outbox) as readers:
        insert(readers.sql, "first", 2)
        for number in range(300):
            readers.sql.execute("INSERT INTO busy VALUES (%s, 'public.outbox_events')", (number,))
        with psycopg.connect(outbox.dsn) as connection:
            connection.execute("UPDATE busy SET outbox_events = repeat('x', 9000) WHERE id < 50")
            insert(connection, "between")
            connection.execute("DELETE FROM busy WHERE id < 100")
        readers.sql.execute("UPDATE outbox_events SET payload = '{\"changed\": true}', aggregate_id = 'changed'")
        readers.sql.execute("DELETE FROM outbox_events WHERE event_type = 'changed'")
        readers.sql.execute("TRUNCATE outbox_events")
        insert(readers.sql, "last")
        assert keys_of(await readers.events()) == ["first", "first", "between", "last"]
        before = LSN.parse(outbox.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        readers.sql.execute("INSERT INTO busy SELECT n, repeat('x', 100) FROM generate_series(1000, 30000) n")
        for reader in readers.readers:
            progress = reader.relay.progress
            await eventually(lambda: progress.received_lsn > before, f"{reader.plugin} moves on")  # noqa: B023


# --- values


TEXTS = [
    "plain",
    "",
    " spaces \t\r\n ",
    "quotes \" and ' and `",
    r"back\slash \n \u0041 \\",
    "control \x01\x02\x08\x0b\x0c\x1b\x1f\x7f",
    "äöü ß é 漢字 кириллица עברית",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and the astral 𝄞",
    "line \u2028 paragraph \u2029 bom \ufeff",
    "{}[]:,%s%b%%",
    "'; DROP TABLE outbox_events; --",
]


async def test_texts_arrive_as_they_are(outbox: Database) -> None:
    async with reading(outbox) as readers:
        for text in TEXTS:
            readers.sql.execute(f"{INSERT} VALUES (%s, %s, 'said', %s)".encode(), ("t", text, json.dumps({text: text})))
        events = await readers.events()
        assert keys_of(events) == TEXTS
        for text, event in zip(TEXTS, events, strict=True):
            assert event.body is not None
            body = json.loads(event.body)
            assert body["aggregate_id"] == text and body["payload"] == {text: text}
            if text:
                assert event.headers["aggregate-id"].decode() == text


async def test_nulls_everywhere(fresh: Database) -> None:
    fresh.execute("CREATE TABLE outbox_events (id text, aggregate_type text, aggregate_id text, event_type text, "
                  "topic text, partition_key text, payload jsonb, headers jsonb, created_at timestamptz)")  # fmt: skip
    await setup(config_of(fresh, "pgoutput"))
    columns = {"seq": "", "xid": ""}
    async with reading(fresh, outbox=[{"columns": columns}]) as readers:
        readers.sql.execute("INSERT INTO outbox_events (id, topic) VALUES ('only id and topic', 'a.topic')")
        readers.sql.execute("INSERT INTO outbox_events (id, topic, payload) VALUES ('json null', 'a.topic', 'null')")
        events = await readers.events(
            columns="(id, topic, event_type)", values="(gen_random_uuid()::text, 'a.topic', %s)"
        )
        assert [(event.id, event.key, event.payload) for event in events] == [
            ("only id and topic", None, b"null"),
            ("json null", None, b"null"),
        ]
        assert json.loads(events[0].body or b"") == {
            "event_id": "only id and topic",
            "event_type": None,
            "aggregate_type": None,
            "aggregate_id": None,
            "seq": None,
            "occurred_at": None,
            "payload": None,
        }
        assert set(events[0].headers) == {"id", "content-type"}


EXACT = [
    b'{"n": 9007199254740993}',
    b'{"n": -9223372036854775809000000001}',
    b'{"n": 1.50}',
    b'{"n": 100000000000000000000000000000000.000000000000000000000000000001}',
    b"[1, 2.0, 0.1]",
    b"1",
    b'"text"',
    b'{"\\u0001": "\\\\ \\" / \xf0\x9f\x98\x80"}',
]


async def test_json_keeps_every_digit(outbox: Database) -> None:
    """The body holds the payload's bytes as Postgres prints them."""
    async with reading(outbox) as readers:
        for text in EXACT:
            readers.sql.execute(f"{INSERT} VALUES ('t', 'k', 'exact', %s::jsonb)".encode(), (text.decode(),))
        events = await readers.events()
        stored = [row[0].encode() for row in readers.sql.execute(
            "SELECT payload::text FROM outbox_events WHERE event_type = 'exact' ORDER BY seq")]  # fmt: skip
        assert [event.payload for event in events] == stored
        assert stored == EXACT


async def test_json_that_is_not_jsonb_keeps_its_spaces(outbox: Database) -> None:
    outbox.execute("ALTER TABLE outbox_events ALTER COLUMN payload TYPE json")
    text = '{ "b" : 1.50,\n\t"a":1e2 ,"a": 9007199254740993}  '
    async with reading(outbox) as readers:
        readers.sql.execute(f"{INSERT} VALUES ('t', 'k', 'spaced', %s)".encode(), (text,))
        (event,) = await readers.events()
        assert event.payload == text.encode()


async def test_multi_megabyte_payloads(outbox: Database) -> None:
    """TOASTed, compressed or not, in line or not."""
    async with reading(outbox) as readers:
        fill = "SELECT 'order', 'k' || n, 'big', to_jsonb(%s) FROM generate_series(1, 3) n ORDER BY n"
        for content in (
            "repeat('x', n * 1500000)",
            "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, n * 50000) g)",
        ):
            readers.sql.execute(f"{INSERT} {fill % content}".encode())
        events = await readers.events()
        stored = readers.sql.execute("SELECT payload::text FROM outbox_events WHERE event_type = 'big' ORDER BY seq")
        assert [event.payload for event in events] == [row[0].encode() for row in stored]
        assert max(len(event.payload) for event in events) > 4_000_000


HEADER_TYPES = {
    "amount": ("numeric", ["1.50", "-0.000000000000000000000000000001", "123456789012345678901234567890.10", "0"]),
    "ratio": ("float8", ["0.1", "1e+300", "-0", "3.141592653589793"]),
    "narrow": ("real", ["0.1", "1e+30", "-2.5", "1.6777216e+07"]),
    "big": ("bigint", ["9007199254740993", "-9223372036854775808", "0", "7"]),
    "small": ("smallint", ["1", "-32768", "0", "7"]),
    "flag": ("boolean", ["t", "f", "t", "f"]),
    "at": ("timestamptz", ["2026-06-01 12:30:00.1234+00", "infinity", "0044-03-15 00:00:00+00 BC", "-infinity"]),
    "day": ("date", ["2026-01-01", "infinity", "0001-01-01", "9999-12-31"]),
    "span": ("interval", ["P1Y2M3DT4H5M6.7S", "PT0S", "P-1D", "PT-1H"]),
    "raw": ("bytea", ["\\x", "\\x00ff", "\\xdeadbeef", "\\x5c78"]),
    "many": ("text[]", ['{a,"b c",NULL}', "{}", '{"\\"","\\\\"}', "{{1,2},{3,4}}"]),
    "uid": ("uuid", ["00000000-0000-0000-0000-000000000000"] * 4),
    "address": ("inet", ["10.0.0.1", "::1", "10.0.0.0/8", "127.0.0.1"]),
    "oid_of": ("oid", ["4294967295", "0", "1", "2"]),
    "padded": ("char(5)", ["a    ", "bc   ", "     ", "abcde"]),
}  # fmt: skip


async def test_header_columns_are_postgres_own_text(outbox: Database) -> None:
    """Exact, for every type, from both plugins. (NaN and infinite numbers are not: wal2json sends NULL for them.)"""
    added = ", ".join(f"ADD COLUMN {name} {type_}" for name, (type_, _) in HEADER_TYPES.items())
    outbox.execute(f"ALTER TABLE outbox_events {added}")
    async with reading(outbox, outbox=[{"header_columns": {f"x-{name}": name for name in HEADER_TYPES}}]) as readers:
        places = ", ".join(["%s"] * len(HEADER_TYPES))
        for row in zip(*(values for _, values in HEADER_TYPES.values()), strict=True):
            query = INSERT.replace(")", f", {', '.join(HEADER_TYPES)})")
            readers.sql.execute(f"{query} VALUES ('t', 'k', 'typed', '{{}}', {places})".encode(), row)
        insert(readers.sql, "nulls")
        *events, last = await readers.events()
        for name, (_, values) in HEADER_TYPES.items():
            assert [event.headers[f"x-{name}"].decode() for event in events] == values, name
            assert f"x-{name}" not in last.headers


@pytest.mark.parametrize("plugin", PLUGINS["15"])
async def test_not_a_number(both: Database, plugin: str) -> None:
    both.execute("ALTER TABLE outbox_events ADD COLUMN amount numeric")
    config = config_of(both, plugin, outbox=[{"header_columns": {"amount": "amount"}}])
    async with running(config) as reader:
        both.execute("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, amount) "
                     "VALUES ('t', 'k', 'nan', '{}', 'NaN')")  # fmt: skip
        await until(reader, lambda sink: bool(sink.events), "the event")
        found = dict(reader.sink.events[0].headers()).get("amount")
        assert found == (b"NaN" if plugin == "pgoutput" else None)  # what wal2json does not say, nobody can publish


async def test_bytes_pass_through(outbox: Database) -> None:
    outbox.execute("ALTER TABLE outbox_events DROP COLUMN payload, ADD COLUMN payload bytea")
    bodies = [b"", bytes(range(256)), b"\\x41", b"\0\0\0\0\x05Avro", bytes(range(256)) * 8192]
    async with reading(outbox, routing={"format": "payload"}) as readers:
        for body in bodies:
            readers.sql.execute(f"{INSERT} VALUES ('t', 'k', 'bytes', %s)".encode(), (body,))
        readers.sql.execute(f"{INSERT} VALUES ('t', 'k', 'nothing', NULL)".encode())
        events = await readers.events()
        assert [event.body for event in events] == [*bodies, None]
        assert events[0].headers["content-type"] == b"application/octet-stream"


# --- tables


async def test_several_outbox_tables_and_names_that_need_quotes(fresh: Database) -> None:
    """One relay, one slot. (A name with a dot in it cannot be written in the configuration; it is refused there.)"""
    tables = [TABLE, 'Shop Söhne & Co.Order "Outbox"', "public.it's, a *table*\\"]
    fresh.execute('CREATE SCHEMA "Shop Söhne & Co"')
    await setup(config_of(fresh, "pgoutput", outbox=[{"table": table} for table in tables]))
    fresh.execute('CREATE TABLE "ITS, a *table*" AS SELECT * FROM outbox_events')
    async with reading(fresh, outbox=[{"table": table} for table in tables]) as readers:
        with psycopg.connect(fresh.dsn) as connection:
            for number, table in enumerate(tables * 2):
                quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))
                connection.execute(
                    f"INSERT INTO {quoted} (aggregate_type, aggregate_id, event_type, payload) "
                    f"VALUES ('t', 'k{number}', 'changed', '{{}}')".encode()
                )
            connection.execute('INSERT INTO "ITS, a *table*" SELECT * FROM outbox_events')
        events = await readers.events()
        assert [event.table for event in events] == tables * 2
        assert keys_of(events) == [f"k{number}" for number in range(6)]
        assert [event.position.rpartition(":")[2] for event in events] == list("012345")


async def partitioned_outbox(database: Database) -> None:
    await setup(config_of(database, "pgoutput"), partitioned=True)


def partitioned_by_hand(database: Database) -> None:
    """By list, with partitions of partitions and in another schema, and with none at first."""
    database.execute(
        "CREATE SCHEMA elsewhere;"
        "CREATE TABLE outbox_events (seq bigint GENERATED BY DEFAULT AS IDENTITY, id uuid DEFAULT gen_random_uuid(),"
        " aggregate_type text, aggregate_id text, event_type text, topic text, partition_key text, payload jsonb,"
        " headers jsonb, created_at timestamptz DEFAULT now(), xid xid8 DEFAULT pg_current_xact_id())"
        " PARTITION BY LIST (aggregate_type);"
    )


PART = "FOR VALUES IN ('{0}')"


def write_part(connection: Connection, kind: str, key: str) -> None:
    connection.execute(f"{INSERT} VALUES (%s, %s, 'changed', '{{}}')".encode(), (kind, key))


async def test_partitions_made_by_setup(fresh: Database) -> None:
    await partitioned_outbox(fresh)
    async with reading(fresh) as readers:
        insert(readers.sql, "a", 100)
        insert(readers.sql, "b", 3)
        events = await readers.events()
        assert [event.id for event in events] == ids_in_table(readers.sql)
        assert {event.table for event in events} == {TABLE}


async def test_partitions_come_and_go_while_the_relay_runs(fresh: Database) -> None:
    partitioned_by_hand(fresh)
    await setup(config_of(fresh, "pgoutput"))
    fresh.execute("CREATE TABLE waiting (LIKE outbox_events INCLUDING DEFAULTS)")
    async with reading(fresh) as readers:
        sql = readers.sql
        sql.execute("CREATE TABLE plain (id int); INSERT INTO plain VALUES (1)")  # new, and none of ours
        sql.execute("CREATE MATERIALIZED VIEW seen AS SELECT 1 AS id; CREATE UNIQUE INDEX ON seen (id)")
        sql.execute("REFRESH MATERIALIZED VIEW CONCURRENTLY seen")
        sql.execute("CREATE TABLE p1 PARTITION OF outbox_events " + PART.format("one"))
        write_part(sql, "one", "made while running")
        sql.execute("ALTER TABLE outbox_events ATTACH PARTITION waiting " + PART.format("two"))
        write_part(sql, "two", "attached while running")
        sql.execute("CREATE TABLE p3 PARTITION OF outbox_events " + PART.format("three") + " PARTITION BY HASH (seq)")
        sql.execute("CREATE TABLE p3x PARTITION OF p3 FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
        write_part(sql, "three", "below a partition")
        sql.execute("CREATE TABLE p4 PARTITION OF outbox_events " + PART.format("four"))
        write_part(sql, "four", "gone before it was read")
        sql.execute("DROP TABLE p4")
        sql.execute("CREATE TABLE p5 PARTITION OF outbox_events " + PART.format("mark"))
        sql.execute("INSERT INTO plain VALUES (2)")
        events = await readers.events(reread=True)
        expected = ["made while running", "attached while running", "below a partition", "gone before it was read"]
        assert keys_of(events) == expected
        assert {event.table for event in events} == {TABLE}


async def test_a_table_of_the_same_columns_is_not_a_partition(both: Database) -> None:
    """wal2json gives only the leaf's name; an archive beside a partitioned outbox is not the outbox."""
    both.execute("DROP TABLE outbox_events CASCADE")
    partitioned_by_hand(both)
    await setup(config_of(both, "pgoutput"))
    both.execute("CREATE TABLE archive (LIKE outbox_events); CREATE TABLE p PARTITION OF outbox_events DEFAULT")
    async with reading(both) as readers:
        write_part(readers.sql, "one", "first")
        readers.sql.execute("INSERT INTO archive SELECT * FROM outbox_events")
        write_part(readers.sql, "one", "second")
        assert keys_of(await readers.events(reread=True)) == ["first", "second"]


# --- changes of the table while the relay runs


async def test_columns_added_dropped_and_moved_while_running(outbox: Database) -> None:
    async with reading(outbox) as readers:
        insert(readers.sql, "before")
        readers.sql.execute("ALTER TABLE outbox_events ADD COLUMN note text DEFAULT 'n', ADD COLUMN amount numeric")
        insert(readers.sql, "added")
        with psycopg.connect(outbox.dsn) as connection:
            connection.execute("ALTER TABLE outbox_events DROP COLUMN note")
            insert(connection, "dropped in the same transaction")
            connection.execute("ALTER TABLE outbox_events RENAME COLUMN amount TO sum")
            insert(connection, "renamed in the same transaction")
        readers.sql.execute("ALTER TABLE outbox_events ALTER COLUMN aggregate_id TYPE varchar(200)")
        insert(readers.sql, "retyped")
        events = await readers.events()
        assert keys_of(events)[:2] == ["before", "added"] and keys_of(events)[-1] == "retyped"
        assert len(events) == 5


@pytest.mark.parametrize("plugin", PLUGINS["15"])
async def test_a_mapped_column_is_renamed_while_running(both: Database, plugin: str) -> None:
    """The relay stops and says so; with the configuration corrected it goes on, and nothing is lost (G1)."""
    with both.connect() as connection:
        moved = INSERT.replace("payload", "body")
        with pytest.raises(ContractError, match="has no column payload") as failure:  # noqa: PT012  it ends the block
            async with running(config_of(both, plugin)) as reader:
                insert(connection, "before", 3)
                await until(reader, lambda sink: len(sink.events) == 3, "three events")
                connection.execute("ALTER TABLE outbox_events RENAME COLUMN payload TO body")
                connection.execute(f"{moved} VALUES ('t', 'after', 'changed', '1')".encode())
                await reader.relay.wait()
        assert "[outbox.columns]" in failure.value.hint
        connection.execute(f"{moved} VALUES ('t', 'last', 'changed', '2')".encode())
        corrected = config_of(both, plugin, outbox=[{"columns": {"payload": "body"}}])
        async with running(corrected) as again:
            await until(again, lambda sink: any(e.key == b"last" for e in sink.events), "the last event")
            keys = [event.key for event in again.sink.events if event.key != b"before"]
            assert keys == [b"after", b"last"]


@pytest.mark.parametrize("plugin", PLUGINS["15"])
async def test_a_mapped_column_is_renamed_while_the_relay_is_down(both: Database, plugin: str) -> None:
    """The WAL has rows under the old name, the configuration has the new one: they come from the table (G1, G10)."""
    with both.connect() as connection:
        async with running(config_of(both, plugin)) as reader:
            insert(connection, "before")
            await until(reader, lambda sink: len(sink.events) == 1, "the event")
        insert(connection, "while down")
        connection.execute("ALTER TABLE outbox_events RENAME COLUMN payload TO body")
        moved = INSERT.replace("payload", "body")
        connection.execute(f"{moved} VALUES ('t', 'renamed', 'changed', '2')".encode())
        corrected = config_of(both, plugin, outbox=[{"columns": {"payload": "body"}}])
        async with running(corrected) as again:
            await until(again, lambda sink: b"renamed" in {e.key for e in sink.events}, "what was written meanwhile")
            connection.execute(f"{moved} VALUES ('t', 'last', 'changed', '3')".encode())
            await until(again, lambda sink: b"last" in {e.key for e in sink.events}, "the last event")
            keys = [event.key for event in _first(again.sink.events) if event.key != b"before"]
            assert keys == [b"while down", b"renamed", b"last"]
            await until(again, lambda _: again.relay.progress.state == "streaming", "streaming again")
            assert again.relay.progress.recoveries == 1


# --- restarts


@pytest.mark.parametrize("plugin", PLUGINS["15"])
async def test_restart_in_the_middle_of_a_transaction(both: Database, plugin: str) -> None:
    """Everything comes at least once, under the same ids and positions, in the same order (G1, G2, G3)."""
    config = config_of(both, plugin)
    with both.connect() as connection:
        with contextlib.suppress(asyncio.CancelledError):
            async with running(config, hold=7000) as reader:
                insert(connection, "small", 10)
                await until(reader, lambda sink: len(sink.events) == 10, "the small transaction")
                insert(connection, "large", 20_000)
                insert(connection, "late")
                await until(reader, lambda sink: len(sink.events) >= 7000, "a part of the large transaction")
                reader.relay.abort()
        async with running(config) as again:
            await until(again, lambda sink: any(e.key == b"late" for e in sink.events), "the last event")
        ids = ids_in_table(connection)
    first, second = ([seen(event) for event in sink.events] for sink in (reader.sink, again.sink))
    assert len(first) < 20_000
    assert [event.id for event in first] == ids[: len(first)]
    assert [event.id for event in second] == ids[-len(second) :]
    assert len(first) + len(second) >= len(ids)
    positions = {event.id: event.position for event in first}
    assert all(positions.get(event.id, event.position) == event.position for event in second)


# --- where the plugin is refused


async def findings_of(config: Config) -> list[Finding]:
    return [
        finding
        for finding in await check(config, broker=False)
        if finding.subject.startswith(("plugin", "publication"))
    ]


@pytest.mark.parametrize("form", ["pgoutput, test_decoding", '"pgoutput,test_decoding,wal2json"', ""])
async def test_a_server_that_does_not_allow_wal2json(start_postgres: Callable[..., PostgresServer], form: str) -> None:
    """`check` and `run` name the setting; what `check` prints, pasted, cures it."""
    server = start_postgres("15", settings={"output_plugin_libraries": form})
    database = Database(Postgres("15", server.dsn()), "postgres")
    config = config_of(database, "wal2json")
    await setup(config)
    (finding,) = await findings_of(config)
    assert finding.level == "error" and "output_plugin_libraries" in finding.message
    with pytest.raises(SetupError, match="may not be used as an output plugin") as failure:
        async with running(config):
            pass
    assert "output_plugin_libraries = 'pgoutput','test_decoding','wal2json'" in failure.value.hint
    for statement in finding.remedy.partition("  (")[0].split(";"):
        if statement.strip():
            server.execute(statement)
    async with running(config):
        (finding,) = await findings_of(config)
        assert (finding.level, finding.message) == ("ok", "is installed and allowed")


@pytest.mark.parametrize("version", ["16", "18"])
async def test_a_server_without_wal2json(start_postgres: Callable[..., PostgresServer], version: str) -> None:
    server = start_postgres(version)
    config = config_of(Database(Postgres(version, server.dsn()), "postgres"), "wal2json")
    await setup(config)
    (finding,) = await findings_of(config)
    with pytest.raises(SetupError, match="not installed on the server") as failure:
        async with running(config):
            pass
    for remedy in (finding.remedy, failure.value.hint):
        assert "postgresql-<major>-wal2json" in remedy and 'source.plugin = "pgoutput"' in remedy


async def test_wal2json_needs_no_publication(both: Database) -> None:
    both.execute("DROP PUBLICATION outbox_relay")
    config = config_of(both, "wal2json")
    assert [finding.level for finding in await findings_of(config)] == ["ok"]
    async with running(config) as reader:
        with both.connect() as connection:
            insert(connection, "k")
        await until(reader, lambda sink: len(sink.events) == 1, "the event")


@pytest.mark.skipif(not hot.NATIVE, reason="the C part was not built: there is no C compiler")
async def test_rows_of_wal2json_are_laid_out_as_c_expects_them(both: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = left_to_python(monkeypatch)
    async with running(config_of(both, "wal2json")) as reader:
        with both.connect() as connection:
            insert(connection, "k", 50, text='é"\n\\')
            insert(connection, "k", 50)
        await until(reader, lambda sink: len(sink.events) == 100, "the events")
    assert len(slow) == 1  # the first row: its table was not known


def test_a_name_with_a_dot_is_refused() -> None:
    with pytest.raises(ValidationError, match="a name that itself contains a dot is not supported"):
        Config.model_validate({"outbox": [{"table": "my.schema.table"}]})
