"""The NATS JetStream sink, shared mode: other writers may use the stream, duplicates are kept out by `Nats-Msg-Id`.

Publishes are pipelined with one ack inbox. This module opens and closes; the window of unacknowledged events is in
`nats_window`, the connection in `nats_connection`, the streams in `nats_streams`. The sink never reconnects by itself:
after a failure it stays failed until the pipeline opens it again and submits what is not known to be durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.config import JetStream
from relay.errors import OperatorError, RelayError, SinkUnavailable
from relay.event import Batch, Rejected
from relay.sink.nats_connection import NatsConnection
from relay.sink.nats_streams import Streams
from relay.sink.nats_window import Window


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
            window.fail(SinkUnavailable("the connection to NATS was closed"))
        if connection is not None:
            await connection.close()
