"""The NATS JetStream sink. Publishes are pipelined; it never reconnects by itself: after a failure it stays failed
until the pipeline opens it again and submits what is not known to be durable.

    shared   other writers may use the stream: duplicates are kept out by `Nats-Msg-Id`      nats_window
    fenced   the stream is this relay's alone: exactly once, in order, a zombie is refused    nats_fence

This module opens, closes and chooses; the connection is in `nats_connection`, the streams are in `nats_streams`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from relay.config import JetStream
from relay.errors import OperatorError, RelayError, SetupError, SinkUnavailable
from relay.event import Batch, Rejected
from relay.sink.nats_connection import NatsConnection
from relay.sink.nats_fence import Chain, FencedWindow, read_chain
from relay.sink.nats_streams import Streams
from relay.sink.nats_window import Window

log = logging.getLogger("relay.sink.nats")


class JetStreamSink:
    """`direct=False` publishes through nats-py's public API; meant for tests of that fallback."""

    def __init__(self, config: JetStream, *, direct: bool = True) -> None:
        self._config = config
        self._direct = direct
        self._streams = Streams(config)
        self._connection: NatsConnection | None = None
        self._window: Window | None = None
        self._discovered: list[str] = []
        self._duplicates = 0
        self._marks: dict[str, int] = {}
        self._origin = ""
        self._suspicious = False  # an event of the last window was refused: find out which

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

    async def open(self) -> None:
        await self.close()
        connection = NatsConnection(self._config, direct=self._direct)
        chains: dict[str, Chain] = {}
        window = Window(
            connection,
            self._streams.find,
            strict=self._config.ordering == "strict",
            ack_timeout=self._config.ack_timeout,
        )
        fenced = FencedWindow(
            connection,
            self._streams.find,
            chains,
            ack_timeout=self._config.ack_timeout,
            careful=self._suspicious,
        )
        self._connection, self._window = connection, window
        try:
            await connection.open(window, self._discovered)
            await self._streams.load(connection)
            if self._streams.fenced(self._config.mode):
                connection.listen(fenced)
                self._window = window = fenced
                await self._read_chains(connection, chains)
        except RelayError:
            failure = window.failure
            await self.close()
            if isinstance(failure, OperatorError):
                raise failure from None  # a refused right is the reason why a request had no answer
            raise
        except BaseException:
            await self.close()
            raise
        self._discovered = connection.discovered or self._discovered

    async def _read_chains(self, connection: NatsConnection, chains: dict[str, Chain]) -> None:
        """What every stream holds beyond the checkpoint's mark; a stream seen for the first time begins here."""
        for stream in self._streams.known:
            mark = self._marks.get(stream.name)
            chain, strangers = await read_chain(connection, self._streams.prefix, stream.name, mark, self._origin)
            if strangers:
                raise SetupError(
                    f"stream {stream.name} has another writer: {strangers[0]}",
                    hint='let only this relay publish to it; or set sink.jetstream.mode = "shared", which dedupes by '
                    "message id and has no fence",
                )
            if mark is None:
                self._marks[stream.name] = chain.sent
            elif chain.held or chain.anonymous:
                log.info("stream %s holds %d events beyond the checkpoint", stream.name, len(chain.held))
            chain.with_ids = not (self._suspicious and stream.poisons(connection.version))
            chains[stream.name] = chain

    async def publish(self, batch: Batch) -> Sequence[Rejected]:
        window = self._window
        if window is None or self._connection is None:
            raise SinkUnavailable("the connection to NATS is not open")
        flight = window.submit(batch)
        if flight.lookup:
            try:
                await self._streams.load(self._connection)
            except RelayError as exc:
                window.fail(exc)
            except BaseException:
                window.fail(SinkUnavailable("the look for streams was interrupted"))
                raise
            window.release()
        return await flight.future

    async def close(self) -> None:
        connection, window = self._connection, self._window
        self._connection = self._window = None
        if window is not None:
            self._duplicates += window.duplicates
            self._suspicious = isinstance(window, FencedWindow) and window.suspicious
            window.fail(SinkUnavailable("the connection to NATS was closed"))
        if connection is not None:
            await connection.close()
