"""`relay check` on tables: the outbox tables as the configuration names them, and the relay's own. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from relay.config import Config, Outbox
from relay.finding import Finding, identifier, qualified
from relay.setup_found import RELAY_TABLES, making, ours
from relay.source.session import Session
from relay.source.slot import Column, PublicationInfo, ServerInfo, TableInfo, fetch, split, table_info

_JSON = {"json", "jsonb"}
# What comes of a table without seq or xid, by how its events are found.
_BLIND = {
    "stream": "it streams, but a gap after slot loss cannot be closed from it, and it is not audited",
    "snapshot": "it cannot be polled by snapshots",
    "claim": "its events are claimed, but can be replayed by --id or --key only",
}
_INTEGERS = {"bigint", "integer", "smallint"}


def absent(outbox: Outbox) -> TableInfo:
    return TableInfo(outbox.table, "r", "p", row_security=False, can_select=True, can_update=True, columns={})


def recoverable(outbox: Outbox, table: TableInfo) -> bool:
    return {outbox.columns.xid, outbox.columns.seq} <= set(table.columns)


def finding_events(config: Config) -> str:
    """How events are found, as far as it matters for what a table must have."""
    return config.poll.strategy if config.source.mode == "poll" else "stream"


def outbox_findings(outbox: Outbox, table: TableInfo | None, user: str, how: str = "stream") -> Iterator[Finding]:
    subject = outbox.table
    name = qualified(outbox.table)
    if table is None:
        remedy = "run `relay setup`, or correct [[outbox]] table" if ours(outbox) else making(outbox)
        yield Finding("error", subject, "the table does not exist", remedy)
        return
    if table.kind not in "rp":
        yield Finding("error", subject, "is not a table", "name the table itself: only tables are in the WAL")
        return
    if table.persistence != "p":
        yield Finding("error", subject, "is unlogged: its rows are not in the WAL", f"ALTER TABLE {name} SET LOGGED;")
    if not table.can_select:
        remedy = f"GRANT USAGE ON SCHEMA {identifier(split(outbox.table)[0])} TO {identifier(user)}; "
        remedy += f"GRANT SELECT ON {name} TO {identifier(user)};"
        yield Finding("error", subject, f"{user} may not read it: needed for recovery from the table", remedy)
    if table.row_security:
        yield Finding(
            "error",
            subject,
            f"row level security hides rows from {user}: recovery from the table would miss them",
            f"ALTER ROLE {identifier(user)} BYPASSRLS;",
        )
    wanted = {part: column for part, column in outbox.columns.model_dump().items() if column}
    wanted |= {f"header_columns.{header}": column for header, column in outbox.header_columns.items()}
    wanted |= {f"unpublished.{column}": column for column in outbox.unpublished}
    missing = [(part, column) for part, column in wanted.items() if column not in table.columns]
    # Nobody said that a foreign table has them: without them it streams all the same.
    unsaid = {"seq", "xid"} - outbox.columns.model_fields_set
    lacking = [part for part, _ in missing if part in unsaid]
    missing = [(part, column) for part, column in missing if part not in lacking]
    lacking += [part for part in ("seq", "xid") if part not in wanted]
    if lacking:
        yield _blind(outbox, name, lacking, how)
    for part, column in missing:
        key = part if "." in part else f"columns.{part}"
        yield Finding("error", subject, f"has no column {column}", _missing_column(part, column, key, name))
    faults = list(_columns(outbox, table, name))
    yield from faults
    if not missing and not faults:
        read = len(wanted.keys() - set(lacking))
        yield Finding("ok", subject, f"has the {read} columns that the relay reads")


def generated_findings(
    outbox: Outbox, table: TableInfo, publication: PublicationInfo, server: ServerInfo
) -> Iterator[Finding]:
    """Columns that the relay reads and that pgoutput does not send, because Postgres computes them."""
    read = {*outbox.columns.model_dump().values(), *outbox.header_columns.values()}
    for column in table.columns.values():
        if column.name not in read or not column.generated or (column.generated == "s" and publication.generated):
            continue
        remedy = f"ALTER TABLE {qualified(table.name)} ALTER COLUMN {identifier(column.name)} DROP EXPRESSION;  "
        remedy += "and let the application or a trigger fill it"
        if column.generated == "v":
            remedy = "make it a stored one, or an ordinary column that the application or a trigger fills"
        elif server.version_num >= 180000:
            remedy = f"ALTER PUBLICATION {identifier(publication.name)} SET (publish_generated_columns = stored);"
        yield Finding("error", table.name, f"{column.name} is a generated column: it is not streamed", remedy)


async def write_back_findings(
    session: Session, outbox: Outbox, table: TableInfo, user: str, columns: list[str]
) -> list[Finding]:
    subject = outbox.table
    unknown = [column for column in columns if column not in table.columns]
    if unknown:
        remedy = "correct outbox.write_back, or set it to {} if nobody reads such a column"
        return [Finding("error", subject, f"has no column {', '.join(unknown)} to write back", remedy)]
    query = "SELECT bool_and(has_column_privilege(%s::regclass, name, 'UPDATE')) FROM unnest(%s::text[]) AS name"
    ((allowed,),) = await fetch(session, query, qualified(outbox.table), columns)
    if not allowed:
        listed = ", ".join(identifier(column) for column in columns)
        remedy = f"GRANT UPDATE ({listed}) ON {qualified(outbox.table)} TO {identifier(user)};"
        return [Finding("error", subject, f"{user} may not write back {', '.join(columns)}", remedy)]
    return [Finding("ok", subject, f"{', '.join(columns)} are written back once the broker has acknowledged")]


def _blind(outbox: Outbox, name: str, lacking: list[str], how: str) -> Finding:
    columns = outbox.columns.model_dump()
    named = " and ".join(columns[part] or part for part in lacking)
    remedy = "run `relay setup --adopt` (--dry-run shows what it does)"
    if lacking == ["xid"] and how != "snapshot":
        remedy = _missing_column("xid", columns["xid"] or "xid", "columns.xid", name)
    elif emptied := [part for part in lacking if not columns[part]]:
        remedy = (
            f"name the column in outbox.columns.{emptied[0]}; or, where there is none, leave that line out and {remedy}"
        )
    if how == "snapshot":
        remedy += '  or set poll.strategy = "claim"'
    return Finding(
        "error" if how == "snapshot" else "warning", outbox.table, f"has no column {named}: {_BLIND[how]}", remedy
    )


def _missing_column(part: str, column: str, key: str, table: str) -> str:
    if part == "xid":
        # Nullable first: a default in the same statement would stamp every old row with the ALTER's own transaction.
        return (
            f"ALTER TABLE {table} ADD COLUMN {identifier(column)} xid8; "
            f"ALTER TABLE {table} ALTER COLUMN {identifier(column)} SET DEFAULT pg_current_xact_id(); "
            f'CREATE INDEX CONCURRENTLY ON {table} ({identifier(column)});  or set outbox.{key} = "" '
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
        quoted = identifier(column.name)
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
            remedy = f"ALTER TABLE {name} ALTER COLUMN {identifier(column.name)} ADD GENERATED ALWAYS AS IDENTITY;"
            yield Finding(
                "warning", subject, f"{column.name} is not an identity column: writers choose the order", remedy
            )
    if column := found.get("xid"):
        quoted = identifier(column.name)
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
    if (column := found.get("headers")) and column.type not in _JSON:
        remedy = 'name a json or jsonb column in outbox.columns.headers, or set it to ""'
        yield Finding("error", subject, f"{column.name} is {column.type}, not json or jsonb", remedy)
    if (column := found.get("created_at")) and not column.type.startswith("timestamp"):
        remedy = 'name a timestamptz column in outbox.columns.created_at, or set it to ""'
        yield Finding("error", subject, f"{column.name} is {column.type}, not timestamptz", remedy)


async def relay_table_findings(session: Session, user: str) -> list[Finding]:
    findings = []
    for table in RELAY_TABLES:
        info = await table_info(session, f"public.{table}")
        if info is None:
            findings.append(Finding("error", table, "the table does not exist", "run `relay setup`"))
        elif not (info.can_select and info.can_update):
            remedy = f"GRANT SELECT, INSERT, UPDATE, DELETE ON public.{table} TO {identifier(user)};"
            findings.append(Finding("error", table, f"{user} may not write it", remedy))
        else:
            findings.append(Finding("ok", table, f"{user} may read and write it"))
    return findings
