"""Requests to the active relay: replays into streams that nobody else may write to.

A task beside the pipeline (or beside the workers that claim) looks for them, reads the rows on a session of its own,
and hands them on a page at a time, so that the relay's own events hardly wait. The place is saved after every page: a
restart continues there, and what of a page was stored before a crash is recognised by its message id. A request that
cannot be carried out is marked as failed; it never stops the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import structlog

from relay.config import Config
from relay.errors import OperatorError, RelayError, SetupError, TransientError
from relay.event import Batch, Rejected
from relay.lsn import NOWHERE
from relay.progress import Progress
from relay.replay_rows import Pace, reader_of
from relay.sink.subjects import covers, fault
from relay.source.selection import Place, Selection, original_id, replayed
from relay.source.session import LASTING, Session, connect
from relay.source.slot import fetch

log = structlog.get_logger("relay.requests")

_INTERVAL = 2.0  # between two looks

_NEXT = """
    SELECT id, run, selection::text, published, skipped, place::text FROM public.outbox_relay_requests
    WHERE relay = %s AND state IN ('requested', 'running') ORDER BY id LIMIT 1
"""


class Injector(Protocol):
    """Whoever holds the sink: the pipeline, or the workers that claim."""

    def injecting(self) -> AbstractContextManager[None]: ...

    async def inject(self, batch: Batch) -> Sequence[Rejected]: ...


@dataclass(slots=True)
class _Request:
    id: int
    run: str
    selection: Selection
    published: int
    skipped: int
    place: Place


class Requests:
    """Serves one request after the other, in the order in which they were made."""

    def __init__(
        self,
        config: Config,
        injector: Injector,
        progress: Progress,
        stamp: Callable[[str], bytes],
        distrust_counts: Callable[[], Awaitable[None]],
    ) -> None:
        """`stamp`: run → the beginning of `relay-position`.

        `distrust_counts` makes durable that the broker's destinations hold more than the stream's own events.
        """
        self._config = config
        self._injector = injector
        self._progress = progress
        self._stamp = stamp
        self._distrust_counts = distrust_counts

    @classmethod
    def needed(cls, config: Config) -> bool:
        """Elsewhere a replay is done by its own process."""
        return config.sink.kind == "jetstream" and config.sink.jetstream.mode != "shared"

    async def run(self) -> None:
        """Until cancelled; raises when Postgres goes away, as the other sessions do."""
        name = f"{self._config.relay.name} requests"
        async with await connect(self._config.database, name, options=LASTING) as session:
            while True:
                try:
                    rows = await fetch(session, _NEXT, self._config.relay.name)
                except OperatorError as exc:
                    log.warning("requests.unavailable", error=exc, hint="run `relay setup`: replays need its tables")
                    return
                # What the broker holds must be known before more is put into it.
                if rows and self._progress.sink_down_since is None:
                    await self._serve(session, _read(rows[0]))
                else:
                    await asyncio.sleep(_INTERVAL)

    async def _serve(self, session: Session, request: _Request) -> None:
        log.info("replay.started", request=request.id, run=request.run, published=request.published)
        try:
            self._check_topic(request.selection.topic)
            if not await self._replay(session, request):
                log.warning("replay.cancelled", request=request.id, run=request.run, published=request.published)
                return
        except TransientError:
            raise  # the next life goes on with it
        except RelayError as exc:
            log.error("replay.failed", request=request.id, run=request.run, error=exc)  # noqa: TRY400  no traceback
            await self._save(session, request, "failed", str(exc))
            return
        await self._save(session, request, "done")
        log.info("replay.done", request=request.id, run=request.run, events=request.published, skipped=request.skipped)

    def _check_topic(self, topic: str | None) -> None:
        """A subject without a stream would stop the relay, so it is not tried."""
        if topic is None:
            return
        subjects = [subject for stream in self._config.sink.jetstream.streams for subject in stream.subjects]
        if fault(topic) or not any(covers(subject, topic) for subject in subjects):
            raise SetupError(
                fault(topic) or f"no configured stream has the subject {topic} (they have {', '.join(subjects)})"
            )

    async def _replay(self, session: Session, request: _Request) -> bool:
        """False: somebody cancelled it."""
        selection, injector, pace = request.selection, self._injector, Pace(request.selection.rate)
        if not await self._save(session, request, "running"):
            return False
        reader = await reader_of(session, self._config, selection)
        lane = f"replay:{request.run}".encode()  # what is refused holds up this replay, and nobody else
        async with AsyncExitStack() as stack:
            stack.enter_context(injector.injecting())
            await self._distrust_counts()
            pages = await stack.enter_async_context(aclosing(reader.pages(self._stamp(request.run), request.place)))
            async for page in pages:
                await pace.wait(len(page.events))
                events = replayed(page.events, request.run, selection.topic, key=lane)
                if events:
                    batch = Batch(events, NOWHERE, page.size, time.monotonic())
                    rejected = await injector.inject(batch)
                    if rejected:
                        event, reason = rejected[0]
                        raise SetupError(f"event {original_id(event)!r} cannot be published: {reason}")
                self._progress.replayed_events += len(events)
                request.published += len(events)
                request.skipped += len(page.rejected)
                request.place = page.place
                if not await self._save(session, request, "running"):
                    return False
        return True

    async def _save(self, session: Session, request: _Request, state: str, error: str | None = None) -> bool:
        rows = await fetch(
            session,
            "UPDATE public.outbox_relay_requests SET state = %s, published = %s, skipped = %s, place = %s::jsonb,"
            " error = %s, updated_at = now() WHERE id = %s AND state IN ('requested', 'running') RETURNING id",
            state,
            request.published,
            request.skipped,
            orjson.dumps(list(request.place)).decode(),
            error,
            request.id,
        )
        return bool(rows)


def _read(row: tuple[Any, ...]) -> _Request:
    id_, run, selection, published, skipped, place = row
    return _Request(
        id_,
        run,
        Selection.of(orjson.loads(selection)),
        published,
        skipped,
        Place(*orjson.loads(place)) if place else Place(),
    )
