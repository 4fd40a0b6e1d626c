"""The streams that events go to: checked or created at start, looked up by topic. Never changes an existing stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from relay.config import JetStream, Stream
from relay.errors import SetupError, SinkUnavailable
from relay.sink.nats_connection import ApiError, NatsConnection
from relay.sink.subjects import covers

log = structlog.get_logger("relay.sink.nats")

OWNED = "outbox of the relay"  # the description of a stream that a relay made: only relays write to it

_ATOMIC = (2, 12, 1)  # 2.12.0 refuses message ids in atomic batches
_NOT_FOUND = 10059
_NAME_IN_USE = 10058
_NO_PEERS = 10005
_INVALID = 10052  # settings that the server never takes; its status is 500 all the same
_NOT_ENABLED = (10039, 10076)
_DUPLICATE_WINDOW = 120.0  # nats-server's own default


@dataclass(slots=True)
class StreamState:
    """What the sink knows of one stream."""

    name: str
    subjects: tuple[str, ...]
    refusal: str | None  # why nothing can be published to it
    replicas: int = 1
    owned: bool = False  # made by a relay, for itself
    sourced: bool = False  # takes messages of other streams, too
    retention: str = "limits"
    duplicate_window: float = 0.0  # seconds
    atomic: bool = False  # takes atomic batches

    def poisons(self, version: tuple[int, ...]) -> bool:
        """Replicated streams of these servers remember the ids of messages that they refused, as if they had them."""
        return self.replicas > 1 and (2, 10) <= version[:2] <= (2, 11)

    @classmethod
    def of(cls, config: dict[str, Any]) -> StreamState:
        refusal = None
        if config.get("sealed"):
            refusal = "it is sealed"
        elif config.get("mirror"):
            refusal = "it is a mirror"
        elif config.get("no_ack"):
            refusal = "it does not acknowledge (no_ack)"
        elif config.get("allow_msg_counter"):
            refusal = "it is a counter"
        return cls(
            config["name"],
            tuple(config.get("subjects") or ()),
            refusal,
            replicas=int(config.get("num_replicas") or 1),
            owned=(config.get("description") or "").startswith(OWNED),
            sourced=bool(config.get("sources")),
            retention=config.get("retention") or "limits",
            duplicate_window=(config.get("duplicate_window") or 0) / 1e9,
            atomic=bool(config.get("allow_atomic")),
        )


class Streams:
    """Topic → stream, over the configured streams, or without any over all that the server has."""

    def __init__(self, config: JetStream) -> None:
        self._configured = config.streams
        self._atomic = config.atomic
        self._mode = config.mode
        self._ack_timeout = config.ack_timeout
        self.prefix = f"$JS.{config.domain}.API" if config.domain else "$JS.API"
        self.known: list[StreamState] = []

    def fenced(self, mode: str) -> bool:
        """Whether to publish with a fence: `auto` does where every stream is the relay's own."""
        if mode == "shared" or not self.known:
            return False
        sourced = [stream.name for stream in self.known if stream.sourced]
        if mode == "fenced":
            if not self._configured:
                raise SetupError(
                    'sink.jetstream.mode = "fenced" needs the streams to be named',
                    hint="list them under [[sink.jetstream.streams]]",
                )
            if sourced:
                raise SetupError(
                    f"stream {sourced[0]} takes messages of other streams: it cannot be fenced",
                    hint='set sink.jetstream.mode = "shared"',
                )
            return True
        return bool(self._configured) and not sourced and all(stream.owned for stream in self.known)

    def check_atomic(self, version: tuple[int, ...]) -> None:
        """Raises SetupError unless all streams take atomic batches in which every event has its id."""
        if version < _ATOMIC:
            raise SetupError(
                f"sink.jetstream.atomic needs nats-server {'.'.join(map(str, _ATOMIC))} or newer; this one is "
                f"{'.'.join(map(str, version))}",
                hint="set sink.jetstream.atomic = false, or update the server",
            )
        for stream in self.known:
            if not stream.atomic:
                raise SetupError(
                    f"stream {stream.name} does not take atomic batches (allow_atomic)",
                    hint="set allow_atomic for the stream, or sink.jetstream.atomic = false",
                )

    async def load(self, connection: NatsConnection) -> None:
        """Read the streams from the server; create what is missing and may be created."""
        try:
            if self._configured:
                states = [await self._found(connection, stream) for stream in self._configured]
                pairs = zip(self._configured, states, strict=True)
                if missing := [stream for stream, state in pairs if state is None and not stream.create]:
                    raise _missing(missing)
                window = self._usual_window(states)
                self.known = [
                    self._checked(stream, state or await self._create(connection, stream, window))
                    for stream, state in zip(self._configured, states, strict=True)
                ]
            else:
                self.known = await self._all(connection)
        except ApiError as exc:
            raise _translated(exc) from None

    def find(self, topic: str) -> StreamState:
        """The stream of a topic. Raises SetupError if there is none, or if it takes nothing."""
        for stream in self.known:
            for subject in stream.subjects:
                if covers(subject, topic):
                    if stream.refusal:
                        raise SetupError(
                            f"stream {stream.name} cannot take events on {topic}: {stream.refusal}",
                            hint="publish to another stream, or recreate this one",
                        )
                    return stream
        listed = "; ".join(f"{stream.name}: {', '.join(stream.subjects) or '-'}" for stream in self.known[:10])
        if len(self.known) > 10:
            listed += f"; and {len(self.known) - 10} more"
        which = "the configured streams" if self._configured else "the streams on the server"
        raise SetupError(
            f"no stream for subject {topic}; {which} have {listed or 'no subjects: there are none'}",
            hint=f"add {topic!r}, or a wildcard that covers it, to a stream's subjects (nats stream edit)"
            + (", and the stream to sink.jetstream.streams" if self._configured else ""),
        )

    async def _found(self, connection: NatsConnection, stream: Stream) -> StreamState | None:
        """None: it is missing."""
        try:
            answer = await connection.request(f"{self.prefix}.STREAM.INFO.{stream.name}")
        except ApiError as exc:
            if exc.err_code != _NOT_FOUND:
                raise
            return None
        return StreamState.of(answer["config"])

    def _usual_window(self, states: Sequence[StreamState | None]) -> float:
        """For every event within it the server keeps an id in memory, and looks through them (ADR 0019).

        A fence needs them only where its waves meet a predecessor's (`nats_fence`).
        """
        fenced = self._mode == "fenced" or (
            self._mode == "auto" and all(state is None or (state.owned and not state.sourced) for state in states)
        )
        return 2 * self._ack_timeout if fenced else _DUPLICATE_WINDOW

    def _checked(self, stream: Stream, state: StreamState) -> StreamState:
        if state.refusal:
            raise SetupError(
                f"stream {state.name} cannot take events: {state.refusal}",
                hint="name another stream, or recreate this one",
            )
        for subject in stream.subjects:
            if not any(covers(real, subject) for real in state.subjects):
                raise SetupError(
                    f"stream {state.name} does not listen on {subject}; it has {', '.join(state.subjects) or '-'}",
                    hint=f"nats stream edit {state.name} --subjects '{','.join((*state.subjects, subject))}', "
                    "or correct sink.jetstream.streams",
                )
        return state

    async def _create(self, connection: NatsConnection, stream: Stream, usual_window: float) -> StreamState:
        window = stream.duplicate_window or usual_window
        if stream.max_age:  # the server refuses a dedupe window that is longer than the messages live
            window = min(window, stream.max_age)
        settings = {
            "name": stream.name,
            "description": OWNED,
            "subjects": list(stream.subjects),
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": stream.replicas,
            "max_age": round(stream.max_age * 1e9),
            "duplicate_window": round(window * 1e9),
            **({"allow_atomic": True} if self._atomic else {}),
        }
        try:
            answer = await connection.request(f"{self.prefix}.STREAM.CREATE.{stream.name}", settings)
        except ApiError as exc:
            if exc.err_code == _NAME_IN_USE:  # somebody was faster, with other settings: theirs count
                answer = await connection.request(f"{self.prefix}.STREAM.INFO.{stream.name}")
                return StreamState.of(answer["config"])
            if exc.err_code == _NO_PEERS and "offline" in str(exc):  # also for a moment after a server came back
                raise SinkUnavailable(f"stream {stream.name} cannot be created for now: {exc}") from None
            if exc.err_code == _INVALID or (exc.code < 500 and exc.err_code not in _NOT_ENABLED):
                raise SetupError(
                    f"stream {stream.name} cannot be created: {exc}", hint="correct it in [[sink.jetstream.streams]]"
                ) from None
            raise
        log.info("stream.created", stream=stream.name, subjects=stream.subjects)
        return StreamState.of(answer["config"])

    async def _all(self, connection: NatsConnection) -> list[StreamState]:
        known: list[StreamState] = []
        while True:
            answer = await connection.request(f"{self.prefix}.STREAM.LIST", {"offset": len(known)})
            page: Sequence[dict[str, Any]] = answer.get("streams") or ()
            known += [StreamState.of(stream["config"]) for stream in page]
            if not page or len(known) >= answer.get("total", 0):
                return known


def _missing(streams: Sequence[Stream]) -> SetupError:
    """All of them at once, and one remedy per stream, to paste."""
    names = ", ".join(stream.name for stream in streams)
    commands = "; ".join(
        f"nats stream add {stream.name} --subjects '{','.join(stream.subjects)}' --defaults" for stream in streams
    )
    one = len(streams) == 1
    return SetupError(
        f"{'stream' if one else 'streams'} {names} {'does' if one else 'do'} not exist",
        hint=f"set create = true for {'it' if one else 'them'} in [[sink.jetstream.streams]], or run: {commands}",
    )


def _translated(error: ApiError) -> SetupError | SinkUnavailable:
    if error.err_code in _NOT_ENABLED:
        return SetupError(
            f"JetStream is not enabled for this account: {error}", hint="enable JetStream in the server's configuration"
        )
    if error.code >= 500:
        return SinkUnavailable(f"JetStream refuses for now: {error}")
    return SetupError(f"JetStream refuses the request: {error}")
