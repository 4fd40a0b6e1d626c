"""The census: how many rows the tables hold between two snapshots. For the audit, and for saying what was closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

from psycopg import sql

from relay.checkpoint import Snapshot
from relay.outbox import Mapping
from relay.source.poll import GAP
from relay.source.session import Session, translated


async def count_rows(
    session: Session, mappings: Sequence[Mapping], since: Snapshot, until: Snapshot
) -> tuple[int, int]:
    """Rows visible in `until` and not in `since`: how many, and the sum of their transactions' ids."""
    query: LiteralString = "SELECT count(*), coalesce(sum({xid}::text::bigint), 0) FROM {table} WHERE "
    found = await _ask(session, mappings, since, until, query)
    return sum(rows for rows, _ in found), sum(int(xids) for _, xids in found)


async def count_by_xid(
    session: Session, mappings: Sequence[Mapping], since: Snapshot, until: Snapshot
) -> dict[int, int]:
    """The same, per transaction."""
    counts: dict[int, int] = {}
    query: LiteralString = "SELECT {xid}::text, count(*) FROM {table} WHERE "
    for xid, count in await _ask(session, mappings, since, until, query, " GROUP BY {xid}"):
        counts[int(xid)] = counts.get(int(xid), 0) + count
    return counts


async def _ask(
    session: Session,
    mappings: Sequence[Mapping],
    since: Snapshot,
    until: Snapshot,
    query: LiteralString,
    rest: LiteralString = "",
) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for mapping in mappings:
        schema, _, table = mapping.table.partition(".")
        composed = sql.SQL(query + GAP + rest).format(
            table=sql.Identifier(schema, table), xid=sql.Identifier(mapping.xid_column)
        )
        with translated():
            cursor = await session.execute(composed, {"since": str(since), "until": str(until)})
            rows += await cursor.fetchall()
    return rows
