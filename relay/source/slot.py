"""Facts about the server, the slot, the publication and the tables, as plain values; PostgreSQL 14 and later.

Read by setup, check, status and the supervisor. Nothing here changes anything. Rows of the catalogue are read as JSON,
so that a column that only newer servers have is simply absent on older ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from relay.config import Database
from relay.errors import RelayError, SetupError, SlotBusy, SlotLost
from relay.lsn import LSN
from relay.source.session import Session, hanging_up, options_of, translated

_RECOVER = "`relay run` with source.mode = auto closes the gap from the table and makes a new slot"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version_num: int  # 150020 is 15.20
    version: str
    system_identifier: str
    timeline: int
    in_recovery: bool
    database: str
    user: str
    wal_level: str
    max_slot_wal_keep_size: int | None  # bytes; None: no limit
    max_replication_slots: int
    max_wal_senders: int
    wal_sender_timeout: float  # seconds; 0: never
    idle_replication_slot_timeout: float  # seconds; 0: never, or before 18
    used_slots: int
    used_wal_senders: int
    wal_lsn: LSN  # end of WAL


@dataclass(frozen=True, slots=True)
class SlotInfo:
    name: str
    slot_type: str = "logical"
    plugin: str | None = None
    database: str | None = None
    temporary: bool = False
    active: bool = False
    active_pid: int | None = None
    wal_status: str | None = None  # reserved, extended, unreserved, lost
    safe_wal_size: int | None = None  # bytes until it may be lost; None: no limit
    restart_lsn: LSN | None = None
    confirmed_flush_lsn: LSN | None = None
    invalidation_reason: str | None = None  # 17 and later; on 16 "conflicting"
    failover: bool = False  # 17 and later
    synced: bool = False  # 17 and later
    two_phase: bool = False


@dataclass(frozen=True, slots=True)
class PublishedTable:
    row_filter: bool = False  # 15 and later
    column_list: bool = False  # 15 and later


@dataclass(frozen=True, slots=True)
class PublicationInfo:
    name: str
    exists: bool = False
    insert: bool = False
    other_operations: tuple[str, ...] = ()
    via_root: bool = False
    all_tables: bool = False
    generated: bool = False  # stored generated columns, too (from 18 on)
    tables: dict[str, PublishedTable] = field(default_factory=dict)  # by schema.table


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    not_null: bool
    identity: bool
    default: str | None
    unique: bool  # it alone has a unique index without a predicate
    btree: bool  # it leads a btree index without a predicate
    generated: str  # s is stored, v virtual


@dataclass(frozen=True, slots=True)
class TableInfo:
    name: str  # schema.table
    kind: str  # pg_class.relkind: r is a table, p a partitioned one
    persistence: str  # p is logged
    row_security: bool  # policies hide rows from us
    can_select: bool
    can_update: bool
    columns: dict[str, Column]

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"


class Identity(NamedTuple):
    """Which server this is: LSNs mean nothing outside of it."""

    system_identifier: str
    timeline: int
    end_lsn: LSN  # end of WAL now
    database: str
    database_oid: int


async def identity_of(session: Session) -> Identity:
    """The same as IDENTIFY_SYSTEM, on an ordinary session."""
    rows = await fetch(
        session,
        """
        SELECT (SELECT system_identifier::text FROM pg_control_system()),
               ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int,
               pg_current_wal_insert_lsn()::text, datname, oid::bigint
        FROM pg_database WHERE datname = current_database()
        """,
    )
    system_identifier, timeline, end_lsn, database, oid = rows[0]
    return Identity(system_identifier, timeline, LSN.parse(end_lsn), database, oid)


def split(table: str) -> tuple[str, str]:
    """`schema.table` as the configuration has it."""
    schema, _, name = table.partition(".")
    return schema, name


async def fetch(session: Session, query: str, *args: Any) -> list[tuple[Any, ...]]:
    """All rows of a query; psycopg's errors translated."""
    with translated():
        cursor = await session.execute(query, args or None)
        return await cursor.fetchall()


