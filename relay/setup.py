"""`relay setup`: makes what the relay needs in Postgres, from the files in sql/. Run it as often as you like.

First everything is looked at, then a plan is made (pure), then it is carried out in one transaction; a dry run stops
before that. Adopting tables (adopt.py) comes after it, table by table. It never drops or rewrites anything, and it
never makes the relay's slot: the first `relay run` does, because the publication must exist before it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from psycopg import sql
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from relay.adopt import Saved, Step, adoption, continued, count_unpublished
from relay.config import Columns, Config, Outbox
from relay.errors import AuthError, ConfigError, ContractError, SetupError, SourceUnavailable
from relay.outbox import ClaimColumns
from relay.source.session import Session, connect, translated
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
VERSION = 6  # the highest numbered file
_RELAY_VERSION = 6  # the highest file that changes the relay's own tables
ATTEMPTS = 30  # to get the lock that adopting a table needs
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('outbox_relay_setup', 0))"


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


async def setup(
    config: Config,
    *,
    dry_run: bool = False,
    role: str | None = None,
    partitioned: bool = False,
    adopt: bool = False,
    from_slot: str | None = None,
    publication: str | None = None,
) -> list[Step]:
    """Make what is missing; returns what was done, or with `dry_run` what would be."""
    wish = Wish(role, partitioned, adopt, from_slot)
    _agree(config, from_slot, publication)
    session = await connect(config.database, "relay setup")
    async with session:
        if dry_run:
            return plan(config, await look(session, config, wish), wish)
        try:
            with translated():
                async with session.transaction():
                    # A second setup waits here, and then finds everything present.
                    await session.execute("SET LOCAL lock_timeout = '60s'")
                    await session.execute(_LOCK)
                    await session.execute("SET LOCAL lock_timeout = '10s'")
                    steps = plan(config, await look(session, config, wish), wish)
                    done = [step if step.alone else await _carry_out(session, step) for step in steps]
            for step in done:
                if step.alone:
                    await _patiently(session, step)
            return done
        except AuthError as exc:
            raise AuthError(
                str(exc),
                hint="run setup as the owner of the database and its outbox tables, "
                "or give the output of `relay setup --dry-run` to somebody who is",
            ) from exc


def _agree(config: Config, slot: str | None, publication: str | None) -> None:
    """`relay run` will read them from the configuration: what the command line says must stand there, too."""
    said = {"slot": (slot, config.source.slot), "publication": (publication, config.source.publication)}
    faults = [
        f"source.{name} is {configured!r} in the configuration, not {asked!r}"
        for name, (asked, configured) in said.items()
        if asked is not None and asked != configured
    ]
    if faults:
        lines = ", ".join(f'{name} = "{asked}"' for name, (asked, _) in said.items() if asked is not None)
        raise ConfigError(faults, hint=f"write under [source] of relay.toml: {lines}")


async def _patiently(session: Session, step: Step) -> None:
    """A step that needs a lock which writers have, too: ask for it briefly, again and again."""
    for left in range(ATTEMPTS - 1, -1, -1):
        try:
            with translated():
                await session.execute("SET lock_timeout = '10s'")
                await session.execute(step.sql.encode())
        except SourceUnavailable as exc:
            if session.closed:
                raise
            await session.rollback()
            if not left:
                raise SetupError(
                    f"{step.subject}: {exc}",
                    hint="a long transaction holds the table: SELECT pid, xact_start, query FROM pg_stat_activity "
                    "WHERE xact_start IS NOT NULL ORDER BY xact_start; run setup again when it is over",
                ) from exc
            await asyncio.sleep(0.3)
        else:
            return


async def _carry_out(session: Session, step: Step) -> Step:
    if not step.sql:
        return step
    # Without parameters psycopg sends the text as it is, so that one step may be several statements.
    cursor = await session.execute(step.sql.encode())
    if step.action == "present":  # SQL that finds out by itself whether there is something to do
        row = await cursor.fetchone()
        return replace(step, action="altered") if row and row[0] else step
    return step


def script(steps: Sequence[Step]) -> str:
    """The plan as a script to paste into psql."""
    parts = [f"-- {step.subject}\n{step.sql.strip()}\n" for step in steps if step.sql and not step.alone]
    alone = [f"-- {step.subject}: {step.note}\n{step.sql.strip()}\n" for step in steps if step.sql and step.alone]
    notes = [f"-- note: {step.subject}: {step.note}\n" for step in steps if step.note and not step.alone]
    if not parts and not alone:
        return "".join(notes) + "-- nothing to do\n"
    text = "".join(notes) + ("BEGIN;\n\n" + "\n".join(parts) + "\nCOMMIT;\n" if parts else "")
    return text + "".join(f"\n{each}" for each in alone)


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


def plan(config: Config, found: Found, wish: Wish) -> list[Step]:
    """What to do, in order. Raises when only a person can decide. Pure."""
    _refuse(found)
    steps = [_relay_tables(found)]
    for outbox in config.outbox:
        steps += _outbox(outbox, found, partitioned=wish.partitioned)
    steps += _publication(config, found)
    if wish.from_slot is not None:
        steps.append(continued(config, found.server, found.slot, found.saved, wish.from_slot))
    if found.role:
        steps += _role(found.role, config, found)
    if config.source.anchor.slot and config.source.mode != "poll":
        steps.append(_anchor(config, found))
    for outbox in config.outbox:
        table = found.outboxes[outbox.table]
        if wish.adopt and table is not None:
            count = found.unpublished[outbox.table]
            steps += adoption(outbox, table, unpublished=count, broken=found.broken_indexes)
    return steps


def _refuse(found: Found) -> None:
    if found.server.version_num < 140000:
        raise SetupError(f"PostgreSQL {found.server.version} is too old", hint="the relay needs 14 or later")
    if found.server.in_recovery:
        raise SetupError("this server is a standby", hint="point database.dsn at the primary")
    newer = [component for component, version in found.versions.items() if version > VERSION]
    if newer:
        raise SetupError(
            f"the database was set up by a newer relay ({', '.join(sorted(newer))})", hint="upgrade this relay"
        )


def _relay_tables(found: Found) -> Step:
    subject = "relay tables " + ", ".join(RELAY_TABLES)
    missing = set(RELAY_TABLES) - found.relay_tables
    if not missing and found.versions.get("relay", 0) >= _RELAY_VERSION:
        return Step(subject, "present")
    text = "\n".join(map(load, ("001_version.sql", "002_relay_tables.sql", "006_replay.sql")))
    return Step(subject, "altered" if found.relay_tables else "created", text)


def _outbox(outbox: Outbox, found: Found, *, partitioned: bool) -> list[Step]:
    schema, name = split(outbox.table)
    subject = f"outbox table {outbox.table}"
    table = found.outboxes[outbox.table]
    if table is not None:
        if partitioned and not table.partitioned:
            return [Step(subject, "warning", note="exists and is not partitioned; it was left as it is")]
        steps = [Step(subject, "present")]
        if outbox.table in found.growing:
            parent = sql.Literal(f"{_identifier(schema)}.{_identifier(name)}").as_string(None)
            grow = f"SELECT {_identifier(schema)}.outbox_add_partitions({parent}::regclass);"
            steps.append(Step(f"partitions of {outbox.table}", "present", grow))
        return steps
    if outbox.columns != Columns() or outbox.header_columns:
        raise ContractError(
            f"the table {outbox.table} does not exist, and its columns are not the default ones",
            hint="create it with the columns that [outbox.columns] names, or remove that section "
            "and let `relay setup` create the default table",
        )
    steps = []
    if schema not in found.schemas:
        steps.append(Step(f"schema {schema}", "created", f"CREATE SCHEMA IF NOT EXISTS {_identifier(schema)};"))
    native = found.server.version_num >= 180000
    if not native:
        text = load("003_uuidv7.sql", {"schema": schema})
        steps.append(Step(f"function {schema}.outbox_uuidv7()", "created", text))
    variables = {
        "schema": schema,
        "table": name,
        "component": f"outbox:{outbox.table}",
        "xid_index": f"{name}_xid_idx",
        "unpublished_index": f"{name}_unpublished_idx",
        "waiting_index": f"{name}_waiting_idx",
        "id_index": f"{name}_id_idx",
        "default_partition": f"{name}_default",
    }
    raw = {"uuidv7": "uuidv7()" if native else f"{_identifier(schema)}.outbox_uuidv7()"}
    source = "004_outbox_events_partitioned.sql" if partitioned else "004_outbox_events.sql"
    return [*steps, Step(subject, "created", load(source, variables, raw))]


def _publication(config: Config, found: Found) -> list[Step]:
    publication = found.publication
    name = _identifier(publication.name)
    subject = f"publication {publication.name}"
    tables = [outbox.table for outbox in config.outbox]
    if not publication.exists:
        raw = {"tables": ", ".join(_qualified(table) for table in tables)}
        return [Step(subject, "created", load("005_publication.sql", {"publication": publication.name}, raw))]
    if not publication.insert:
        raise SetupError(
            f"the publication {publication.name} does not publish inserts",
            hint=f"ALTER PUBLICATION {name} SET (publish = 'insert');",
        )
    for table in tables:
        published = publication.tables.get(table)
        if published and (published.row_filter or published.column_list):
            what = "a row filter" if published.row_filter else "a column list"
            raise SetupError(
                f"the publication {publication.name} has {what} on {table}: events would be missing or incomplete",
                hint=f"ALTER PUBLICATION {name} DROP TABLE {_qualified(table)}; "
                f"ALTER PUBLICATION {name} ADD TABLE {_qualified(table)};  (in one transaction)",
            )
    statements = []
    missing = [table for table in tables if table not in publication.tables]
    if missing and not publication.all_tables:
        statements.append(f"ALTER PUBLICATION {name} ADD TABLE {', '.join(_qualified(table) for table in missing)};")
    if not publication.via_root and any(info and info.partitioned for info in found.outboxes.values()):
        statements.append(f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true);")
    steps = [Step(subject, "altered" if statements else "present", "\n".join(statements))]
    if publication.other_operations:
        note = f"also publishes {', '.join(publication.other_operations)}, which the relay reads and throws away: "
        steps.append(Step(subject, "warning", note=note + f"ALTER PUBLICATION {name} SET (publish = 'insert');"))
    return steps


def _anchor(config: Config, found: Found) -> Step:
    """A copy of the relay's slot; the relay makes it too, and anew when it is gone."""
    name = config.source.anchor.slot
    subject = f"anchor slot {name}"
    if found.anchor is not None:
        if found.anchor.slot_type != "logical" or found.anchor.database != found.server.database:
            return Step(subject, "warning", note="is not a logical slot of this database: name another")
        return Step(subject, "present")
    if not found.streamed:
        return Step(subject, "present", note="not yet: the relay makes it when it streams")
    names = (sql.Literal(each).as_string(None) for each in (config.source.slot, name))
    copy = f"SELECT pg_copy_logical_replication_slot({', '.join(names)});"
    return Step(subject, "created", copy, "a copy of the relay's slot", alone=True)


