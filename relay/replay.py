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
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson
import structlog

from relay.backoff import Backoff
from relay.config import Config
from relay.config.sink import legal_topic
from relay.errors import ConfigError, EventRejected, OperatorError, SetupError, TransientError
from relay.event import Batch
from relay.lsn import NOWHERE
from relay.replay_rows import Pace, Reader, reader_of
from relay.sink import Sink, exclusive, open_plain_sink
from relay.sink.subjects import fault
from relay.source.anchor import WalRows
from relay.source.selection import Place, Selection, original_id, replayed
from relay.source.session import Session, connect
from relay.source.slot import fetch, identity_of
from relay.wish import Wish, check_wish, resolve

log = structlog.get_logger("relay.replay")

Show = Callable[[int, int | None], None]
"""published, total (None: not known): called as a replay goes on."""

_WATCH = 0.3  # seconds between two looks at a request
_LONELY = 3.0  # … after which it is said that no relay took it up


@dataclass(frozen=True, slots=True)
class Report:
    """What was done. `skipped` rows cannot be routed: the relay has never published them either."""

    run: str
    state: str  # counted | requested | done
    total: int | None  # None: not counted before
    published: int = 0
    skipped: int = 0
    request: int | None = None


def new_run() -> str:
    """Names a run; sorts by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(3).hex()}"


def _check_topic(config: Config, topic: str | None) -> None:
    """A name that the broker could never take is told before anything is published."""
    if topic is None:
        return
    reason: str | None = None
    if config.sink.kind == "jetstream":
        reason = fault(topic)
    elif config.sink.kind == "kafka":
        reason = None if legal_topic(topic) else f"{topic!r} is not a legal topic name"
    if reason:
        raise ConfigError([f"--topic: {reason}"])


async def replay(config: Config, wish: Wish, show: Show, *, dry_run: bool = False, detach: bool = False) -> Report:
    """Do it, or have it done; returns when it is done, except with `detach`."""
    check_wish(wish)
    _check_topic(config, wish.topic)
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
                    f"event {original_id(event)!r} cannot be published: {reason}",
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
