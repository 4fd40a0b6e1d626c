"""`relay check` on what is streamed: publication, output plugin, the slot and the anchor. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from relay.config import Config
from relay.errors import RelayError, SetupError, SlotBusy, SlotLost, SourceUnavailable
from relay.finding import Finding, Level, identifier, qualified, size
from relay.lsn import LSN
from relay.source.session import Session
from relay.source.slot import PublicationInfo, ServerInfo, SlotInfo, TableInfo, fetch, slot_fault, table_info

_LONG_TRANSACTION = 60.0  # seconds
_LISTED = re.compile(r'"((?:[^"]|"")*)"|([^",\s]+)')


def publication_findings(publication: PublicationInfo, tables: Sequence[TableInfo]) -> Iterator[Finding]:
    subject = f"publication {publication.name}"
    name = identifier(publication.name)
    if not publication.exists:
        # PostgreSQL 18 streams without it, and silently leaves the events out.
        wanted = ", ".join(qualified(table.name) for table in tables)
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
        quoted = qualified(table.name)
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


async def plugin_findings(session: Session, plugin: str) -> list[Finding]:
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


async def checkpoint_lsn(session: Session, config: Config) -> LSN | None:
    table = await table_info(session, "public.outbox_relay_checkpoint")
    if table is None or not table.can_select:
        return None
    query = "SELECT lsn::text FROM public.outbox_relay_checkpoint WHERE relay = %s AND phase <> 'new'"
    rows = await fetch(session, query, config.relay.name)
    return LSN.parse(rows[0][0]) if rows else None


def slot_findings(
    slot: SlotInfo | None, server: ServerInfo, config: Config, checkpoint: LSN | None, *, heals: bool
) -> Iterator[Finding]:
    subject = f"slot {config.source.slot}"
    if config.source.mode == "poll":
        yield _unneeded(slot, subject)
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
        yield Finding("warning", subject, f"will be lost after {size(slot.safe_wal_size)} more of WAL", remedy)
    elif fault is None:
        yield Finding("ok", subject, f"confirmed up to {slot.confirmed_flush_lsn}")


def _unneeded(slot: SlotInfo | None, subject: str) -> Finding:
    if slot is None:
        return Finding("ok", subject, 'does not exist: source.mode = "poll" needs none')
    if slot.active:
        return Finding("ok", subject, f'in use by process {slot.active_pid}: source.mode = "poll" needs none')
    return Finding(
        "warning",
        subject,
        'keeps WAL, and source.mode = "poll" needs no slot',
        "`relay run` drops it if this relay streamed from it; if nobody else needs it: "
        f"SELECT pg_drop_replication_slot('{slot.name}');",
    )


def anchor_findings(anchor: SlotInfo | None, server: ServerInfo, config: Config) -> Iterator[Finding]:
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
        yield Finding("ok", subject, f"replays from {anchor.confirmed_flush_lsn} on are exact; keeps {size(kept)}")
    bound = server.max_slot_wal_keep_size
    if bound is not None and config.source.anchor.max_wal > bound // 2:
        remedy = "ALTER SYSTEM SET max_slot_wal_keep_size = "
        remedy += f"'{2 * config.source.anchor.max_wal // 2**20}MB'; SELECT pg_reload_conf();  or lower "
        yield Finding(
            "warning",
            subject,
            f"is kept within {size(bound // 2)}, half of max_slot_wal_keep_size, not source.anchor.max_wal",
            remedy + "source.anchor.max_wal",
        )
    spare = server.max_replication_slots - server.used_slots
    if spare < (2 if anchor is None else 1):
        remedy = f"ALTER SYSTEM SET max_replication_slots = {server.max_replication_slots + 5};  then restart Postgres"
        yield Finding("warning", subject, "leaves no slot for an exact replay, which needs one for itself", remedy)


async def blockers(session: Session) -> list[Finding]:
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
