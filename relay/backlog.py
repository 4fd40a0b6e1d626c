"""The backlog: rows that wait to be published, how old they are, and rows that were given up. Asked of the tables.

It only reads. What a table cannot tell, or takes too long to tell, is None, never a guess.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from psycopg import sql

from relay.adopt import condition
from relay.config import Config, Outbox
from relay.errors import ContractError, SourceUnavailable
from relay.outbox import ClaimColumns
from relay.source.session import Session
from relay.source.slot import TableInfo, fetch, split, table_info


class Backlog(NamedTuple):
    """`failed`: rows that claiming gave up, as the tables note it; they are not pending any more."""

    pending: int | None = None
    oldest: float | None = None  # seconds
    average: float | None = None
    failed: int | None = None


async def backlog(session: Session, config: Config, checkpoint: dict[str, Any] | None) -> Backlog:
    """Rows that the checkpoint's snapshot does not see; while rows are claimed, those that are still open.

    Without a checkpoint nothing was published yet, so every row is pending.
    """
    total, failed, oldest, ages = 0, 0, 0.0, 0.0
    snap = checkpoint["snap"] if checkpoint and checkpoint["phase"] != "new" else None
    claiming = checkpoint is not None and checkpoint["phase"] == "claim"
    for outbox in config.outbox:
        table = await table_info(session, outbox.table)
        if table is None or not table.can_select or not (claiming or outbox.columns.xid in table.columns):
            return Backlog()
        try:
            claim = ClaimColumns.of(outbox, table.columns) if claiming else None
            known = snap if outbox.columns.xid in table.columns else None
            pending = _unseen(outbox, known) if claim is None else _open(outbox, known, claim, config.poll.max_attempts)
            ((count, age, mean),) = await fetch(session, _query(outbox, table, pending))
            if claim is not None and (left := _left(claim, config.poll.max_attempts)):
                failed += (await fetch(session, _counted(outbox, left)))[0][0]
        except (ContractError, SourceUnavailable):  # the configuration is not the running relay's; took too long
            return Backlog()
        total += count
        oldest = max(oldest, age or 0.0)
        ages += count * (mean or 0.0)
    return Backlog(total, oldest, ages / total if total else 0.0, failed)


def _unseen(outbox: Outbox, snap: str | None) -> sql.Composable:
    """ "Not visible in S" as a predicate whose cost does not grow with a long transaction elsewhere."""
    if snap is None:
        return sql.SQL("true")
    return sql.SQL(
        "({xid} >= pg_snapshot_xmax({snap}::pg_snapshot)"
        " OR {xid} = ANY(ARRAY(SELECT pg_snapshot_xip({snap}::pg_snapshot))))"
    ).format(xid=sql.Identifier(outbox.columns.xid), snap=sql.Literal(snap))


def _open(outbox: Outbox, snap: str | None, claim: ClaimColumns, limit: int) -> sql.Composable:
    parts = [condition(claim.unpublished), _unseen(outbox, snap)]
    if left := _left(claim, limit):
        parts.append(sql.SQL("({}) IS NOT TRUE").format(left))
    return sql.SQL(" AND ").join(parts)


def _left(claim: ClaimColumns, limit: int) -> sql.Composable | None:
    """Rows as claiming leaves what it gives up: as `failed` says, or tried too often. None: the table has no sign."""
    parts: list[sql.Composable] = []
    for column, value in claim.failed.items():
        some = value in ("now()", "{error}")
        parts.append(sql.SQL("{} IS NOT NULL").format(sql.Identifier(column)) if some else condition({column: value}))
    if not parts and claim.attempts:
        tried = sql.SQL("{} >= {}").format(sql.Identifier(claim.attempts), sql.Literal(limit))
        parts = [condition(claim.unpublished), tried]
    return sql.SQL(" AND ").join(parts) if parts else None


def _query(outbox: Outbox, table: TableInfo, pending: sql.Composable) -> str:
    ages: sql.Composable = sql.SQL("NULL::float, NULL::float")
    if outbox.columns.created_at in table.columns:
        age = sql.SQL("greatest(0, extract(epoch FROM now() - {}))").format(sql.Identifier(outbox.columns.created_at))
        ages = sql.SQL("max({age})::float, avg({age})::float").format(age=age)
    query = sql.SQL("SELECT count(*), {ages} FROM {table} WHERE {pending}")
    return query.format(ages=ages, table=sql.Identifier(*split(outbox.table)), pending=pending).as_string(None)


def _counted(outbox: Outbox, rows: sql.Composable) -> str:
    query = sql.SQL("SELECT count(*) FROM {} WHERE {}")
    return query.format(sql.Identifier(*split(outbox.table)), rows).as_string(None)
