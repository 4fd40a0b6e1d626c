"""The output plugin: which decoder reads the session, and with which options Postgres is asked to stream."""

from __future__ import annotations

from typing import Any

from relay.config import Config
from relay.source.decoder import Decoder
from relay.source.pgoutput import PgoutputDecoder
from relay.source.session import Session
from relay.source.slot import fetch, split
from relay.source.wal2json import Wal2jsonDecoder


async def choose_decoder(session: Session, config: Config, **shared: Any) -> tuple[Decoder, dict[str, str]]:
    """The decoder of `source.plugin` and the options of START_REPLICATION; `shared` is what every decoder takes."""
    if config.source.plugin == "pgoutput":
        return PgoutputDecoder(**shared), PgoutputDecoder.options(config.source.publication)
    tables = [outbox.table for outbox in config.outbox]
    leaves: dict[str, str] = {}
    for table in tables:
        for (leaf,) in await fetch(session, _LEAVES, *split(table)):
            leaves[leaf] = table
    # wal2json filters by a partition's own name, and partitions come and go: their schemas are read whole.
    schemas = sorted({split(leaf)[0] for leaf in leaves})
    plain = [table for table in tables if table not in leaves.values()]
    strangers = frozenset(name for (name,) in await fetch(session, _TABLES, schemas)) - set(tables) - set(leaves)
    options = Wal2jsonDecoder.options(plain, schemas)
    return Wal2jsonDecoder(leaves=leaves, strangers=strangers, **shared), options


_LEAVES = """
    SELECT n.nspname || '.' || c.relname
    FROM pg_partition_tree((SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                            WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'p')) t
    JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE t.isleaf
"""
_TABLES = """
    SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname = ANY(%s)
"""
