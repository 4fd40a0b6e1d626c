"""`relay replay`: publish again what was published before, from the table. The running relay is not disturbed.

The command turns a point (LSN, time, bookmark) into snapshots and counts; then it publishes by a sink of its own, or,
where only the active relay may write (a fenced stream), leaves a request for it and watches. Replayed events keep their
id; `relay-replayed` names the run. It never publishes a row that the relay has not published itself, and it changes
nothing in the table, the slot or the checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson
import structlog

from relay import bookmark
from relay.adopt import condition
from relay.anchor import Bounds, exact_window
from relay.backoff import Backoff
from relay.config import Config
from relay.errors import ConfigError, ContractError, EventRejected, OperatorError, SetupError, TransientError
from relay.event import Batch
from relay.history import Known, Point, end, known_points, parse_lsn, parse_time, start
from relay.lsn import NOWHERE
from relay.outbox import Binding, ClaimColumns, mappings
from relay.routing import Router
from relay.sink import Sink, exclusive, open_plain_sink
from relay.source.anchor import WalRows
from relay.source.selection import PAGE, Page, Place, SelectedRows, Selection, replayed
from relay.source.session import Session, connect
from relay.source.slot import fetch, identity_of, table_columns

log = structlog.get_logger("relay.replay")

Show = Callable[[int, int | None], None]
"""published, total (None: not known): called as a replay goes on."""

_WATCH = 0.3  # seconds between two looks at a request
_LONELY = 10.0  # … after which it is said that no relay took it up


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for; see `relay replay --help`."""

    from_lsn: str | None = None
    since: str | None = None
    bookmark: str | None = None
    seq: int | None = None
    to_lsn: str | None = None
    until: str | None = None
    to_bookmark: str | None = None
    to_seq: int | None = None
    key: str | None = None
    ids: tuple[str, ...] = ()
    table: str | None = None
    topic: str | None = None
    rate: float | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What was done. `skipped` rows cannot be routed: the relay has never published them either."""

    run: str
    state: str  # counted | requested | done
    total: int | None  # None: not counted before
    published: int = 0
    skipped: int = 0
    request: int | None = None


def check_wish(wish: Wish) -> None:
    """Raises ConfigError with every contradiction. Pure."""
    faults = []
    starts = {"--from-lsn": wish.from_lsn, "--since": wish.since, "--bookmark": wish.bookmark, "--seq": wish.seq}
    ends = {"--to-lsn": wish.to_lsn, "--until": wish.until, "--to-bookmark": wish.to_bookmark, "--to-seq": wish.to_seq}
    begins = [name for name, value in starts.items() if value is not None]
    stops = [name for name, value in ends.items() if value is not None]
    if len(begins) > 1:
        faults.append(f"{' and '.join(begins)}: give one beginning")
    if len(stops) > 1:
        faults.append(f"{' and '.join(stops)}: give one end")
    if wish.ids and (begins or stops or wish.key is not None):
        faults.append("--id stands alone")
    if not begins and not wish.ids and wish.key is None:
        faults.append("say what to replay: --from-lsn, --since, --bookmark, --seq, --key or --id")
    if wish.exact and (wish.ids or wish.seq is not None or wish.to_seq is not None or not begins):
        faults.append("--exact needs --from-lsn, --since or --bookmark, and knows no --seq and no --id")
    for name, value in (("--seq", wish.seq), ("--to-seq", wish.to_seq)):
        if value is not None and not -(2**63) <= value < 2**63:
            faults.append(f"{name} is beyond what a bigint can be")
    if wish.rate is not None and not wish.rate > 0:
        faults.append("--rate must be more than 0")
    if faults:
        raise ConfigError(faults, hint="docs/replay.md has examples")


async def resolve(session: Session, config: Config, wish: Wish) -> Selection:
    """The wish as snapshots; raises SetupError for a window that cannot be served."""
    check_wish(wish)
    name, now = config.relay.name, datetime.now(UTC)
    known = await known_points(session, name)
    if wish.exact:
        return await _exactly(session, config, known, wish)
    since: str | None = None
    if wish.from_lsn is not None:
        since = start(known, lsn=parse_lsn(wish.from_lsn)).snap
    elif wish.since is not None:
        since = start(known, at=parse_time(wish.since, now)).snap
    elif wish.bookmark is not None:
        since = (await bookmark.find(session, name, wish.bookmark)).snap
    until = known.now.snap
    if wish.to_lsn is not None:
        until = end(known, lsn=parse_lsn(wish.to_lsn)).snap
    elif wish.until is not None:
        until = end(known, at=parse_time(wish.until, now)).snap
    elif wish.to_bookmark is not None:
        until = (await bookmark.find(session, name, wish.to_bookmark)).snap
    return Selection(
        until=until,
        since=since,
        first_seq=wish.seq,
        last_seq=wish.to_seq,
        key=wish.key,
        ids=wish.ids or None,
        table=_table(config, wish),
        topic=wish.topic,
        rate=wish.rate,
        claimed=known.claimed,
    )


async def _exactly(session: Session, config: Config, known: Known, wish: Wish) -> Selection:
    if not config.source.anchor.slot:
        raise ConfigError(
            ["--exact: there is no anchor slot to read from"],
            hint="source.anchor.slot names one; it holds what is published from then on (docs/replay.md)",
        )
    now = datetime.now(UTC)

    async def marked(name: str | None) -> Point | None:
        if name is None:
            return None
        mark = await bookmark.find(session, config.relay.name, name)
        return Point(mark.at, mark.lsn, mark.snap)

    bounds = Bounds(
        lsn=parse_lsn(wish.from_lsn) if wish.from_lsn is not None else None,
        at=parse_time(wish.since, now) if wish.since is not None else None,
        mark=await marked(wish.bookmark),
        to_lsn=parse_lsn(wish.to_lsn) if wish.to_lsn is not None else None,
        until=parse_time(wish.until, now) if wish.until is not None else None,
        to_mark=await marked(wish.to_bookmark),
    )
    return Selection(
        until=known.now.snap,
        key=wish.key,
        table=_table(config, wish),
        topic=wish.topic,
        rate=wish.rate,
        wal=await exact_window(session, config, known, bounds),
    )


def _table(config: Config, wish: Wish) -> str | None:
    if wish.table is None:
        return None
    table = wish.table if "." in wish.table else f"public.{wish.table}"
    if table not in [outbox.table for outbox in config.outbox]:
        known_tables = ", ".join(outbox.table for outbox in config.outbox)
        raise ConfigError([f"{table} is not an outbox table of this relay (it has {known_tables})"])
    return table


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
        self._size = PAGE if rate is None else max(1, min(PAGE, int(rate)))

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
                open_ = condition(ClaimColumns.of(config.outbox[mapping.ordinal], types).unpublished)
            tables.append(SelectedRows(present, types, route, routing, selection, open_))
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


def new_run() -> str:
    """Names a run; sorts by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(3).hex()}"


