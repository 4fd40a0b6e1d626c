"""Taking over what is there: tables of others, and the slot of whoever published before. Plans only, pure.

A table is *adopted* by two columns, `xid` (whose transaction wrote the row) and `seq` (order), so that a gap can be
closed from it. They are added nullable, and the default is set afterwards: a default in the same ADD COLUMN would stamp
every old row with the ALTER's own transaction, and rewrite the table. Old rows stay NULL, which means published before,
except those that `outbox.unpublished` names: these are stamped, so that the first start publishes them.

A slot is continued by a checkpoint that claims no more than what is true: everything committed before the slot's
confirmed LSN was published, and nothing is known of any snapshot. The running relay promotes one within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from psycopg import sql

from relay.checkpoint import EMPTY
from relay.config import Config, Outbox
from relay.errors import SetupError, SlotBusy, SlotLost
from relay.source.session import Session
from relay.source.slot import ServerInfo, SlotInfo, TableInfo, fetch, slot_fault, split

_SPARE = 10_000  # rows that may be written between counting the old ones and altering the table


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that setup looked after. `sql` is what it ran, or would run."""

    subject: str
    action: Literal["created", "altered", "present", "warning"]
    sql: str = ""
    note: str = ""
    alone: bool = False  # not in setup's transaction: it locks a table, or it cannot be in one


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint that this relay has already."""

    slot: str
    lsn: str
    phase: str


def condition(values: Mapping[str, bool | str]) -> sql.Composable:
    """`outbox.unpublished` as a predicate."""
    parts: list[sql.Composable] = []
    for column, value in values.items():
        name = sql.Identifier(column)
        parts.append(
            sql.SQL("{} IS NULL").format(name)
            if value == "NULL"
            else sql.SQL("{} = {}").format(name, sql.Literal(value))
        )
    return sql.SQL(" AND ").join(parts)


def never_published(unpublished: Mapping[str, bool | str], failed: Mapping[str, bool | str]) -> sql.Composable:
    """Rows that nobody published: still open, or left for good. What a row is set to by then, as a predicate."""
    left = {column: value for column, value in failed.items() if value not in ("now()", "{error}")}
    parts = [condition(values) for values in (unpublished, left) if values]
    return sql.SQL("({})").format(sql.SQL(") OR (").join(parts))


async def count_unpublished(session: Session, outbox: Outbox, table: TableInfo) -> int:
    """Old rows that the first start has to publish."""
    if not outbox.unpublished or not outbox.columns.xid:
        return 0
    query = sql.SQL("SELECT count(*) FROM {} WHERE {}").format(_name(outbox.table), condition(outbox.unpublished))
    if outbox.columns.xid in table.columns:
        query += sql.SQL(" AND {} IS NULL").format(sql.Identifier(outbox.columns.xid))
    rows = await fetch(session, query.as_string(session))
    return int(rows[0][0])


def adoption(outbox: Outbox, table: TableInfo, *, unpublished: int, broken: frozenset[str]) -> list[Step]:
    """What makes a gap closable from this table. `broken` are invalid indexes, left by an attempt that failed."""
    schema, name = split(outbox.table)
    xid, seq = outbox.columns.xid, outbox.columns.seq
    subject = f"adoption of {outbox.table}"
    if not xid or not seq:
        note = 'outbox.columns.xid or .seq is "": left as it is, it streams and cannot be recovered from'
        return [Step(subject, "warning", note=note)]
    if xid in table.columns and seq not in table.columns:
        note = f"has {xid} and no {seq}: name the column that holds its order in outbox.columns.seq"
        return [Step(subject, "warning", note=note)]
    parts = {
        "table": _name(outbox.table),
        "xid": sql.Identifier(xid),
        "seq": sql.Identifier(seq),
        "sequence": sql.Identifier(schema, f"{name}_{seq}_seq"),
        "nextval": sql.Literal(f"{_text(sql.Identifier(schema, f'{name}_{seq}_seq'))}"),
        "start": sql.Literal(unpublished + _SPARE if unpublished else 1),
    }
    steps = []
    added = [column for column in (xid, seq) if column not in table.columns]
    if added:
        lines = ["BEGIN", "SET LOCAL lock_timeout = '1s'"]
        lines += [
            "ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {xid} xid8",
            "ALTER TABLE {table} ALTER COLUMN {xid} SET DEFAULT pg_current_xact_id()",
        ]
        if seq in added:
            lines += [
                "CREATE SEQUENCE IF NOT EXISTS {sequence} START WITH {start}",
                # Whoever may insert must be able to take a number, as an identity column would let them.
                "GRANT USAGE ON SEQUENCE {sequence} TO PUBLIC",
                "ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {seq} bigint",
                "ALTER TABLE {table} ALTER COLUMN {seq} SET DEFAULT nextval({nextval}::regclass)",
                "ALTER SEQUENCE {sequence} OWNED BY {table}.{seq}",
            ]
        note = (
            f"adds {' and '.join(added)} without rewriting the table: an ACCESS EXCLUSIVE lock for milliseconds, "
            "waited for at most 1 s at a time (writers queue behind it), and tried again"
        )
        steps.append(Step(subject, "altered", _statements([*lines, "COMMIT"], parts), note, alone=True))
    if unpublished:
        steps.append(_stamp(outbox, unpublished, parts))
    for column in (xid, seq):
        if column in table.columns and table.columns[column].btree:
            continue
        index = f"{name}_{column}_idx"
        if index in broken:
            drop = _text(sql.SQL("DROP INDEX CONCURRENTLY {};").format(sql.Identifier(schema, index)))
            steps.append(Step(f"index {index}", "altered", drop, "is invalid, left by a failed attempt", alone=True))
        concurrently = "" if table.partitioned else "CONCURRENTLY "
        create = sql.SQL(f"CREATE INDEX {concurrently}IF NOT EXISTS {{}} ON {{}} ({{}});")
        text = _text(create.format(sql.Identifier(index), _name(outbox.table), sql.Identifier(column)))
        note = "writers wait until it is built" if table.partitioned else "writers go on; waits for open transactions"
        steps.append(Step(f"index {index}", "created", text, note, alone=True))
    return steps or [Step(subject, "present")]


def _stamp(outbox: Outbox, count: int, parts: dict[str, sql.Composable]) -> Step:
    """Give the unpublished old rows a transaction and a place before all new ones."""
    order = [sql.Identifier(column) for column in (outbox.columns.created_at, outbox.columns.id) if column]
    parts = {
        **parts,
        "id": sql.Identifier(outbox.columns.id),
        "order": sql.SQL(", ").join(order),
        "unpublished": condition(outbox.unpublished),
    }
    query = (
        "UPDATE {table} t SET {xid} = pg_current_xact_id(), {seq} = coalesce(t.{seq}, o.place) FROM (\n"
        "    SELECT {id} AS id, row_number() OVER (ORDER BY {order}) - count(*) OVER () - 1\n"
        "           + coalesce((SELECT min({seq}) FROM {table}), {start}) AS place\n"
        "    FROM {table} WHERE {xid} IS NULL AND {unpublished}) o\n"
        "WHERE t.{id} = o.id AND t.{xid} IS NULL AND {unpublished}"
    )
    text = _statements([query], parts)
    note = f"about {count} old rows are unpublished by their status: the first `relay run` publishes them"
    return Step(f"unpublished rows of {outbox.table}", "altered", text, note, alone=True)


def continued(config: Config, server: ServerInfo, slot: SlotInfo | None, saved: Saved | None, name: str) -> Step:
    """The checkpoint that lets the relay go on where the slot's former reader stopped."""
    source = config.source
    subject = f"checkpoint of {config.relay.name} from slot {name}"
    fault = slot_fault(slot, plugin=source.plugin, database=server.database, checkpoint_lsn=None, name=name)
    if isinstance(fault, SlotBusy):
        raise SetupError(str(fault), hint="stop its reader (Debezium) first, and do not start it again")
    if isinstance(fault, SlotLost):
        raise SetupError(
            f"{fault}: it cannot be continued",
            hint="run `relay setup` without --from-slot; the first `relay run` makes a slot of its own, and publishes "
            "what the table holds",
        )
    if fault is not None:
        raise SetupError(f"{fault}: it cannot be continued", hint=fault.hint)
    assert slot is not None and slot.confirmed_flush_lsn is not None
    lsn = str(slot.confirmed_flush_lsn)
    if saved is not None and saved.phase != "new":
        if saved.slot == name and saved.phase == "stream":
            return Step(subject, "present", note=f"at {saved.lsn}")
        raise SetupError(
            f"the relay {config.relay.name} has a checkpoint already (slot {saved.slot}, {saved.lsn})",
            hint="give this relay another name (relay.name), or delete that row of outbox_relay_checkpoint",
        )
    values = [config.relay.name, 0, server.system_identifier, server.timeline, name, lsn, str(EMPTY), "0/0", "stream"]
    text = _text(
        sql.SQL(
            "INSERT INTO public.outbox_relay_checkpoint AS c\n"
            "    (relay, epoch, system_identifier, timeline, slot, lsn, snap, snap_lsn, phase)\n"
            "VALUES ({})\n"
            "ON CONFLICT (relay) DO UPDATE SET slot = excluded.slot, lsn = excluded.lsn, phase = 'stream'"
            " WHERE c.phase = 'new';"
        ).format(sql.SQL(", ").join(map(sql.Literal, values)))
    )
    note = f"continues at {lsn}; the former reader must not run any more, start `relay run` now"
    return Step(subject, "created", text, note)


def _statements(lines: list[str], parts: dict[str, sql.Composable]) -> str:
    return "\n".join(_text(sql.SQL(line).format(**parts)) + ";" for line in lines)


def _name(table: str) -> sql.Identifier:
    return sql.Identifier(*split(table))


def _text(composed: sql.Composable) -> str:
    return composed.as_string(None)