async def server_info(session: Session) -> ServerInfo:
    # The timeline of the WAL that is being written: the control file only knows that of the last checkpoint.
    rows = await fetch(
        session,
        """
        SELECT current_setting('server_version_num')::int, current_setting('server_version'),
               (SELECT system_identifier::text FROM pg_control_system()),
               CASE WHEN pg_is_in_recovery() THEN (SELECT to_hex(timeline_id) FROM pg_control_checkpoint())
                    ELSE substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) END,
               pg_is_in_recovery(), current_database(), current_user::text,
               (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name IN
                  ('wal_level', 'max_slot_wal_keep_size', 'max_replication_slots', 'max_wal_senders',
                   'wal_sender_timeout', 'idle_replication_slot_timeout')),
               (SELECT unit FROM pg_settings WHERE name = 'idle_replication_slot_timeout'),
               (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication),
               (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text
        """,
    )
    number, version, system, timeline, standby, database, user, settings, idle_unit, slots, senders, lsn = rows[0]
    keep = int(settings["max_slot_wal_keep_size"])  # megabytes; -1 is no limit
    idle = float(settings.get("idle_replication_slot_timeout", 0)) * (60.0 if idle_unit == "min" else 1.0)
    return ServerInfo(
        version_num=number,
        version=version.split()[0],
        system_identifier=system,
        timeline=int(timeline, 16),
        in_recovery=standby,
        database=database,
        user=user,
        wal_level=settings["wal_level"],
        max_slot_wal_keep_size=None if keep < 0 else keep * 2**20,
        max_replication_slots=int(settings["max_replication_slots"]),
        max_wal_senders=int(settings["max_wal_senders"]),
        wal_sender_timeout=int(settings["wal_sender_timeout"]) / 1000,
        idle_replication_slot_timeout=idle,
        used_slots=slots,
        used_wal_senders=senders,
        wal_lsn=LSN.parse(lsn),
    )


async def slot_info(session: Session, name: str) -> SlotInfo | None:
    """The slot as the server shows it, or None when there is none of that name."""
    rows = await fetch(session, "SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = %s", name)
    if not rows:
        return None
    row: dict[str, Any] = rows[0][0]
    return SlotInfo(
        name=name,
        slot_type=row["slot_type"],
        plugin=row["plugin"],
        database=row["database"],
        temporary=row["temporary"],
        active=row["active"],
        active_pid=row["active_pid"],
        wal_status=row["wal_status"],
        safe_wal_size=row["safe_wal_size"],
        restart_lsn=_lsn(row["restart_lsn"]),
        confirmed_flush_lsn=_lsn(row["confirmed_flush_lsn"]),
        invalidation_reason=row.get("invalidation_reason") or ("conflicting" if row.get("conflicting") else None),
        failover=bool(row.get("failover")),
        synced=bool(row.get("synced")),
        two_phase=bool(row.get("two_phase")),
    )


def _lsn(text: str | None) -> LSN | None:
    return None if text is None else LSN.parse(text)


async def publication_info(session: Session, name: str) -> PublicationInfo:
    rows = await fetch(session, "SELECT to_jsonb(p) FROM pg_publication p WHERE pubname = %s", name)
    if not rows:
        return PublicationInfo(name)
    row: dict[str, Any] = rows[0][0]
    # The view shows leaves instead of a partitioned table unless via_root is set, and the schema's and the all-tables
    # publication's members; pg_publication_rel shows what was named, with filters and lists.
    tables = {
        table: PublishedTable()
        for (table,) in await fetch(
            session, "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s", name
        )
    }
    for table, row_filter, column_list in await fetch(
        session,
        """
        SELECT n.nspname || '.' || c.relname,
               coalesce(to_jsonb(r) ->> 'prqual', '') <> '', coalesce(to_jsonb(r) ->> 'prattrs', '') <> ''
        FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
        JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE p.pubname = %s
        """,
        name,
    ):
        tables[table] = PublishedTable(row_filter, column_list)
    return PublicationInfo(
        name,
        exists=True,
        insert=row["pubinsert"],
        other_operations=tuple(op for op in ("update", "delete", "truncate") if row[f"pub{op}"]),
        via_root=row["pubviaroot"],
        all_tables=row["puballtables"],
        generated=row.get("pubgencols") == "s",
        tables=tables,
    )