def written(config: Config, outbox: Outbox, table: TableInfo | None) -> list[str]:
    """Columns of an outbox table that the relay sets: what is written back, and what claiming notes."""
    if config.source.mode != "poll" or config.poll.strategy != "claim":
        return list(outbox.write_back)
    existing = (
        table.columns if table else (*Columns.model_fields, "published_at", "attempts", "next_attempt_at", "last_error")
    )
    return list(ClaimColumns.of(outbox, existing).written)


def _role(role: Role, config: Config, found: Found) -> list[Step]:
    subject = f"role {role.name}"
    name = _identifier(role.name)
    if not role.exists:
        note = f"has no password yet: ALTER ROLE {name} PASSWORD '…';"
        steps = [Step(subject, "created", f"CREATE ROLE {name} LOGIN REPLICATION;", note)]
    elif not role.replication:
        steps = [Step(subject, "altered", f"ALTER ROLE {name} REPLICATION;")]
    else:
        steps = [Step(subject, "present")]
    if role.granted:
        return [*steps, Step(f"rights of {role.name}", "present")]
    grants = []
    for outbox in config.outbox:
        schema, table = split(outbox.table)
        grants.append(load("roles.sql", {"role": role.name, "schema": schema, "table": table}))
        if marked := written(config, outbox, found.outboxes[outbox.table]):
            columns = ", ".join(map(_identifier, marked))
            grants.append(f"GRANT UPDATE ({columns}) ON {_qualified(outbox.table)} TO {name};\n")
    return [*steps, Step(f"rights of {role.name}", "altered", "\n".join(grants))]