async def replay(config: Config, wish: Wish, show: Show, *, dry_run: bool = False, detach: bool = False) -> Report:
    """Do it, or have it done; returns when it is done, except with `detach`."""
    check_wish(wish)
    run = new_run()
    async with await connect(config.database, "relay replay") as session:
        selection = await resolve(session, config, wish)
        reader = await reader_of(session, config, selection)
        # From the WAL, counting is as much work as reading.
        total = await reader.count() if dry_run or selection.wal is None else None
        if dry_run:
            return Report(run, "counted", total)
        if await exclusive(config):
            return await _request(session, config, selection, run, total, show, detach=detach)
        if detach:
            raise ConfigError(
                ["--detach: this replay is done by the command itself"], hint="only into fenced streams the relay does"
            )
        return await _publish(session, config, selection, reader, run, total, show)


# ---------------------------------------------------------------------------------------------------- by the command


async def _publish(
    session: Session,
    config: Config,
    selection: Selection,
    reader: Reader | WalRows,
    run: str,
    total: int | None,
    show: Show,
) -> Report:
    identity = await identity_of(session)
    stamp = f"{config.relay.name}:{identity.system_identifier}:0:replay:{run}:".encode()
    sink, pace = open_plain_sink(config), Pace(selection.rate)
    publisher = _Publisher(sink, config)
    published = skipped = 0
    show(0, total)
    try:
        async with aclosing(reader.pages(stamp)) as pages:
            async for page in pages:
                skipped += len(page.rejected)
                await pace.wait(len(page.events))
                events = replayed(page.events, run, selection.topic)
                await publisher.publish(Batch(events, NOWHERE, page.size, time.monotonic()), page.place)
                published += len(events)
                show(published, total)
    finally:
        await sink.close()
    return Report(run, "done", total, published, skipped)


class _Publisher:
    """One batch after the other; a broker that is away is waited for."""

    def __init__(self, sink: Sink, config: Config) -> None:
        self._sink = sink
        self._backoff = Backoff(config.delivery.backoff_initial, config.delivery.backoff_max)
        self._up = False

    async def publish(self, batch: Batch, place: Place) -> None:
        while batch.events:
            try:
                if not self._up:
                    await self._sink.open()
                    self._up = True
                rejected = await self._sink.publish(batch)
            except TransientError as exc:
                self._up = False
                wait = self._backoff.next(random.random())  # noqa: S311  spreading, not secrecy
                log.warning("sink.failed", error=exc, wait_seconds=round(wait, 3))
                await asyncio.sleep(wait)
                continue
            self._backoff.reset()
            if rejected:
                event, reason = rejected[0]
                raise EventRejected(
                    f"event {event.id.decode(errors='replace')!r} cannot be published: {reason}",
                    hint="what came before it was published; go on behind it with --seq"
                    + (f" (this page ended at {place.seq})" if place.seq is not None else ""),
                )
            return


# -------------------------------------------------------------------------------------------------- by the active relay


async def _request(
    session: Session, config: Config, selection: Selection, run: str, total: int | None, show: Show, *, detach: bool
) -> Report:
    rows = await fetch(
        session,
        "INSERT INTO public.outbox_relay_requests (relay, run, selection, total) VALUES (%s, %s, %s::jsonb, %s)"
        " RETURNING id",
        config.relay.name,
        run,
        orjson.dumps(selection.to_json()).decode(),
        total,
    )
    request = int(rows[0][0])
    if detach:
        return Report(run, "requested", total, request=request)
    show(0, total)
    asked, told = time.monotonic(), False
    while True:
        rows = await fetch(
            session,
            "SELECT state, published, skipped, coalesce(error, '') FROM public.outbox_relay_requests WHERE id = %s",
            request,
        )
        if not rows:
            raise SetupError(f"the request {request} was deleted", hint="ask again")
        state, published, skipped, error = rows[0]
        show(published, total)
        if state == "done":
            return Report(run, "done", total, published, skipped, request)
        if state == "failed":
            raise OperatorError(
                f"the replay failed after {published}{'' if total is None else f' of {total}'} events: {error}",
                hint="the log of the active relay says more",
            )
        if state == "requested" and not told and time.monotonic() - asked > _LONELY:
            told = True
            log.warning(
                "replay.waiting",
                request=request,
                hint="the stream belongs to the relay alone, so the active relay does it as soon as it streams; "
                "it is safe to leave: the request stays",
            )
        await asyncio.sleep(_WATCH)
