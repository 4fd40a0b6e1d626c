"""The outbox tables of a life: which columns they have, and so how their rows become events.

It looks at catalogues only: no row is read here, and none is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from relay.adopt import condition
from relay.config import Config
from relay.errors import ContractError
from relay.outbox import Binding, ClaimColumns, Mapping, mappings
from relay.routing import Router
from relay.source.session import Session
from relay.source.slot import table_columns
from relay.writeback import WriteBack


class Tables:
    """As the last `look` found them."""

    def __init__(self, config: Config, write_back: WriteBack | None) -> None:
        self._config = config
        self._write_back = write_back
        self.mappings: Sequence[Mapping] = ()
        self.columns: dict[str, dict[str, str]] = {}  # table → column → type

    async def look(self, session: Session) -> None:
        """The mappings as the tables are now: one may have been adopted while we were away."""
        found = []
        for mapping in mappings(self._config.outbox):
            columns = await table_columns(session, mapping.table)
            if columns is None:
                raise ContractError(
                    f"the table {mapping.table} does not exist (or this role may not see its schema)",
                    hint="run `relay setup`, or name the right table in [[outbox]]",
                )
            self.columns[mapping.table] = columns
            if self._write_back is not None:
                await self._write_back.bind(session, mapping.table, columns)
            mapping.within(columns).bind([(name, 0) for name in columns])  # every column that the config names
            found.append(mapping.within(columns))
        self.mappings = tuple(found)

    def bind(self, table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
        for mapping in self.mappings:
            if mapping.table == table:
                binding = mapping.bind(columns)
                return self.route(binding), binding
        return None

    def route(self, binding: Binding) -> Router:
        routing = self._config.outbox[binding.mapping.ordinal].routing or self._config.routing
        return Router(routing, binding, sink=self._config.sink.kind)

    def unpublished(self, *, claimed: bool) -> dict[str, sql.Composable]:
        """What a table's status says of its rows, where it has one; after claiming every table has one."""
        found = {each.table: each.unpublished for each in self._config.outbox}
        if claimed:
            found = {
                each.table: ClaimColumns.of(each, self.columns[each.table]).unpublished for each in self._config.outbox
            }
        return {table: condition(values) for table, values in found.items() if values}
