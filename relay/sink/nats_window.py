"""The window of unacknowledged events on one NATS connection: frames, order per key, acks counted per batch.

Strict order: a key has at most one unacknowledged event on the wire; later ones wait in the key's lane, across batches,
and go out when its ack arrives. So a lost or refused event can never be overtaken by a later one of its key. `relaxed`
has no lanes.

A rejected event blocks its key: what is queued or submitted behind it is returned as rejected too ("behind …"), never
sent, until that very event (same id) is submitted again or the sink is opened anew. The pipeline so learns every event
that it has to halt on, park or skip, no publish hangs, and nothing later of the key becomes durable in between.

Everything here runs on the event loop without awaiting; per event there is one dict entry and no task or future.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from relay.errors import RelayError, SetupError, SinkUnavailable
from relay.event import Batch, Event, HeaderNames, Rejected
from relay.sink import nats_acks, subjects
from relay.sink.nats_connection import Frame, NatsConnection
from relay.sink.nats_streams import StreamState

Key = bytes | str | None
MAX_HEADER_BYTES = 65_535  # the server's limit for a header block (10097)
_MAX_ROUTES = 20_000
MAX_TEMPLATES = 2_000
# Nats-* is a command to the server; of these only the one that routing sends for a row that names its stream.
_HEADER_NAME = re.compile(r"(?!nats-(?!expected-stream$))[!-9;-~]+", re.IGNORECASE)
_TOPIC = attrgetter("topic")
_TICKS = 4  # an ack timeout is noticed after one to one and a quarter of it


class Flight:
    """One batch under way."""

    __slots__ = ("batch", "first", "future", "lookup", "marks", "rejected", "remaining")

    def __init__(self, batch: Batch, future: asyncio.Future[Sequence[Rejected]]) -> None:
        self.batch = batch
        self.future = future
        self.first = -1  # token of its first event; they are consecutive. -1: not sent yet
        self.remaining = len(batch.events)
        self.rejected: dict[int, Rejected] = {}  # by index in the batch
        self.lookup = False  # its publish call has to look for streams before anything more is sent
        self.marks: dict[str, int] = {}  # fenced: sequence of its last event in each stream


class Window:
    """All that is between `publish` and the acks, from one `open` to the next failure."""

    def __init__(
        self, connection: NatsConnection, find: Callable[[str], StreamState], *, strict: bool, ack_timeout: float
    ) -> None:
        self._connection = connection
        self._find = find
        self._strict = strict
        self._ack_timeout = ack_timeout
        self._loop = asyncio.get_running_loop()
        self._next = 1
        self._flights: dict[Flight, None] = {}
        self._held: list[Flight] | None = None  # batches behind a stream lookup
        self._pending: dict[bytes, tuple[Flight, Key]] = {}  # by token: on the wire, or waiting in a lane
        self._lanes: dict[Key, deque[Frame] | None] = {}  # keys with an event on the wire: the frames behind it
        self._blocked: dict[Key, bytes] = {}  # keys behind a rejected event: its id
        self._routes: dict[str, bytes | None] = {}  # topic: the frame's beginning; None if it is no subject
        self._templates: dict[HeaderNames, tuple[bytes | None, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._seen: tuple[Flight, int] | None = None
        self._quiet = 0
        self.failure: RelayError | None = None
        self.duplicates = 0

    @property
    def on_the_wire(self) -> int:
        """Events that were sent and are not acknowledged."""
        if not self._strict:
            return len(self._pending)
        return len(self._lanes)

    # ------------------------------------------------------------------------------------------------------ going out

    def submit(self, batch: Batch) -> Flight:
        """Send the batch, or hold it behind a lookup (`flight.lookup`: the caller then has to look, and `release`)."""
        if self.failure is not None:
            raise nats_acks.again(self.failure)
        flight = Flight(batch, self._loop.create_future())
        if not batch.events:
            flight.future.set_result(())
            return flight
        self._flights[flight] = None
        if self._held is not None:
            self._held.append(flight)
        else:
            try:
                self._route(batch.events)
            except SetupError:
                self._held = [flight]
                flight.lookup = True
            else:
                self._send(flight)
        return flight

    def release(self) -> None:
        """The streams were read again: send what was held, in order; a topic that has no stream now never had one."""
        held, self._held = self._held or [], None
        for flight in held:
            if self.failure is None:
                try:
                    self._route(flight.batch.events)
                except SetupError as exc:
                    self.fail(exc)
                else:
                    self._send(flight)

    def _route(self, events: list[Event]) -> None:
        """See to it that every topic has its route."""
        routes = self._routes
        topics = set(map(_TOPIC, events))
        unknown = topics.difference(routes)
        if unknown:
            if len(routes) + len(unknown) > _MAX_ROUTES:
                routes.clear()
                unknown = topics
            for topic in unknown:
                if subjects.fault(topic):
                    routes[topic] = None
                else:
                    self._find(topic)
                    routes[topic] = b"HPUB %b %b." % (topic.encode(), self._connection.inbox)

    def _send(self, flight: Flight) -> None:
        events = flight.batch.events
        flight.first = first = self._next
        self._next = first + len(events)
        routes, pending, lanes, blocked = self._routes, self._pending, self._lanes, self._blocked
        strict, max_payload = self._strict, self._connection.max_payload
        shared = (flight, None)
        frames: list[Frame] = []
        append = frames.append
        join = b"".join
        last: HeaderNames | None = None
        template: bytes | None = None
        fixed = 0
        for token, event in enumerate(events, first):
            event_id, topic, key, names, values, body, _, _, _ = event
            if key is None:
                key = topic  # type: ignore[assignment]
            if blocked and key in blocked and not self._unblocked(flight, token, event, key):
                continue
            if names is not last:
                last = names
                template, fixed = self._template(names)
            if body is None:
                body = b""
            route = routes[topic]
            if template is None or route is None:
                self._reject(flight, token, key, self._fault(event))
                continue
            text = join((event_id, *values))
            size = fixed + len(text)
            total = size + len(body)
            # `10 in text` is a memchr: a tenth of what counting line ends in the rendered block costs
            if 10 in text or 13 in text or 0 in text or total > max_payload or size > MAX_HEADER_BYTES:
                self._reject(flight, token, key, self._misfit(size, total))
                continue
            name = b"%d" % token
            frame = (route, name, template % (size, total, event_id, *values), body, b"\r\n")
            if not strict:
                pending[name] = shared
                append(frame)
                continue
            pending[name] = (flight, key)
            if key in lanes:
                lane = lanes[key]
                if lane is None:
                    lanes[key] = deque((frame,))
                else:
                    lane.append(frame)
            else:
                lanes[key] = None
                append(frame)
        if frames:
            self._connection.send(frames)
        if flight.remaining == 0:
            self._finish(flight)
        elif self._timer is None:
            self._start_timer()

    def _template(self, names: HeaderNames) -> tuple[bytes | None, int]:
        """Sizes and headers with % for each value, and the bytes of a header block without values.

        None if a name cannot be sent.
        """
        try:
            return self._templates[names]
        except KeyError:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            fine = sendable(names)
            block = b"NATS/1.0\r\nNats-Msg-Id: %b\r\n" + names.block + b"\r\n"
            fixed = len(block % ((b"",) * (len(names.names) + 1)))
            self._templates[names] = known = (b" %d %d\r\n" + block if fine else None, fixed)
            return known

    # ------------------------------------------------------------------------------------------------------ coming in

    def on_acks(self, tokens: list[bytes], seqs: list[bytes]) -> None:  # noqa: ARG002  a fence looks at them
        """Plain acknowledgements: the hot path."""
        if self.failure is not None:
            return  # late: the events were handed back as not known to be durable
        take, lanes, strict = self._pending.pop, self._lanes, self._strict
        frames: list[Frame] = []
        for token in tokens:
            entry = take(token, None)
            if entry is None:
                continue
            flight, key = entry
            if strict:
                lane = lanes[key]
                if lane:
                    frames.append(lane.popleft())
                else:
                    del lanes[key]
            flight.remaining -= 1
            if flight.remaining == 0:
                self._finish(flight)
        if frames:
            self._connection.send(frames)

    def on_reply(self, token: bytes, status: bytes, payload: bytes) -> None:
        """Any other answer: duplicates, errors, no responders."""
        entry = self._pending.get(token)
        if entry is None:
            return
        flight, key = entry
        try:
            ack = nats_acks.read(status, payload)
        except RelayError as exc:
            self.fail(exc)
            return
        event = flight.batch.events[int(token) - flight.first]
        verdict = nats_acks.judge(ack, event.topic)
        if isinstance(verdict, RelayError):
            self.fail(verdict)
            return
        if verdict is None:
            self.duplicates += ack.duplicate
            self.on_acks([token], [b"%d" % ack.seq])
            return
        del self._pending[token]
        self._reject(flight, int(token), key, verdict)
        if self._strict:
            self._reject_behind(key, event.id)
        for unfinished in [flight for flight in self._flights if flight.remaining == 0]:
            self._finish(unfinished)

    def on_lost(self, error: RelayError) -> None:
        self.fail(error)

    def _finish(self, flight: Flight) -> None:
        del self._flights[flight]
        if not flight.future.done():  # or its publish call was cancelled
            rejected = flight.rejected
            flight.future.set_result([rejected[at] for at in sorted(rejected)] if rejected else [])

    # ---------------------------------------------------------------------------------------------- rejected and failed

    def _reject(self, flight: Flight, token: int, key: Key, reason: str) -> None:
        event = flight.batch.events[token - flight.first]
        flight.rejected[token - flight.first] = Rejected(event, reason)
        flight.remaining -= 1
        if self._strict:
            self._blocked.setdefault(key, event.id)

    def _reject_behind(self, key: Key, culprit: bytes) -> None:
        """Take back what waits in the lane of a rejected event; none of it was sent."""
        self._lanes.pop(key, None)
        queued = [(token, flight) for token, (flight, of) in self._pending.items() if of == key]
        for token, flight in queued:
            del self._pending[token]
            self._reject(flight, int(token), key, behind(culprit))

    def _unblocked(self, flight: Flight, token: int, event: Event, key: Key) -> bool:
        """True if the event is the rejected one itself, submitted again; others are rejected behind it."""
        culprit = self._blocked[key]
        if culprit == event.id:
            del self._blocked[key]
            return True
        self._reject(flight, token, key, behind(culprit))
        return False

    def _fault(self, event: Event) -> str:
        if fault := subjects.fault(event.topic):
            return fault
        bad = [name for name in event.header_names.names if not _HEADER_NAME.fullmatch(name)]
        return f"header name {bad[0][:200]!r} cannot be sent to NATS"

    def _misfit(self, size: int, total: int) -> str:
        if total > self._connection.max_payload:
            return f"headers and body have {total} bytes; the server takes {self._connection.max_payload} (max_payload)"
        if size > MAX_HEADER_BYTES:
            return f"the headers have {size} bytes; NATS takes {MAX_HEADER_BYTES}"
        return "a header value, or the id, contains a line break or NUL"

    def fail(self, error: RelayError) -> None:
        """End of this window: every unfinished publish raises; its batch keeps what is not known to be durable."""
        if self.failure is not None:
            return
        self.failure = error
        for flight in self._flights:
            if flight.first >= 0:
                flight.batch.events = self._unfinished(flight)
            if not flight.future.done():
                flight.future.set_exception(nats_acks.again(error))
                flight.future.exception()  # whoever gave up meanwhile does not ask
        for state in (self._flights, self._pending, self._lanes, self._blocked, self._routes):
            state.clear()
        self._held = None
        if self._timer is not None:
            self._timer.cancel()
        self._connection.abort()

    def _unfinished(self, flight: Flight) -> list[Event]:
        """The events of a batch that are not known to be durable."""
        pending, first = self._pending, flight.first
        return [
            event
            for index, event in enumerate(flight.batch.events)
            if b"%d" % (first + index) in pending or index in flight.rejected
        ]

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._ack_timeout / _TICKS, self._watch)

    def _watch(self) -> None:
        """The one timer. The oldest batch only waits for its own events, so it must progress, whatever others do."""
        self._timer = None
        oldest = next(iter(self._flights), None)
        if oldest is None:
            self._seen = None
            return
        if oldest.first < 0 or self._seen != (oldest, oldest.remaining):
            self._seen, self._quiet = (oldest, oldest.remaining), 0
        else:
            self._quiet += 1
        if self._quiet >= _TICKS:
            self.fail(SinkUnavailable(f"no acknowledgement from JetStream for {self._ack_timeout:g} s"))
        else:
            self._start_timer()


def sendable(names: HeaderNames) -> bool:
    """Whether NATS takes headers of these names."""
    return all(_HEADER_NAME.fullmatch(name) for name in names.names)


def behind(culprit: bytes) -> str:
    return f"behind rejected event {culprit.decode(errors='replace')} of the same key"
