"""The output plugin: which decoder reads the session, and with which options Postgres is asked to stream."""

from __future__ import annotations

from typing import Any

from relay.config import Config
from relay.lsn import LSN
from relay.source.decoder import Decoder
from relay.source.pgoutput import PgoutputDecoder
from relay.source.session import Session
from relay.source.slot import fetch, split
from relay.source.wal2json import Catalogue, Wal2jsonDecoder


async def choose_decoder(session: Session, config: Config, **shared: Any) -> tuple[Decoder, dict[str, str]]:
    """The decoder of `source.plugin` and the options of START_REPLICATION; `shared` is what every decoder takes."""
    if config.source.plugin == "pgoutput":
        return PgoutputDecoder(**shared), PgoutputDecoder.options(config.source.publication)
    # The LSN first: a transaction that committed before it can be judged by what the catalogue says after it.
    ((now,),) = await fetch(session, "SELECT pg_current_wal_insert_lsn()::text")
    tables = [outbox.table for outbox in config.outbox]
    partitioned: list[str] = []
    leaves: dict[str, str] = {}
    for table in tables:
        rows = await fetch(session, _TREE, *split(table))
        if rows:
            partitioned.append(table)
            leaves |= {leaf: table for leaf, is_leaf in rows if is_leaf}
    # wal2json filters by a partition's own name, and partitions come and go: their schemas are read whole.
    schemas = sorted({split(table)[0] for table in (*partitioned, *leaves)})
    others = frozenset(name for (name,) in await fetch(session, _TABLES, schemas)) - set(tables) - set(leaves)
    catalogue = Catalogue(LSN.parse(now), leaves, others, tuple(partitioned))
    options = Wal2jsonDecoder.options([table for table in tables if table not in partitioned], schemas)
    return Wal2jsonDecoder(catalogue=catalogue, **shared), options


_TREE = """
    SELECT n.nspname || '.' || c.relname, c.relkind <> 'p'
    FROM pg_partition_tree((SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                            WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'p')) t
    JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
"""
_TABLES = """
    SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'm') AND n.nspname = ANY(%s)
"""
