"""The NATS JetStream sink. Publishes are pipelined; it never reconnects by itself: after a failure it stays failed
until the pipeline opens it again and submits what is not known to be durable.

    shared   other writers may use the stream: duplicates are kept out by `Nats-Msg-Id`      nats_window
    fenced   the stream is this relay's alone: exactly once, in order, a zombie is refused    nats_fence

This module opens, closes and chooses; the connection is in `nats_connection`, the streams are in `nats_streams`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence

from relay.config import JetStream
from relay.errors import OperatorError, RelayError, SetupError, SinkUnavailable
from relay.event import Batch, Rejected
from relay.sink import ROUTING, UNCOUNTABLE, failed
from relay.sink.nats_chain import Chain, read_chain
from relay.sink.nats_connection import ApiError, NatsConnection
from relay.sink.nats_fence import FencedWindow
from relay.sink.nats_streams import Streams
from relay.sink.nats_window import Flight, Window

log = logging.getLogger("relay.sink.nats")


class JetStreamSink:
    """`direct=False` publishes through nats-py's public API; meant for tests of that fallback."""

    def __init__(self, config: JetStream, *, direct: bool = True, reach: int = 10_000) -> None:
        """`reach`: how many unacknowledged events another relay of our name may have on the wire."""
        self._config = config
        self._reach = reach
        self._danger: dict[str, int] = {}
        self._direct = direct
        self._streams = Streams(config)
        self._connection: NatsConnection | None = None
        self._window: Window | None = None
        self._discovered: list[str] = []
        self._duplicates = 0
        self._marks: dict[str, int] = {}
        self._origin = ""
        self._suspicious = False  # an event of the last window was refused: find out which
        self._gaps = False  # a stream refused an event for good: what it holds behind it cannot be counted
        self._shared = False  # somebody else writes to our streams, and is allowed to

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        self._marks, self._origin = dict(marks), origin

    @property
    def marks(self) -> dict[str, int]:
        return dict(self._marks)

    @property
    def duplicates(self) -> int:
        """Events that the stream already had, since the start."""
        return self._duplicates + (self._window.duplicates if self._window else 0)

    @property
    def on_the_wire(self) -> int:
        """Events that were sent and are not acknowledged."""
        return self._window.on_the_wire if self._window else 0

    @property
    def fenceable(self) -> bool:
        """After `open`: whether mode `auto` would publish with a fence."""
        return self._streams.fenced("auto")

    async def open(self) -> None:
        await self.close()
        connection = NatsConnection(self._config, direct=self._direct)
        window = Window(
            connection,
            self._streams.find,
            strict=self._config.ordering == "strict",
            ack_timeout=self._config.ack_timeout,
        )
        self._connection, self._window = connection, window
        try:
            await connection.open(window, self._discovered)
            await self._streams.load(connection)
            if not self._shared and self._streams.fenced(self._config.mode):
                if self._config.atomic:
                    self._streams.check_atomic(connection.version)
                fenced = FencedWindow(
                    connection,
                    self._streams.find,
                    ack_timeout=self._config.ack_timeout,
                    careful=self._suspicious,
                    atomic=self._config.atomic,
                )
                connection.listen(fenced)
                self._window = window = fenced
                await self._read_chains(connection, fenced)
            if not isinstance(self._window, FencedWindow):
                if self._config.atomic:
                    log.warning("sink.jetstream.atomic has no effect: the streams are shared, not fenced")
                self._marks = {}
        except RelayError:
            failure = window.failure
            await self.close()
            if isinstance(failure, OperatorError):
                raise failure from None  # a refused right is the reason why a request had no answer
            raise
        except ApiError as exc:
            await self.close()
            raise SinkUnavailable(f"JetStream cannot be read back: {exc}") from None
        except BaseException:
            await self.close()
            raise
        self._discovered = connection.discovered or self._discovered

    async def _read_chains(self, connection: NatsConnection, window: FencedWindow) -> None:
        """What every stream holds beyond the checkpoint's mark; a stream seen for the first time begins here."""
        streams, marks, config = self._streams, self._marks, self._config
        begun = any(stream.name in marks for stream in streams.known)  # else nothing of ours can be beyond a mark
        countable = not begun or (not marks.get(UNCOUNTABLE) and not self._gaps)
        chains = []
        for stream in streams.known:
            mark = marks.get(stream.name)
            chain, strangers = await read_chain(
                connection, streams.prefix, stream, mark, self._origin, counting=countable
            )
            if strangers and config.foreign_writer == "stop":
                raise SetupError(
                    f"stream {stream.name} has another writer: {strangers[0]}",
                    hint='let only this relay publish to it; or set sink.jetstream.mode = "shared", which dedupes by '
                    "message id and has no fence",
                )
            if strangers:
                log.warning(
                    "stream %s has another writer: %s; from now on without a fence (shared)", stream.name, strangers[0]
                )
                self._shared = True
                raise SinkUnavailable(f"stream {stream.name} has another writer: opening again in shared mode")
            if mark is not None and not countable:  # a predecessor in another order: see nats_fence
                self._danger[stream.name] = max(chain.sent + self._reach, self._danger.get(stream.name, 0))
            chain.danger = self._danger.get(stream.name, 0)
            if config.foreign_writer == "stop":
                chain.quiet = chain.sent + self._reach
            _report(chain)
            chains.append(chain)
        for name in marks.keys() - {stream.name for stream in streams.known} - {UNCOUNTABLE, ROUTING}:
            log.warning(
                "stream %s is not configured any more: events that it holds beyond the checkpoint may come again in "
                "another stream",
                name,
            )
        self._marks = {chain.stream: chain.mark for chain in chains}
        if not countable:
            self._marks[UNCOUNTABLE] = 1
        poisoned = any(stream.poisons(connection.version) for stream in streams.known)
        # An event is on the wire for ack_timeout at most; twice that, for a server that is behind with its clock.
        dedupes = all(stream.duplicate_window >= 2 * config.ack_timeout for stream in streams.known)
        window.begin(chains, with_ids=not poisoned, dedupes=dedupes and not poisoned, uncountable=not countable)

    def publish(self, batch: Batch) -> Awaitable[Sequence[Rejected]]:
        window, connection = self._window, self._connection
        if window is None or connection is None:
            return failed(SinkUnavailable("the connection to NATS is not open"))
        try:
            flight = window.submit(batch)
        except RelayError as exc:
            return failed(exc)
        if not flight.lookup:
            return flight.future
        task = asyncio.get_running_loop().create_task(self._publish_after_lookup(connection, window, flight))
        interrupted = SinkUnavailable("the look for streams was interrupted")  # perhaps before it began
        task.add_done_callback(lambda task: window.fail(interrupted) if task.cancelled() else None)
        return task

    async def _publish_after_lookup(
        self, connection: NatsConnection, window: Window, flight: Flight
    ) -> Sequence[Rejected]:
        try:
            await self._streams.load(connection)
        except RelayError as exc:
            window.fail(exc)
        window.release()
        return await flight.future

    async def close(self) -> None:
        connection, window = self._connection, self._window
        self._connection = self._window = None
        if window is not None:
            self._duplicates += window.duplicates
            if isinstance(window, FencedWindow):
                self._suspicious = window.suspicious
                self._gaps = self._gaps or window.gaps
            window.fail(SinkUnavailable("the connection to NATS was closed"))
        if connection is not None:
            await connection.close()


async def is_fenced(config: JetStream) -> bool:
    """Whether a relay with this configuration publishes with a fence: then nobody else may write to its streams."""
    if config.mode != "auto":
        return config.mode == "fenced"
    sink = JetStreamSink(config.model_copy(update={"mode": "shared"}))
    try:
        await sink.open()
        return sink.fenceable
    finally:
        await sink.close()


def _report(chain: Chain) -> None:
    gone = chain.places.count(None)
    if not chain.places:
        return
    log.info("stream %s holds %d events beyond the checkpoint", chain.stream, len(chain.places) - gone)
    if gone and chain.counting:
        log.info("%d more are not there any more (consumed or expired): they are skipped by their place", gone)
    elif gone:
        log.warning(
            "%d messages of stream %s beyond the checkpoint are not there any more (consumed, expired or purged): "
            "their events may be published again",
            gone,
            chain.stream,
        )
