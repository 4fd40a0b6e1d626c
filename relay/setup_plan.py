"""What `relay setup` has to do, from what it found: step by step, with its SQL. Pure, but for reading sql/."""

from __future__ import annotations

from psycopg import sql

from relay.adopt import Step, adoption, continued
from relay.config import Config, Outbox
from relay.errors import ContractError, SetupError
from relay.setup_found import RELAY_TABLES, Found, Role, Wish, making, ours, written
from relay.setup_sql import identifier, load, qualified
from relay.source.slot import split

VERSION = 6  # the highest numbered file
_RELAY_VERSION = 6  # the highest file that changes the relay's own tables


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
            parent = sql.Literal(f"{identifier(schema)}.{identifier(name)}").as_string(None)
            grow = f"SELECT {identifier(schema)}.outbox_add_partitions({parent}::regclass);"
            steps.append(Step(f"partitions of {outbox.table}", "present", grow))
        return steps
    if not ours(outbox):
        raise ContractError(
            f"the table {outbox.table} does not exist, and its columns are not the default ones",
            hint=making(outbox),
        )
    steps = []
    if schema not in found.schemas:
        steps.append(Step(f"schema {schema}", "created", f"CREATE SCHEMA IF NOT EXISTS {identifier(schema)};"))
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
    raw = {"uuidv7": "uuidv7()" if native else f"{identifier(schema)}.outbox_uuidv7()"}
    source = "004_outbox_events_partitioned.sql" if partitioned else "004_outbox_events.sql"
    return [*steps, Step(subject, "created", load(source, variables, raw))]


def _publication(config: Config, found: Found) -> list[Step]:
    publication = found.publication
    name = identifier(publication.name)
    subject = f"publication {publication.name}"
    tables = [outbox.table for outbox in config.outbox]
    if not publication.exists:
        raw = {"tables": ", ".join(qualified(table) for table in tables)}
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
                hint=f"ALTER PUBLICATION {name} DROP TABLE {qualified(table)}; "
                f"ALTER PUBLICATION {name} ADD TABLE {qualified(table)};  (in one transaction)",
            )
    statements = []
    missing = [table for table in tables if table not in publication.tables]
    if missing and not publication.all_tables:
        statements.append(f"ALTER PUBLICATION {name} ADD TABLE {', '.join(qualified(table) for table in missing)};")
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


def _role(role: Role, config: Config, found: Found) -> list[Step]:
    subject = f"role {role.name}"
    name = identifier(role.name)
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
            columns = ", ".join(map(identifier, marked))
            grants.append(f"GRANT UPDATE ({columns}) ON {qualified(outbox.table)} TO {name};\n")
    return [*steps, Step(f"rights of {role.name}", "altered", "\n".join(grants))]
