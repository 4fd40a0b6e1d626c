"""Reading the WAL a second time: from a temporary copy of the anchor slot, in commit order, as it was first streamed.

The copy lives as long as its walsender session; neither the anchor nor the relay's own slot notices. Nothing is ever
confirmed beyond where the reading began. What the relay has not published yet is never part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from relay.checkpoint import Snapshot
from relay.config import Config
from relay.errors import ContractError, SetupError, SlotLost
from relay.event import Event, Rejected, Transaction
from relay.lsn import LSN
from relay.outbox import Binding, Mapping, mappings
from relay.progress import Progress
from relay.routing import Router
from relay.source.plugin import choose_decoder
from relay.source.replication import WalSender
from relay.source.selection import Page, Place, Selection, Window, page_size
from relay.source.session import Session, translated
from relay.source.slot import fetch, slot_info, table_columns
from relay.source.stream import StreamSource


class Copy(WalSender):
    """A walsender session with a slot of its own, which ends with it."""

    async def copy(self, anchor: str, name: str, plugin: str) -> None:
        with translated():
            await self._connection.execute(
                f"SELECT pg_copy_logical_replication_slot('{anchor}', '{name}', true, '{plugin}')".encode()
            )


class Chosen:
    """Which transactions of the WAL a window takes. Pure."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._seen = Snapshot.parse(window.seen) if window.seen is not None else None
        self._cuts = [(LSN.parse(cut.lsn), Snapshot.parse(cut.snap) if cut.snap else None) for cut in window.cuts]
        self._last: tuple[Transaction | None, bool] = (None, False)

    def takes(self, transaction: Transaction) -> bool:
        """Asked for every event, worked out once per transaction."""
        if self._last[0] is not transaction:
            self._last = (transaction, self._judge(transaction))
        return self._last[1]

    def _judge(self, transaction: Transaction) -> bool:
        commit, xid, at, window = transaction.commit_lsn, transaction.xid, transaction.committed_at, self._window
        if commit < LSN.parse(window.begin):
            return False
        if self._seen is not None and self._seen.sees(self._seen.widen(xid)):
            return False
        if (window.since is not None and at < window.since) or (window.until is not None and at > window.until):
            return False
        return all(
            commit < lsn or (snap is not None and snap.sees(snap.widen(xid))) for lsn, snap in self._cuts
        )  # before each end, or counted as published there


class WalRows:
    """The events of a selection, from the WAL. The same face as the table's reader."""

    def __init__(self, session: Session, config: Config, selection: Selection) -> None:
        assert selection.wal is not None
        self._session = session
        self._config = config
        self._selection = selection
        self._window = selection.wal

    async def count(self) -> int:
        """By reading it all."""
        total = 0
        async with aclosing(self.pages(b"")) as pages:
            async for page in pages:
                total += len(page.events)
        return total

    async def pages(self, stamp: bytes, place: Place = Place()) -> AsyncGenerator[Page, None]:  # noqa: B008  a tuple
        """In commit order. `place.seq` is the LSN up to which everything is done."""
        config, session = self._config, self._session
        begin = max(LSN.parse(self._window.begin), LSN(place.seq or 0))
        stop = LSN.parse(self._window.stop)
        if begin >= stop:
            return
        present = await self._tables()
        # An LSN behind the end, even if nobody writes: the stream tells how far it is, up to there.
        await fetch(session, "SELECT pg_logical_emit_message(false, 'outbox_relay', '')::text")
        source, silence = config.source, config.source.wal_sender_timeout
        wal = await Copy.connect(
            config.database, f"{config.relay.name} exact replay", timeout=silence, lock_timeout=silence
        )
        assert isinstance(wal, Copy)
        name = f"relay_replay_{session.pgconn.backend_pid}"
        attending: asyncio.Future[None] | None = None
        try:
            try:
                await wal.copy(source.anchor.slot, name, source.plugin)
            except SlotLost as exc:
                raise SetupError(f"the anchor cannot be read: {exc}", hint="`relay check` looks at it") from exc
            copy = await slot_info(session, name)
            held = copy.confirmed_flush_lsn if copy is not None else None
            if held is None or held > begin:  # Postgres would silently begin there
                raise SetupError(
                    f"the anchor has moved on to {held} meanwhile", hint=f"replay from there: --from-lsn {held}"
                )

            def bind(table: str, columns: Sequence[tuple[str, int]]) -> tuple[Router, Binding] | None:
                mapping = present.get(table)
                if mapping is None:
                    return None
                binding = mapping.bind(columns)
                routing = config.outbox[mapping.ordinal].routing or config.routing
                return Router(routing, binding, sink=config.sink.kind), binding

            decoder, options = await choose_decoder(session, config, start=begin, skip=None, bind=bind, stamp=stamp)
            await wal.start(name, begin, options)
            size = min(config.delivery.max_batch_events, page_size(self._selection.rate))
            stream = StreamSource(wal, decoder, Progress(), max_batch_events=size, silence=silence)
            attending = asyncio.ensure_future(stream.attend())
            chosen = Chosen(self._window)
            async for batch in stream.batches():
                events = _timeless([event for event in batch.events if self._takes(event, chosen)])
                rejected = [each for each in batch.rejected if self._takes(each.event, chosen)]
                if events or rejected:
                    yield Page(events, rejected, batch.size_bytes, Place(0, int(batch.end_lsn)))
                if batch.end_lsn >= stop or _beyond(batch.events, batch.rejected, stop):
                    return
        finally:
            if attending is not None:
                attending.cancel()
            wal.close()

    async def _tables(self) -> dict[str, Mapping]:
        found: dict[str, Mapping] = {}
        for mapping in mappings(self._config.outbox):
            columns = await table_columns(self._session, mapping.table)
            if columns is None:
                raise ContractError(f"the table {mapping.table} does not exist", hint="run `relay check`")
            found[mapping.table] = mapping.within(columns)
        return found

    def _takes(self, event: Event, chosen: Chosen) -> bool:
        selection = self._selection
        if selection.table is not None and event.table != selection.table:
            return False
        if selection.key is not None and event.key != selection.key.encode():
            return False
        return chosen.takes(event.transaction)


def _beyond(events: list[Event], rejected: list[Rejected], stop: LSN) -> bool:
    """Whether the last of them was committed behind the end."""
    last = events[-1] if events else rejected[-1].event if rejected else None
    return last is not None and last.transaction.commit_lsn >= stop


def _timeless(events: list[Event]) -> list[Event]:
    """Without the time of the commit, so that a replay does not count as late delivery."""
    made: list[Event] = []
    known: Transaction | None = None
    blank: Transaction | None = None
    for event in events:
        if known is not event.transaction or blank is None:
            known, blank = event.transaction, event.transaction._replace(committed_at=0.0)
        made.append(event._replace(transaction=blank))
    return made