async def table_info(session: Session, table: str) -> TableInfo | None:
    """The table with its columns, or None when it does not exist."""
    rows = await fetch(
        session,
        """
        SELECT c.oid, c.relkind::text, c.relpersistence::text, row_security_active(c.oid),
               has_schema_privilege(n.oid, 'USAGE') AND
               (has_table_privilege(c.oid, 'SELECT') OR has_any_column_privilege(c.oid, 'SELECT')),
               has_schema_privilege(n.oid, 'USAGE') AND
               has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE')
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s
        """,
        *split(table),
    )
    if not rows:
        return None
    oid, kind, persistence, row_security, can_select, can_update = rows[0]
    columns = await fetch(
        session,
        """
        SELECT a.attname, format_type(a.atttypid, -1), -- without a length: `character` alone would be one character
               a.attnotnull, a.attidentity <> '',
               pg_get_expr(d.adbin, d.adrelid),
               EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
                         AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum),
               EXISTS (SELECT FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam
                       WHERE i.indrelid = a.attrelid AND m.amname = 'btree' AND i.indisvalid
                         AND i.indpred IS NULL AND i.indkey[0] = a.attnum),
               a.attgenerated::text
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
        """,
        oid,
    )
    return TableInfo(
        name=table,
        kind=kind,
        persistence=persistence,
        row_security=row_security,
        can_select=can_select,
        can_update=can_update,
        columns={row[0]: Column(*row) for row in columns},
    )


async def table_columns(session: Session, table: str) -> dict[str, str] | None:
    """Column → type, in the table's order; None when the table does not exist."""
    info = await table_info(session, table)
    return None if info is None else {name: column.type for name, column in info.columns.items()}


async def identify(database: Database) -> None:
    """Open a walsender and leave: proves the REPLICATION right, pg_hba.conf and a free wal sender."""
    with translated():
        with hanging_up():
            connection = await AsyncConnection.connect(
                database.conninfo(),
                autocommit=True,
                connect_timeout=max(1, round(database.connect_timeout)),
                application_name="relay check",
                options=options_of(database),
                replication="database",
            )
        try:
            await connection.execute("IDENTIFY_SYSTEM")
        finally:
            await connection.close()


def slot_fault(
    slot: SlotInfo | None, *, plugin: str, database: str, checkpoint_lsn: LSN | None, name: str = ""
) -> RelayError | None:
    """Why streaming cannot start from this slot, or None. Pure.

    The order matters: a slot that is in use moves on together with its owner's checkpoint, so that only an idle one can
    be judged by its position.
    """
    if slot is None:
        return SlotLost(f"the replication slot {name or 'of this relay'} does not exist", hint=_RECOVER)
    drop = f"name another slot in source.slot, or drop it: SELECT pg_drop_replication_slot('{slot.name}');"
    if slot.slot_type != "logical":
        return SetupError(f"the slot {slot.name} is a physical one", hint=drop)
    if slot.database != database:
        return SetupError(f"the slot {slot.name} belongs to database {slot.database}, not to {database}", hint=drop)
    if slot.plugin != plugin:
        return SetupError(f"the slot {slot.name} uses plugin {slot.plugin}, not {plugin}", hint=drop)
    if slot.two_phase:
        return SetupError(
            f"the slot {slot.name} was made with two_phase: it shows transactions that may still be rolled back",
            hint=drop,
        )
    if slot.wal_status == "lost" or slot.invalidation_reason:
        reason = slot.invalidation_reason or "its WAL was removed"
        return SlotLost(f"the slot {slot.name} was invalidated: {reason}", hint=_RECOVER)
    if slot.active:
        return SlotBusy(
            f"the slot {slot.name} is in use by process {slot.active_pid}",
            hint="another relay is active: this one stands by. A frozen one is thrown out after wal_sender_timeout",
        )
    if slot.confirmed_flush_lsn is None:
        return SlotLost(f"the slot {slot.name} was never finished", hint=_RECOVER)
    if checkpoint_lsn is not None and slot.confirmed_flush_lsn > checkpoint_lsn:
        return SlotLost(
            f"the slot {slot.name} was moved or made anew: it starts at {slot.confirmed_flush_lsn}, "
            f"the checkpoint is {checkpoint_lsn}",
            hint=_RECOVER,
        )
    return None
