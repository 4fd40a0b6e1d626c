"""`relay check`: looks at everything that `relay run` will need, and says what to fix and how.

It changes nothing in Postgres. All findings are reported, not only the first; each bad one has a remedy, as SQL to
paste where that helps. Opening the sink may create streams or topics, if the configuration asks for it, as `run` would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from relay.config import Config, Outbox
from relay.errors import ContractError, RelayError, SetupError, SlotBusy, SlotLost, SourceUnavailable
from relay.lsn import LSN
from relay.setup import RELAY_TABLES, written
from relay.sink import open_sink
from relay.source.session import Session, connect
from relay.source.slot import (
    Column,
    PublicationInfo,
    ServerInfo,
    SlotInfo,
    TableInfo,
    fetch,
    identify,
    publication_info,
    server_info,
    slot_fault,
    slot_info,
    split,
    table_info,
)

# The first minor without the known bugs of logical decoding: data loss on a concurrent ALTER PUBLICATION, and the
# memory regression of its first fix.
_GOOD_MINOR = {14: 19, 15: 14, 16: 10, 17: 6}
_JSON = {"json", "jsonb"}
_INTEGERS = {"bigint", "integer", "smallint"}
_LONG_TRANSACTION = 60.0  # seconds
_LISTED = re.compile(r'"((?:[^"]|"")*)"|([^",\s]+)')


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    message: str
    remedy: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    return 3 if any(finding.level == "error" for finding in findings) else 0


async def check(config: Config, *, broker: bool = True) -> list[Finding]:
    """Every finding, the good ones too."""
    findings = await _postgres(config)
    if broker:
        findings.append(await _broker(config))
    return findings


async def _broker(config: Config) -> Finding:
    sink = open_sink(config)
    try:
        await sink.open()
    except RelayError as exc:
        return Finding(
            "error", "broker", str(exc), exc.hint or "see that the broker runs and that its address is right"
        )
    finally:
        await sink.close()
    return Finding("ok", "broker", f"{config.sink.kind} is reachable and every configured destination exists")


async def _postgres(config: Config) -> list[Finding]:
    try:
        session = await connect(config.database, "relay check")
    except RelayError as exc:
        return [
            Finding("error", "postgres", str(exc), exc.hint or "see that Postgres runs and that database.dsn is right")
        ]
    async with session:
        try:
            return await _inspect(session, config)
        except RelayError as exc:
            return [Finding("error", "postgres", str(exc), exc.hint or "run `relay check` again")]


async def _inspect(session: Session, config: Config) -> list[Finding]:
    server = await server_info(session)
    slot = await slot_info(session, config.source.slot)
    ((backend,),) = await fetch(session, "SELECT pg_backend_pid()")
    findings = [*_server(server, slot), _direct(backend == session.pgconn.backend_pid), await _replication(config)]
    tables = [(outbox, await table_info(session, outbox.table)) for outbox in config.outbox]
    for outbox, table in tables:
        findings += list(_outbox(outbox, table, server.user))
        if table is not None:
            try:
                columns = written(config, outbox, table)
            except ContractError as exc:
                findings.append(Finding("error", outbox.table, str(exc), exc.hint))
            else:
                findings += await _write_back(session, outbox, table, server.user, columns) if columns else []
    findings += await _relay_tables(session, server.user)
    if config.source.plugin == "pgoutput":
        publication = await publication_info(session, config.source.publication)
        findings += list(_publication(publication, [table or _absent(outbox) for outbox, table in tables]))
    else:  # a plugin with a filter of its own needs no publication
        findings += await _plugin(session, config.source.plugin)
    heals = config.source.mode == "auto" and all(table and _recoverable(outbox, table) for outbox, table in tables)
    findings += list(_slot(slot, server, config, await _checkpoint_lsn(session, config), heals=heals))
    if config.source.anchor.slot:
        findings += list(_anchor(await slot_info(session, config.source.anchor.slot), server, config))
    if slot is None and config.source.mode != "poll":
        findings += await _blockers(session)
    return findings


def _server(server: ServerInfo, slot: SlotInfo | None) -> Iterator[Finding]:
    major, minor = divmod(server.version_num, 10000)
    if major < 14:
        yield Finding("error", "version", f"PostgreSQL {server.version} is too old", "upgrade to 14 or later")
    elif minor < _GOOD_MINOR.get(major, 0):
        yield Finding(
            "warning",
            "version",
            f"PostgreSQL {server.version} has known bugs in logical decoding",
            f"upgrade to {major}.{_GOOD_MINOR[major]} or later",
        )
    else:
        yield Finding("ok", "version", f"PostgreSQL {server.version}")
    if server.in_recovery:
        yield Finding("error", "primary", "this server is a standby", "point database.dsn at the primary")
    else:
        yield Finding("ok", "primary", f"primary of system {server.system_identifier}, timeline {server.timeline}")
    # From 19 on, `replica` is enough: the server switches by itself when the first logical slot is made.
    if server.wal_level != "logical" and major < 19:
        yield Finding(
            "error",
            "wal_level",
            f"wal_level is {server.wal_level}, not logical",
            "ALTER SYSTEM SET wal_level = 'logical';  then restart Postgres "
            "(RDS: rds.logical_replication = 1; Cloud SQL: cloudsql.logical_decoding = on)",
        )
    else:
        yield Finding("ok", "wal_level", f"wal_level is {server.wal_level}")
    if slot is None and server.used_slots >= server.max_replication_slots:
        yield Finding(
            "error",
            "max_replication_slots",
            f"all {server.max_replication_slots} replication slots are taken",
            f"ALTER SYSTEM SET max_replication_slots = {server.max_replication_slots + 5};  then restart Postgres",
        )
    else:
        used = f"{server.used_slots} of {server.max_replication_slots} replication slots are taken"
        yield Finding("ok", "max_replication_slots", used)
    if server.used_wal_senders >= server.max_wal_senders:
        yield Finding(
            "error",
            "max_wal_senders",
            f"all {server.max_wal_senders} wal senders are taken",
            f"ALTER SYSTEM SET max_wal_senders = {server.max_wal_senders + 5};  then restart Postgres",
        )
    else:
        used = f"{server.used_wal_senders} of {server.max_wal_senders} wal senders are taken"
        yield Finding("ok", "max_wal_senders", used)
    if server.max_slot_wal_keep_size is None:
        yield Finding(
            "warning",
            "max_slot_wal_keep_size",
            "WAL kept for slots has no limit: a relay that is down for long can fill the disk of Postgres",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf();  "
            "(choose what the disk can spare; a slot lost by it is recovered from the table)",
        )
    else:
        yield Finding("ok", "max_slot_wal_keep_size", f"at most {_size(server.max_slot_wal_keep_size)} of WAL is kept")
    if server.idle_replication_slot_timeout:
        yield Finding(
            "warning",
            "idle_replication_slot_timeout",
            f"a relay that is down for {server.idle_replication_slot_timeout:.0f} s loses its slot",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
        )


def _direct(same_process: bool) -> Finding:
    if same_process:
        return Finding("ok", "connection", "direct, no pooler in between")
    return Finding(
        "error",
        "connection",
        "a pooler stands between the relay and Postgres: its lock would belong to nobody",
        "point database.dsn at Postgres itself",
    )


async def _replication(config: Config) -> Finding:
    """By trying: roles, memberships of managed services and pg_hba.conf all have a say."""
    try:
        await identify(config.database)
    except RelayError as exc:
        return Finding(
            "error",
            "replication",
            str(exc),
            "ALTER ROLE … REPLICATION;  (RDS: GRANT rds_replication TO …), and let pg_hba.conf allow the role "
            "on the database by its name (the keyword replication does not match)",
        )
    return Finding("ok", "replication", "a replication connection can be opened")


def _absent(outbox: Outbox) -> TableInfo:
    return TableInfo(outbox.table, "r", "p", row_security=False, can_select=True, can_update=True, columns={})


def _outbox(outbox: Outbox, table: TableInfo | None, user: str) -> Iterator[Finding]:
    subject = outbox.table
    name = _quoted(outbox.table)
    if table is None:
        yield Finding("error", subject, "the table does not exist", "run `relay setup`, or correct [[outbox]] table")
        return
    if table.kind not in "rp":
        yield Finding("error", subject, "is not a table", "name the table itself: only tables are in the WAL")
        return
    if table.persistence != "p":
        yield Finding("error", subject, "is unlogged: its rows are not in the WAL", f"ALTER TABLE {name} SET LOGGED;")
    if not table.can_select:
        remedy = f"GRANT USAGE ON SCHEMA {_name(split(outbox.table)[0])} TO {_name(user)}; "
        remedy += f"GRANT SELECT ON {name} TO {_name(user)};"
        yield Finding("error", subject, f"{user} may not read it: needed for recovery from the table", remedy)
    if table.row_security:
        yield Finding(
            "error",
            subject,
            f"row level security hides rows from {user}: recovery from the table would miss them",
            f"ALTER ROLE {_name(user)} BYPASSRLS;",
        )
    wanted = {part: column for part, column in outbox.columns.model_dump().items() if column}
    wanted |= {f"header_columns.{header}": column for header, column in outbox.header_columns.items()}
    wanted |= {f"unpublished.{column}": column for column in outbox.unpublished}
    missing = [(part, column) for part, column in wanted.items() if column not in table.columns]
    # Nobody said that a foreign table has them: without them it streams all the same.
    unsaid = {"seq", "xid"} - outbox.columns.model_fields_set
    if any(part in unsaid for part, _ in missing):
        lacking = " and ".join(column for part, column in missing if part in unsaid)
        remedy = "run `relay setup --adopt` (--dry-run shows what it does)"
        if lacking == outbox.columns.xid:
            remedy = _missing_column("xid", lacking, "columns.xid", name)
        yield Finding(
            "warning",
            subject,
            f"has no column {lacking}: it streams, but a gap after slot loss cannot be closed from it, and it is not "
            "audited",
            remedy,
        )
        missing = [(part, column) for part, column in missing if part not in unsaid]
        wanted = {part: column for part, column in wanted.items() if part not in unsaid}
    for part, column in missing:
        key = part if "." in part else f"columns.{part}"
        yield Finding("error", subject, f"has no column {column}", _missing_column(part, column, key, name))
    faults = list(_columns(outbox, table, name))
    yield from faults
    if not missing and not faults:
        yield Finding("ok", subject, f"has the {len(wanted)} columns that the relay reads")


async def _write_back(
    session: Session, outbox: Outbox, table: TableInfo, user: str, columns: list[str]
) -> list[Finding]:
    subject = outbox.table
    unknown = [column for column in columns if column not in table.columns]
    if unknown:
        remedy = "correct outbox.write_back, or set it to {} if nobody reads such a column"
        return [Finding("error", subject, f"has no column {', '.join(unknown)} to write back", remedy)]
    query = "SELECT bool_and(has_column_privilege(%s::regclass, name, 'UPDATE')) FROM unnest(%s::text[]) AS name"
    ((allowed,),) = await fetch(session, query, _quoted(outbox.table), columns)
    if not allowed:
        listed = ", ".join(_name(column) for column in columns)
        remedy = f"GRANT UPDATE ({listed}) ON {_quoted(outbox.table)} TO {_name(user)};"
        return [Finding("error", subject, f"{user} may not write back {', '.join(columns)}", remedy)]
    return [Finding("ok", subject, f"{', '.join(columns)} are written back once the broker has acknowledged")]


def _missing_column(part: str, column: str, key: str, table: str) -> str:
    if part == "xid":
        # Nullable first: a default in the same statement would stamp every old row with the ALTER's own transaction.
        return (
            f"ALTER TABLE {table} ADD COLUMN {_name(column)} xid8; "
            f"ALTER TABLE {table} ALTER COLUMN {_name(column)} SET DEFAULT pg_current_xact_id(); "
            f'CREATE INDEX CONCURRENTLY ON {table} ({_name(column)});  or set outbox.{key} = "" '
            "(then the table cannot be used to close a gap)"
        )
    if part in ("id", "payload") or "." in part:
        return f"name the right column in outbox.{key}"
    return f'name the right column in outbox.{key}, or set it to "" if the table has none'


def _columns(outbox: Outbox, table: TableInfo, name: str) -> Iterator[Finding]:
    """Columns that are there but not as they should be."""
    subject = outbox.table
    parts = outbox.columns.model_dump()
    found: dict[str, Column] = {part: table.columns[c] for part, c in parts.items() if c in table.columns}
    if column := found.get("id"):
        quoted = _name(column.name)
        if not column.not_null:
            remedy = f"ALTER TABLE {name} ALTER COLUMN {quoted} SET NOT NULL;"
            yield Finding("warning", subject, f"{column.name} may be NULL: such a row cannot be published", remedy)
        if not column.unique and not table.partitioned:  # there a unique index would have to contain the partition key
            remedy = f"CREATE UNIQUE INDEX CONCURRENTLY ON {name} ({quoted});"
            yield Finding(
                "warning", subject, f"{column.name} is not unique: consumers drop the second of a pair", remedy
            )
    if column := found.get("seq"):
        if column.type not in _INTEGERS:
            remedy = "name an identity column in outbox.columns.seq"
            yield Finding("error", subject, f"{column.name} is {column.type}, not an integer", remedy)
        elif not column.identity and not (column.default or "").startswith("nextval"):
            remedy = f"ALTER TABLE {name} ALTER COLUMN {_name(column.name)} ADD GENERATED ALWAYS AS IDENTITY;"
            yield Finding(
                "warning", subject, f"{column.name} is not an identity column: writers choose the order", remedy
            )
    if column := found.get("xid"):
        quoted = _name(column.name)
        if column.type != "xid8":
            remedy = 'name an xid8 column in outbox.columns.xid, or set it to ""'
            yield Finding("error", subject, f"{column.name} is {column.type}, not xid8", remedy)
        else:
            if "pg_current_xact_id" not in (column.default or ""):
                remedy = f"ALTER TABLE {name} ALTER COLUMN {quoted} SET DEFAULT pg_current_xact_id();"
                yield Finding("error", subject, f"{column.name} does not default to the transaction's id", remedy)
            if not column.btree:
                remedy = f"CREATE INDEX CONCURRENTLY ON {name} ({quoted});"
                yield Finding("warning", subject, f"{column.name} has no index: recovery reads the whole table", remedy)
    elif not parts["xid"]:
        yield Finding(
            "warning",
            subject,
            "has no xid column: it streams, but a gap after slot loss cannot be closed from it, and it is not audited",
            _missing_column("xid", "xid", "columns.xid", name),
        )
    if (column := found.get("headers")) and column.type not in _JSON:
        remedy = 'name a json or jsonb column in outbox.columns.headers, or set it to ""'
        yield Finding("error", subject, f"{column.name} is {column.type}, not json or jsonb", remedy)
    if (column := found.get("created_at")) and not column.type.startswith("timestamp"):
        remedy = 'name a timestamptz column in outbox.columns.created_at, or set it to ""'
        yield Finding("error", subject, f"{column.name} is {column.type}, not timestamptz", remedy)


async def _relay_tables(session: Session, user: str) -> list[Finding]:
    findings = []
    for table in RELAY_TABLES:
        info = await table_info(session, f"public.{table}")
        if info is None:
            findings.append(Finding("error", table, "the table does not exist", "run `relay setup`"))
        elif not (info.can_select and info.can_update):
            remedy = f"GRANT SELECT, INSERT, UPDATE, DELETE ON public.{table} TO {_name(user)};"
            findings.append(Finding("error", table, f"{user} may not write it", remedy))
        else:
            findings.append(Finding("ok", table, f"{user} may read and write it"))
    return findings


def _publication(publication: PublicationInfo, tables: Sequence[TableInfo]) -> Iterator[Finding]:
    subject = f"publication {publication.name}"
    name = _name(publication.name)
    if not publication.exists:
        # PostgreSQL 18 streams without it, and silently leaves the events out.
        wanted = ", ".join(_quoted(table.name) for table in tables)
        remedy = f"run `relay setup`, or: CREATE PUBLICATION {name} FOR TABLE {wanted} "
        remedy += "WITH (publish = 'insert', publish_via_partition_root = true);"
        yield Finding("error", subject, "does not exist", remedy)
        return
    good = True
    if not publication.insert:
        good = False
        remedy = f"ALTER PUBLICATION {name} SET (publish = 'insert');"
        yield Finding("error", subject, "does not publish inserts", remedy)
    for table in tables:
        quoted = _quoted(table.name)
        published = publication.tables.get(table.name)
        if published is None and not publication.all_tables:
            good = False
            remedy = f"run `relay setup`, or: ALTER PUBLICATION {name} ADD TABLE {quoted};"
            yield Finding("error", subject, f"does not contain {table.name}", remedy)
        elif published and (published.row_filter or published.column_list):
            good = False
            what = "a row filter" if published.row_filter else "a column list"
            remedy = f"BEGIN; ALTER PUBLICATION {name} DROP TABLE {quoted}; "
            remedy += f"ALTER PUBLICATION {name} ADD TABLE {quoted}; COMMIT;"
            yield Finding("error", subject, f"has {what} on {table.name}: events would be missing or cut", remedy)
        if table.partitioned and not publication.via_root:
            good = False
            remedy = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true);"
            yield Finding("error", subject, f"publishes the partitions of {table.name} instead of the table", remedy)
    if publication.insert and publication.other_operations:
        others = ", ".join(publication.other_operations)
        remedy = f"ALTER PUBLICATION {name} SET (publish = 'insert');"
        yield Finding("warning", subject, f"also publishes {others}, which costs and is thrown away", remedy)
    if good:
        yield Finding("ok", subject, f"publishes inserts of {', '.join(table.name for table in tables)}")


async def _plugin(session: Session, plugin: str) -> list[Finding]:
    """An output plugin that is not built in: is it allowed, is it there?"""
    subject = f"plugin {plugin}"
    # Unknown to servers before the minors of August 2026: they allow whatever is installed.
    ((setting,),) = await fetch(session, "SELECT current_setting('output_plugin_libraries', true)")
    allowed = None if setting is None else libraries(setting)
    if allowed is not None and plugin not in allowed:
        # A list in a single pair of quotes would be taken as one name; whoever wrote it that way meant its parts.
        meant = dict.fromkeys(part.strip() for name in allowed for part in name.split(","))
        wanted = ",".join(f"'{name}'" for name in (*(meant or ("pgoutput", "test_decoding")), plugin) if name)
        if plugin in meant:
            wanted = ",".join(f"'{name}'" for name in meant)
        remedy = f"ALTER SYSTEM SET output_plugin_libraries = {wanted}; SELECT pg_reload_conf();  "
        remedy += "(each name in quotes of its own: one quoted list is taken as a single name)"
        return [Finding("error", subject, f"is not among output_plugin_libraries ({setting})", remedy)]
    try:
        loaded = await _loads(session, plugin)
    except SetupError as exc:
        return [Finding("error", subject, str(exc), exc.hint)]
    return [Finding("ok", subject, "is installed and allowed")] if loaded else []


async def _loads(session: Session, plugin: str) -> bool:
    """Only Postgres knows whether the library is there: a temporary slot loads it, and is gone with the session."""
    name = f"relay_check_{session.pgconn.backend_pid}"
    try:
        await fetch(session, "SELECT set_config('lock_timeout', '500ms', false)")
        await fetch(session, "SELECT pg_create_logical_replication_slot(%s, %s, true)", name, plugin)
        await fetch(session, "SELECT pg_drop_replication_slot(%s)", name)
    except SourceUnavailable:
        return True  # somebody's transaction made the slot wait: by then the library was loaded
    except RelayError as exc:
        if isinstance(exc, SetupError) and "output plugin" in str(exc):
            raise
        return False  # no right to replicate, no free slot, wrong wal_level: said elsewhere
    return True


def libraries(setting: str) -> list[str]:
    """The names in a list parameter as Postgres shows it: bare, or in double quotes."""
    return [quoted.replace('""', '"') or bare for quoted, bare in _LISTED.findall(setting)]


async def _checkpoint_lsn(session: Session, config: Config) -> LSN | None:
    table = await table_info(session, "public.outbox_relay_checkpoint")
    if table is None or not table.can_select:
        return None
    query = "SELECT lsn::text FROM public.outbox_relay_checkpoint WHERE relay = %s AND phase <> 'new'"
    rows = await fetch(session, query, config.relay.name)
    return LSN.parse(rows[0][0]) if rows else None


def _recoverable(outbox: Outbox, table: TableInfo) -> bool:
    return {outbox.columns.xid, outbox.columns.seq} <= set(table.columns)


def _slot(
    slot: SlotInfo | None, server: ServerInfo, config: Config, checkpoint: LSN | None, *, heals: bool
) -> Iterator[Finding]:
    subject = f"slot {config.source.slot}"
    if slot is None and config.source.mode == "poll":
        yield Finding("ok", subject, 'does not exist: source.mode = "poll" needs none')
        return
    if slot is None and checkpoint is None:
        yield Finding("ok", subject, "does not exist yet: the first `relay run` creates it")
        return
    fault = slot_fault(
        slot, plugin=config.source.plugin, database=server.database, checkpoint_lsn=checkpoint, name=config.source.slot
    )
    if isinstance(fault, SlotBusy):
        yield Finding("ok", subject, f"in use: {fault}")
    elif fault is not None:
        # What the next run cures by itself is no reason to keep it from starting.
        level: Level = "warning" if heals and isinstance(fault, SlotLost) else "error"
        yield Finding(level, subject, str(fault), fault.hint)
        return
    if slot is None:
        return
    if slot.wal_status == "unreserved" or (slot.safe_wal_size is not None and slot.safe_wal_size <= 0):
        remedy = "start the relay, see why it lags, or raise max_slot_wal_keep_size: ALTER SYSTEM SET "
        remedy += "max_slot_wal_keep_size = '100GB'; SELECT pg_reload_conf();"
        yield Finding("warning", subject, "will be lost at the next checkpoint of Postgres", remedy)
    elif slot.safe_wal_size is not None and slot.safe_wal_size < (server.max_slot_wal_keep_size or 0) / 5:
        remedy = "start the relay, or see why it lags (`relay status`)"
        yield Finding("warning", subject, f"will be lost after {_size(slot.safe_wal_size)} more of WAL", remedy)
    elif fault is None:
        yield Finding("ok", subject, f"confirmed up to {slot.confirmed_flush_lsn}")


def _anchor(anchor: SlotInfo | None, server: ServerInfo, config: Config) -> Iterator[Finding]:
    subject = f"anchor slot {config.source.anchor.slot}"
    if config.source.mode == "poll":
        yield Finding("warning", subject, 'is not kept: source.mode is "poll"', "remove [source.anchor]")
        return
    if anchor is None:
        yield Finding("ok", subject, "does not exist yet: the relay makes it while it streams")
    elif anchor.slot_type != "logical" or anchor.database != server.database:
        remedy = "name another in source.anchor.slot"
        yield Finding("error", subject, "is not a logical slot of this database", remedy)
    elif anchor.wal_status == "lost" or anchor.invalidation_reason:
        reason = anchor.invalidation_reason or "its WAL was removed"
        remedy = "the active relay makes it anew; lower source.anchor.max_wal or raise max_slot_wal_keep_size"
        yield Finding("warning", subject, f"was invalidated: {reason}", remedy)
    elif anchor.wal_status == "unreserved":
        remedy = "start the relay: it lets the anchor go before it is lost"
        yield Finding("warning", subject, "will be lost at the next checkpoint of Postgres", remedy)
    else:
        kept = max(0, server.wal_lsn - (anchor.restart_lsn or server.wal_lsn))
        yield Finding("ok", subject, f"replays from {anchor.confirmed_flush_lsn} on are exact; keeps {_size(kept)}")
    bound = server.max_slot_wal_keep_size
    if bound is not None and config.source.anchor.max_wal > bound // 2:
        remedy = "ALTER SYSTEM SET max_slot_wal_keep_size = "
        remedy += f"'{2 * config.source.anchor.max_wal // 2**20}MB'; SELECT pg_reload_conf();  or lower "
        yield Finding(
            "warning",
            subject,
            f"is kept within {_size(bound // 2)}, half of max_slot_wal_keep_size, not source.anchor.max_wal",
            remedy + "source.anchor.max_wal",
        )
    spare = server.max_replication_slots - server.used_slots
    if spare < (2 if anchor is None else 1):
        remedy = f"ALTER SYSTEM SET max_replication_slots = {server.max_replication_slots + 5};  then restart Postgres"
        yield Finding("warning", subject, "leaves no slot for an exact replay, which needs one for itself", remedy)


async def _blockers(session: Session) -> list[Finding]:
    """Making a slot waits for every transaction that has an xid, in any database."""
    rows = await fetch(
        session,
        """
        SELECT 'process ' || pid, extract(epoch FROM now() - xact_start)::float,
               format('SELECT pg_terminate_backend(%s);', pid)
        FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
        UNION ALL
        SELECT 'prepared transaction ' || gid, extract(epoch FROM now() - prepared)::float,
               format('COMMIT PREPARED %1$L;  or  ROLLBACK PREPARED %1$L;', gid)
        FROM pg_prepared_xacts
        """,
    )
    return [
        Finding(
            "warning",
            "transactions",
            f"{who} is open since {age:.0f} s: the first `relay run` waits for it to end before it can stream",
            remedy,
        )
        for who, age, remedy in rows
        if age is not None and (age > _LONG_TRANSACTION or who.startswith("prepared"))
    ]


def _name(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _quoted(table: str) -> str:
    return sql.Identifier(*split(table)).as_string(None)


def _size(count: int) -> str:
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def render(findings: Sequence[Finding]) -> RenderableType:
    """For people: a mark, what was looked at, what was found, and what to do about it."""
    table = Table.grid(padding=(0, 2))
    marks = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}
    for finding in findings:
        message = Text(finding.message)
        if finding.remedy and finding.level != "ok":
            message.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(marks[finding.level], Text(finding.subject, style="bold"), message)
    return table
