"""`relay check`: looks at everything that `relay run` will need, and says what to fix and how.

It changes nothing in Postgres. All findings are reported, not only the first; each bad one has a remedy, as SQL to
paste where that helps. Opening the sink may create streams or topics, if the configuration asks for it, as `run` would.
Here: the order of looking, the server and the broker; tables, slots and standbys have files of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from relay.check_failover import failover_findings
from relay.check_slots import (
    anchor_findings,
    blockers,
    checkpoint_lsn,
    plugin_findings,
    publication_findings,
    slot_findings,
)
from relay.check_tables import (
    absent,
    finding_events,
    generated_findings,
    outbox_findings,
    recoverable,
    relay_table_findings,
    write_back_findings,
)
from relay.config import Config, Outbox
from relay.errors import ContractError, RelayError
from relay.finding import Finding, exit_code, render, size
from relay.setup_found import written
from relay.sink import open_sink
from relay.source.session import Session, connect
from relay.source.slot import (
    ServerInfo,
    SlotInfo,
    TableInfo,
    fetch,
    identify,
    publication_info,
    server_info,
    slot_info,
    table_info,
)

__all__ = ["Finding", "check", "exit_code", "render"]

# The first minor without the known bugs of logical decoding: data loss on a concurrent ALTER PUBLICATION, and the
# memory regression of its first fix.
_GOOD_MINOR = {14: 19, 15: 14, 16: 10, 17: 6}


async def check(config: Config, *, broker: bool = True, standbys: Sequence[str] = ()) -> list[Finding]:
    """Every finding, the good ones too. `standbys`: DSNs, to see whether the failover slot is synchronised to them."""
    if not broker:
        return await _postgres(config, standbys)
    # At the same time: either may make us wait for its whole time-out.
    findings, finding = await asyncio.gather(_postgres(config, standbys), _broker(config))
    return [*findings, finding]


async def _broker(config: Config) -> Finding:
    try:
        sink = open_sink(config)
        try:
            await sink.open()
        finally:
            await sink.close()
    except RelayError as exc:
        return Finding(
            "error", "broker", str(exc), exc.hint or "see that the broker runs and that its address is right"
        )
    return Finding("ok", "broker", f"{config.sink.kind} is reachable and every configured destination exists")


async def _postgres(config: Config, standbys: Sequence[str]) -> list[Finding]:
    try:
        session = await connect(config.database, "relay check")
    except RelayError as exc:
        return [
            Finding("error", "postgres", str(exc), exc.hint or "see that Postgres runs and that database.dsn is right")
        ]
    async with session:
        try:
            return await _inspect(session, config, standbys)
        except RelayError as exc:
            return [Finding("error", "postgres", str(exc), exc.hint or "run `relay check` again")]


async def _inspect(session: Session, config: Config, standbys: Sequence[str]) -> list[Finding]:
    server = await server_info(session)
    slot = await slot_info(session, config.source.slot)
    ((backend,),) = await fetch(session, "SELECT pg_backend_pid()")
    streams = config.source.mode != "poll"  # polling needs no slot, no publication, and no right to replicate
    findings = list(_server(server, streams=streams))
    findings += list(_streaming(server, slot)) if streams else []
    findings.append(_direct(backend == session.pgconn.backend_pid))
    findings += [await _replication(config)] if streams else []
    tables = [(outbox, await table_info(session, outbox.table)) for outbox in config.outbox]
    for outbox, table in tables:
        findings += list(outbox_findings(outbox, table, server.user, finding_events(config)))
        if table is not None:
            try:
                columns = written(config, outbox, table)
            except ContractError as exc:
                findings.append(Finding("error", outbox.table, str(exc), exc.hint))
            else:
                findings += await write_back_findings(session, outbox, table, server.user, columns) if columns else []
    findings += await relay_table_findings(session, server.user)
    findings += await _published(session, config, server, tables) if streams else []
    heals = config.source.mode == "auto" and all(table and recoverable(outbox, table) for outbox, table in tables)
    findings += list(slot_findings(slot, server, config, await checkpoint_lsn(session, config), heals=heals))
    if config.source.anchor.slot:
        findings += list(anchor_findings(await slot_info(session, config.source.anchor.slot), server, config))
    if config.source.failover and streams:
        findings += await failover_findings(session, config, server, slot, standbys)
    if slot is None and streams:
        findings += await blockers(session)
    return findings


async def _published(
    session: Session, config: Config, server: ServerInfo, tables: Sequence[tuple[Outbox, TableInfo | None]]
) -> list[Finding]:
    if config.source.plugin != "pgoutput":  # a plugin with a filter of its own needs no publication
        return await plugin_findings(session, config.source.plugin)
    publication = await publication_info(session, config.source.publication)
    findings = list(publication_findings(publication, [table or absent(outbox) for outbox, table in tables]))
    for outbox, table in tables:
        findings += generated_findings(outbox, table, publication, server) if table else []
    return findings


def _server(server: ServerInfo, *, streams: bool) -> Iterator[Finding]:
    major, minor = divmod(server.version_num, 10000)
    if major < 14:
        yield Finding("error", "version", f"PostgreSQL {server.version} is too old", "upgrade to 14 or later")
    elif streams and minor < _GOOD_MINOR.get(major, 0):
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


def _streaming(server: ServerInfo, slot: SlotInfo | None) -> Iterator[Finding]:
    """Settings that only matter to slots."""
    # From 19 on, `replica` is enough: the server switches by itself when the first logical slot is made.
    if server.wal_level != "logical" and server.version_num < 190000:
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
        yield Finding("ok", "max_slot_wal_keep_size", f"at most {size(server.max_slot_wal_keep_size)} of WAL is kept")
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
