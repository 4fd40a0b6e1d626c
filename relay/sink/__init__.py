"""The seam to the broker. A Sink makes events durable; it never confirms, never skips, never reorders one key.

`open_sink` picks the implementation; each module below translates its client's exceptions into ours, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from relay.event import Batch, Rejected

if TYPE_CHECKING:
    from relay.config import Config
    from relay.errors import RelayError


UNCOUNTABLE = ""
"""Among the marks: 1 if what a destination holds beyond its mark is not simply the next events in their order."""
ROUTING = "#"
"""Among the marks: a fingerprint of the routing that they were made with. Not for the sink."""

BEHIND = "behind rejected event "
"""Begins the reason of events that were rejected only because an earlier one of their key was."""


class Sink(Protocol):
    """What the pipeline needs from a broker."""

    @property
    def duplicates(self) -> int:
        """Events of which the broker said that it has them already. They are durable all the same."""
        ...

    def resume(self, marks: Mapping[str, int], origin: str) -> None:
        """What the checkpoint says of the broker, before `open`; `origin` begins the `relay-position` of our events.

        Marks are for sinks with a fence: how far each destination is covered by the checkpoint. What it holds beyond is
        read back by `open`, and events that are found there are not published again; the mark does not pass them until
        they have come, or until a batch is `settled`.
        """

    @property
    def marks(self) -> Mapping[str, int]:
        """After `open`: all marks, with the beginning of destinations that are seen for the first time."""
        ...

    async def open(self) -> None:
        """Connect, and check that every configured destination exists. Called again after a failure, then from scratch.

        Raises SinkUnavailable when waiting may help, an OperatorError (SetupError, AuthError) when it will not.
        """

    def publish(self, batch: Batch) -> Awaitable[Sequence[Rejected]]:
        """Done when every event of the batch is durable, except the ones returned as rejected; raises otherwise.

        The call itself never waits and never raises. What it returns is a coroutine, which has to be started at once,
        or a future, when the batch is on its way already: one task less for each batch (ADR 0018). Called in order, and
        may overlap. After the first event that is not stored, nothing later of its key becomes durable until it is
        submitted again. A batch that fails keeps in `batch.events` only the events that are not known to be durable,
        and makes the others that are unfinished fail too; the pipeline then opens the sink again and submits the
        unfinished batches in order.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection; never waits for the broker. Safe to call in any state, and more than once."""


def failed(error: RelayError) -> asyncio.Future[Sequence[Rejected]]:
    """What `publish` returns when it knows at once."""
    future: asyncio.Future[Sequence[Rejected]] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()  # whoever gave up meanwhile does not ask
    return future


def open_plain_sink(config: Config) -> Sink:
    """A sink for somebody who is not the active relay: without its fence, without its transactional id."""
    match config.sink.kind:
        case "jetstream":
            from relay.sink.jetstream import JetStreamSink  # noqa: PLC0415

            return JetStreamSink(config.sink.jetstream.model_copy(update={"mode": "shared"}))
        case "kafka":
            from relay.sink.kafka import KafkaSink  # noqa: PLC0415

            return KafkaSink(config.sink.kafka)
        case "console":
            return open_sink(config)


async def exclusive(config: Config) -> bool:
    """Whether only the active relay may write to the broker's destinations; asks the broker if it has to."""
    if config.sink.kind != "jetstream":
        return False
    from relay.sink.jetstream import is_fenced  # noqa: PLC0415

    return await is_fenced(config.sink.jetstream)


def open_sink(config: Config) -> Sink:
    """The sink that `sink.kind` names, not yet connected."""
    match config.sink.kind:
        case "jetstream":
            from relay.sink.jetstream import JetStreamSink  # noqa: PLC0415  only the chosen client is imported

            return JetStreamSink(
                config.sink.jetstream, reach=config.delivery.max_in_flight_events + config.delivery.max_batch_events
            )
        case "kafka":
            if config.sink.kafka.mode == "exactly-once":
                from relay.sink.kafka_exactly_once import ExactlyOnceKafkaSink  # noqa: PLC0415

                return ExactlyOnceKafkaSink(config.sink.kafka)
            from relay.sink.kafka import KafkaSink  # noqa: PLC0415

            return KafkaSink(config.sink.kafka)
        case "console":
            from relay.sink.console import ConsoleSink  # noqa: PLC0415

            return ConsoleSink()
