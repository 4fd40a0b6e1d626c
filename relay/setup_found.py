"""What `relay setup` finds in the database before it does anything, and what it was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relay.adopt import Saved, count_unpublished
from relay.config import Columns, Config, Outbox
from relay.outbox import ClaimColumns
from relay.source.session import Session
from relay.source.slot import (
    PublicationInfo,
    ServerInfo,
    SlotInfo,
    TableInfo,
    fetch,
    publication_info,
    server_info,
    slot_info,
    split,
    table_info,
)

RELAY_TABLES = (
    "outbox_relay_checkpoint",
    "outbox_relay_history",
    "outbox_dead_letters",
    "outbox_relay_bookmarks",
    "outbox_relay_requests",
)


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    exists: bool
    replication: bool
    granted: bool  # it has every right of sql/roles.sql already


@dataclass(frozen=True, slots=True)
class Found:
    """What the database has before setup."""

    server: ServerInfo
    versions: Mapping[str, int]
    relay_tables: frozenset[str]
    schemas: frozenset[str]
    outboxes: Mapping[str, TableInfo | None]  # by the configured name
    growing: frozenset[str]  # outbox tables whose partitions setup keeps ahead
    publication: PublicationInfo
    role: Role | None
    unpublished: Mapping[str, int] = field(default_factory=dict)  # old rows of tables that are to be adopted
    broken_indexes: frozenset[str] = frozenset()
    slot: SlotInfo | None = None  # the one to be continued
    saved: Saved | None = None
    anchor: SlotInfo | None = None  # the one that exact replays read
    streamed: bool = False  # the relay's own slot is there, and whoever runs setup may copy it


@dataclass(frozen=True, slots=True)
class Wish:
    """What setup was asked for beyond the ordinary."""

    role: str | None = None
    partitioned: bool = False
    adopt: bool = False
    from_slot: str | None = None


async def look(session: Session, config: Config, wish: Wish) -> Found:
    """Everything that the plan depends on."""
    tables = [outbox.table for outbox in config.outbox]
    versions: dict[str, int] = {}
    if await table_info(session, "public.outbox_relay_version"):
        versions = dict(await fetch(session, "SELECT component, version FROM public.outbox_relay_version"))
    present = await fetch(
        session,
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relname = ANY(%s)",
        list(RELAY_TABLES),
    )
    growing = await fetch(
        session,
        """
        SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_proc f ON f.pronamespace = n.oid AND f.proname = 'outbox_add_partitions'
        WHERE c.relkind = 'p' AND n.nspname || '.' || c.relname = ANY(%s)
        """,
        tables,
    )
    outboxes = {table: await table_info(session, table) for table in tables}
    unpublished = {}
    broken = []
    if wish.adopt:
        for outbox in config.outbox:
            info = outboxes[outbox.table]
            unpublished[outbox.table] = await count_unpublished(session, outbox, info) if info else 0
        query = "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE NOT i.indisvalid"
        broken = [name for (name,) in await fetch(session, query)]
    return Found(
        server=await server_info(session),
        versions=versions,
        relay_tables=frozenset(name for (name,) in present),
        schemas=frozenset(name for (name,) in await fetch(session, "SELECT nspname FROM pg_namespace")),
        outboxes=outboxes,
        growing=frozenset(name for (name,) in growing),
        publication=await publication_info(session, config.source.publication),
        role=await _look_at_role(
            session, wish.role, [(outbox, written(config, outbox, outboxes[outbox.table])) for outbox in config.outbox]
        )
        if wish.role
        else None,
        unpublished=unpublished,
        broken_indexes=frozenset(broken),
        slot=await slot_info(session, wish.from_slot) if wish.from_slot else None,
        anchor=await slot_info(session, config.source.anchor.slot) if config.source.anchor.slot else None,
        streamed=await _streamed(session, config),
        saved=await _saved(session, config) if wish.from_slot and RELAY_TABLES[0] in {n for (n,) in present} else None,
    )


async def _streamed(session: Session, config: Config) -> bool:
    query = """
        SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND (rolreplication OR rolsuper))
           AND EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s AND slot_type = 'logical'
                       AND database = current_database() AND wal_status <> 'lost' AND confirmed_flush_lsn IS NOT NULL)
    """
    return bool((await fetch(session, query, config.source.slot))[0][0])


async def _saved(session: Session, config: Config) -> Saved | None:
    query = "SELECT slot, lsn::text, phase FROM public.outbox_relay_checkpoint WHERE relay = %s"
    rows = await fetch(session, query, config.relay.name)
    return Saved(*rows[0]) if rows else None


async def _look_at_role(session: Session, role: str, outboxes: Sequence[tuple[Outbox, Sequence[str]]]) -> Role:
    """`outboxes`: each with the columns that the relay sets."""
    rows = await fetch(session, "SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = %s", role)
    if not rows:
        return Role(role, exists=False, replication=False, granted=False)
    wanted = [("public", name, right) for name in RELAY_TABLES for right in ("SELECT", "INSERT", "UPDATE", "DELETE")]
    wanted += [(*split(outbox.table), "SELECT") for outbox, _ in outboxes] + [
        ("public", "outbox_relay_version", "SELECT")
    ]
    schemas, names, rights = (list(part) for part in zip(*wanted, strict=True))
    granted = await fetch(
        session,
        """
        SELECT coalesce(bool_and(coalesce(has_schema_privilege(%s, n.oid, 'USAGE')
                                          AND has_table_privilege(%s, c.oid, w.wanted), false)), false)
        FROM unnest(%s::text[], %s::text[], %s::text[]) AS w (schema, name, wanted)
        LEFT JOIN pg_namespace n ON n.nspname = w.schema
        LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name
        """,
        role,
        role,
        schemas,
        names,
        rights,
    )
    marked = [(*split(outbox.table), column) for outbox, columns in outboxes for column in columns]
    writes = await fetch(
        session,
        """
        SELECT coalesce(bool_and(has_column_privilege(%s, c.oid, a.attnum, 'UPDATE')), true)
        FROM unnest(%s::text[], %s::text[], %s::text[]) AS w (schema, name, wanted)
        JOIN pg_namespace n ON n.nspname = w.schema JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = w.wanted
        """,
        role,
        *[[each[place] for each in marked] for place in range(3)],
    )
    return Role(role, exists=True, replication=rows[0][0], granted=granted[0][0] and writes[0][0])


def written(config: Config, outbox: Outbox, table: TableInfo | None) -> list[str]:
    """Columns of an outbox table that the relay sets: what is written back, and what claiming notes."""
    if config.source.mode != "poll" or config.poll.strategy != "claim":
        return list(outbox.write_back)
    existing = (
        table.columns if table else (*Columns.model_fields, "published_at", "attempts", "next_attempt_at", "last_error")
    )
    return list(ClaimColumns.of(outbox, existing).written)


def ours(outbox: Outbox) -> bool:
    """Whether `relay setup` can make the table: it knows the default layout only."""
    return outbox.columns == Columns() and not outbox.header_columns


def making(outbox: Outbox) -> str:
    """What helps when a table of another layout is missing."""
    if outbox.preset:
        return (
            f"let the application make it, or name the right one in [[outbox]] table; or remove preset = "
            f'"{outbox.preset}" and let `relay setup` make the default table'
        )
    return (
        "create it with the columns that [outbox.columns] and header_columns name, or name the right one in [[outbox]] "
        "table; or remove both and let `relay setup` make the default table"
    )