def load(name: str, variables: Mapping[str, str] | None = None, raw: Mapping[str, str] | None = None) -> str:
    """A file of sql/ with its psql variables: `:"name"` an identifier, `:'name'` a literal, `:name` raw."""
    shipped = files("relay").joinpath("sql", name)
    folder = Path(__file__).parent.parent / "sql"  # an editable install has them beside the package
    text = shipped.read_text("utf-8") if shipped.is_file() else (folder / name).read_text("utf-8")
    preamble, marker, body = text.partition("-- end of psql variables\n")
    return fill(body.lstrip("\n") if marker else preamble, variables or {}, raw or {})


def fill(text: str, variables: Mapping[str, str], raw: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        quote, name = match[1], match[2]
        if quote == '"':
            return _identifier(variables[name])
        if quote == "'":
            return sql.Literal(variables[name]).as_string(None)
        return raw.get(name, match[0])

    return re.sub(r"(?<!:):([\"']?)([a-z][a-z0-9_]*)\1", value, text)


def _identifier(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _qualified(table: str) -> str:
    return sql.Identifier(*split(table)).as_string(None)


def render(steps: Sequence[Step]) -> RenderableType:
    """For people: what was done, thing by thing."""
    table = Table.grid(padding=(0, 2))
    styles = {"created": "green", "altered": "yellow", "present": "dim", "warning": "yellow"}
    for step in steps:
        table.add_row(Text(step.action, style=styles[step.action]), Text(step.subject), Text(step.note))
    return table
