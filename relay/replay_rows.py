"""The rows of a replay, page after page, over all of its tables or from the WAL; and how fast they may go.

It reads, and changes nothing. Between two pages no transaction is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from relay.adopt import never_published
from relay.config import Config
from relay.errors import ConfigError, ContractError
from relay.outbox import Binding, ClaimColumns, mappings
from relay.routing import Router
from relay.source.anchor import WalRows
from relay.source.selection import Page, Place, SelectedRows, Selection, page_size
from relay.source.session import Session
from relay.source.slot import table_columns


async def reader_of(session: Session, config: Config, selection: Selection) -> Reader | WalRows:
    """From the table, or from the WAL."""
    if selection.wal is not None:
        return WalRows(session, config, selection)
    return await Reader.of(session, config, selection)


class Reader:
    """The rows of a selection, over all of its tables."""

    def __init__(self, session: Session, tables: Sequence[SelectedRows], rate: float | None) -> None:
        self._session = session
        self._tables = tables
        self._size = page_size(rate)

    @classmethod
    async def of(cls, session: Session, config: Config, selection: Selection) -> Reader:
        def route(binding: Binding) -> Router:
            routing = config.outbox[binding.mapping.ordinal].routing or config.routing
            return Router(routing, binding, sink=config.sink.kind)

        tables = []
        for mapping in mappings(config.outbox):
            if selection.table not in (None, mapping.table):
                continue
            types = await table_columns(session, mapping.table)
            if types is None:
                raise ContractError(f"the table {mapping.table} does not exist", hint="run `relay check`")
            present = mapping.within(types)
            if selection.ordered and not present.recoverable:
                raise ContractError(
                    f"{mapping.table} has no xid and seq columns: its rows can be replayed by --id or --key only",
                    hint="`relay setup --adopt` adds them; --table leaves this one out",
                )
            routing = config.outbox[mapping.ordinal].routing or config.routing
            open_ = None
            if selection.claimed:  # the table says what is unpublished, the snapshot does not
                columns = ClaimColumns.of(config.outbox[mapping.ordinal], types)
                open_ = never_published(columns.unpublished, columns.failed)
            tables.append(SelectedRows(present, types, route, routing, selection, open_))
        if strange := sorted(set(selection.ids or ()).difference(*(table.ids for table in tables))):
            raise ConfigError(
                [f"--id {each}: no outbox table has ids like that" for each in strange],
                hint="give the event's id as it was published; it is the header that consumers drop repeats by",
            )
        return cls(session, tables, selection.rate)

    async def count(self, place: Place = Place()) -> int:  # noqa: B008  a tuple
        return sum([await table.count(self._session, _after(table, place)) for table in self._behind(place)])

    async def pages(self, stamp: bytes, place: Place = Place()) -> AsyncGenerator[Page, None]:  # noqa: B008
        for table in self._behind(place):
            own = b"%b%d:" % (stamp, table.mapping.ordinal)
            async for page in table.pages(self._session, _after(table, place), own, self._size):
                yield page

    def _behind(self, place: Place) -> list[SelectedRows]:
        return [table for table in self._tables if table.mapping.ordinal >= place.table]


def _after(table: SelectedRows, place: Place) -> int | None:
    return place.seq if table.mapping.ordinal == place.table else None


class Pace:
    """Holds a replay to so many events per second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._next = time.monotonic()

    async def wait(self, events: int) -> None:
        """Before publishing so many."""
        if self._rate is not None:
            now = time.monotonic()
            due = max(self._next, now)
            self._next = due + events / self._rate
            await asyncio.sleep(due - now)
