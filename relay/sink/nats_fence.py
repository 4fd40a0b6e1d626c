"""Fenced publishing to a stream that is ours alone: exactly once and in order, through crashes of everybody (G4).

Every event carries `Nats-Expected-Last-Sequence`, so each is stored only directly behind its predecessor: a lost or
refused event refuses all that follow. So the last event of a run speaks for all of it: it is stored in its place, with
the sequence that it must have, only if they all are (ADR 0020). But somebody else's message in the place of a refused
event would let the next one in. A stream of ours has no other writer than a zombie relay, and that has no more on the
wire than its window; as far as that reaches beyond what the stream held when it was read (`quiet`), each event is
acknowledged for itself.

A zombie that read the same stream can only write the very events that we would write, in the same places; one that came
by another way (its successor recovers from the table, or routes differently) could slip in between. So in the range of
sequences that it may still write to (`danger`), a batch goes out in waves, each when the one before is acknowledged,
with at most one event of a key: whatever slips in, no event is stored before an earlier one of its key. What slips in
may be an event of the very wave, displacing another: that it is not stored a second time behind that one is left to the
server's deduplication. Where that cannot be relied on, a wave is one event.

After any failure the truth is read from the stream (`nats_chain`): the ids that it holds beyond the mark, the sequence
up to which the checkpoint covers it. An event whose id is among them is stored already and is skipped. That needs no
dedupe window, no trust in LSNs (after a restore they are issued again), and holds for streamed and for polled events
alike. A mark never passes an id that was read back and has not come: it would be forgotten by the next reading.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable

from relay.errors import RelayError, SetupError, SinkUnavailable
from relay.event import Event, HeaderNames, Rejected
from relay.hot import frames as quick_frames
from relay.sink import UNCOUNTABLE, nats_acks, nats_atomic, subjects
from relay.sink.nats_acks import REJECTED, Ack
from relay.sink.nats_chain import Chain
from relay.sink.nats_connection import Frame, NatsConnection
from relay.sink.nats_runs import RUN, Asked, Ways, runs, waves
from relay.sink.nats_streams import StreamState
from relay.sink.nats_window import MAX_HEADER_BYTES, MAX_TEMPLATES, Flight, Window, behind, sendable

log = logging.getLogger("relay.sink.nats")

WRONG_SEQUENCE = frozenset({10071, 10164})


class FencedWindow(Window):
    """A window of batches whose events are chained; see the module."""

    def __init__(
        self,
        connection: NatsConnection,
        find: Callable[[str], StreamState],
        *,
        ack_timeout: float,
        careful: bool,
        atomic: bool = False,
    ) -> None:
        """`careful`: the first batch goes out event by event, to find out which one the stream does not take.

        `atomic`: the others go out as atomic batches.
        """
        super().__init__(connection, find, strict=True, ack_timeout=ack_timeout)
        self._chains: dict[str, Chain] = {}
        self._with_ids = self._dedupes = True
        self._met: dict[bytes, Chain] = {}  # ids that the streams hold beyond the marks, until their events come
        self._ways: Ways = {}
        self._waiting: dict[bytes, Asked] = {}  # by token
        self._careful = careful
        self._atomic = atomic
        self._max_payload = connection.max_payload - (nats_atomic.OVERHEAD if atomic else 0)
        self._max_header = MAX_HEADER_BYTES - (nats_atomic.OVERHEAD if atomic else 0)
        self._waves: deque[list[int]] | None = None  # places in the batch that goes out bit by bit, not sent yet
        self._wave: list[int] = []  # those that are on the wire
        self._later: deque[Flight] = deque()  # batches behind that one
        self._uncountable = False  # a mark was given that is not countable
        self._plain = False  # nothing is left of what was read back, and there is no danger: every event is a new one
        self.suspicious = careful  # the next window should be careful
        self.gaps = False  # the server refused an event, and later ones are stored
        self.skipped = 0  # events that were stored already

    def begin(self, chains: Iterable[Chain], *, with_ids: bool, dedupes: bool, uncountable: bool) -> None:
        """What was read back. Without ids: this server may have poisoned those of events that it refused.

        `dedupes`: the server does not store an id again that it stored while the event was on the wire.
        """
        self._with_ids, self._dedupes, self._uncountable = with_ids, dedupes, uncountable
        for chain in chains:
            self._chains[chain.stream] = chain
            for event_id in chain.places:
                if event_id is not None:
                    self._met.setdefault(event_id, chain)
            chain.left = sum(1 for home in self._met.values() if home is chain)
            chain.left += chain.places.count(None) if chain.counting else 0

    @property
    def on_the_wire(self) -> int:
        return sum(asked.answers * asked.events for asked in self._waiting.values())

    # ------------------------------------------------------------------------------------------------------ going out

    def _route(self, events: list[Event]) -> None:
        ways = self._ways
        for topic in {event.topic for event in events}.difference(ways):
            if subjects.fault(topic):
                ways[topic] = None
                continue
            chain = self._chains.get(self._find(topic).name)
            if chain is None:
                raise SetupError(f"the stream of {topic} was not read when the connection was opened")
            ways[topic] = (b"HPUB %b " % topic.encode(), chain)

    def _send(self, flight: Flight) -> None:
        flight.first = self._next
        if flight.batch.settled and not self._plain:
            self._settle()
        if self._waves is not None:
            self._later.append(flight)
        else:
            self._send_now(flight)
        if self._timer is None and self._flights:
            self._start_timer()

    def _settle(self) -> None:
        """What was read back and did not come by now will not come."""
        if self._met:
            log.info("%d events that the streams hold beyond the checkpoint did not come again", len(self._met))
            self._met.clear()
        for chain in self._chains.values():
            chain.settle()
        self._plain = not self._endangered

    def _send_now(self, flight: Flight) -> None:
        events = flight.batch.events
        if self._careful or self._endangered:
            singly = self._careful or not self._dedupes
            self._waves = deque([place] for place in range(len(events))) if singly else waves(events)
            flight.remaining = len(events)
            self._next_wave(flight)
            return
        flight.remaining = 0
        if self._atomic:
            frames = self._batches(flight)
        else:
            frames = self._quick_runs(flight)
            if flight.remaining < len(events):
                frames += self._slow_runs(flight)
        flight.marks = self._marks()
        if frames:
            self._connection.send(frames)
        else:
            self._finish(flight)

    def _ask(self, asked: Asked) -> bytes:
        """The reply subject of frames, as it stands in them; from now on the flight waits for its answers."""
        token = b"%d" % self._next
        self._next += 1
        self._waiting[token] = asked
        asked.flight.remaining += asked.answers * asked.events
        return b"%b.%b " % (self._connection.inbox, token)

    def _batches(self, flight: Flight) -> list[Frame]:
        """An atomic batch for each stream."""
        homes = {way[0]: way[1].stream for way in self._ways.values() if way is not None}
        frames, _ = self._frames(flight, range(len(flight.batch.events)))
        streams = nats_atomic.apart(frames, homes)
        if not streams:
            return frames
        reply = self._ask(Asked(flight, sum(nats_atomic.answers(len(part)) for part in streams)))
        name = b".".join(reply.strip().rsplit(b".", 2)[1:])
        return [frame for part in streams for frame in nats_atomic.batched(part, name, reply)]

    @property
    def _endangered(self) -> bool:
        return not self._plain and any(chain.sent < chain.danger for chain in self._chains.values())

    @property
    def _special(self) -> bool:
        """Whether events must be looked at one by one: some are stored already, or may not be sent."""
        if self._plain:
            return bool(self._blocked)
        return bool(self._blocked or self._met or any(chain.counting for chain in self._chains.values()))

    def _quick_runs(self, flight: Flight) -> list[Frame]:
        """Frames of the leading events that are usual ones."""
        frames: list[Frame] = []
        events, at = flight.batch.events, 0
        if quick_frames is None or not self._connection.joins or self._special:
            return frames
        while at < len(events):
            event, before = events[at], at
            way, names = self._ways[event.topic], event.header_names
            if way is None or self._template(names)[0] is None:
                break
            chain = way[1]
            each = not chain.speaks_for_all(chain.sent)
            at, blob = quick_frames(
                events,
                at,
                min(at + RUN, len(events)),
                names,
                names.prefixes,
                self._ways,
                chain,
                chain.sent,
                b"%b.%d " % (self._connection.inbox, self._next),
                each,
                self._with_ids,
                MAX_HEADER_BYTES,
                self._connection.max_payload,
            )
            if at == before:
                break
            chain.advance(at - before)
            self._ask(self._asked(flight, at - before, chain.sent, each=each))
            frames.append((blob,))
        return frames

    def _slow_runs(self, flight: Flight) -> list[Frame]:
        """Frames of the other events: whatever they are. The reference for the quick ones."""
        sent = {chain: chain.sent for chain in self._chains.values()}
        events = flight.batch.events
        frames, places = self._frames(flight, range(flight.remaining, len(events)))
        for start, stop, chain in runs(events, places, self._ways):
            each = not chain.speaks_for_all(sent[chain])
            sent[chain] += stop - start
            reply = self._ask(self._asked(flight, stop - start, sent[chain], each=each))
            for at in range(start if each else stop - 1, stop):
                route, _, *rest = frames[at]
                frames[at] = (route, reply, *rest)
        return frames

    @staticmethod
    def _asked(flight: Flight, count: int, seq: int, *, each: bool) -> Asked:
        """A run that ends with the sequence `seq`."""
        return Asked(flight, count) if each else Asked(flight, 1, events=count, seq=seq)

    def _frames(self, flight: Flight, places: Iterable[int], reply: bytes = b"") -> tuple[list[Frame], list[int]]:
        """Frames of the events that are to be stored, chained, and their places."""
        events, ways, blocked, met = flight.batch.events, self._ways, self._blocked, self._met
        with_ids, max_payload, max_header = self._with_ids, self._max_payload, self._max_header
        special = self._special
        frames: list[Frame] = []
        taken: list[int] = []
        append, join = frames.append, b"".join
        last: HeaderNames | None = None
        template: bytes | None = None
        fixed = 0
        for place in places:
            event = events[place]
            event_id, topic, _, names, values, body, _, _, _ = event
            if special and (self._is_stored(event_id) or (blocked and self._is_behind(flight, place, event))):
                continue
            if names is not last:
                last = names
                template, fixed = self._template(names)
            way = ways[topic]
            if template is None or way is None:
                self._refuse(flight, place, self._fault(event))
                special = True
                continue
            route, chain = way
            sent = chain.sent
            if sent >= chain.limit:
                chain.grow()
            if body is None:
                body = b""
            text = join((event_id, *values)) if with_ids else join(values)
            size = fixed + chain.digits + len(text)
            total = size + len(body)
            if 10 in text or 13 in text or 0 in text or total > max_payload or size > max_header:
                self._refuse(flight, place, self._misfit(size, total))
                special = True
                continue
            if special and chain.counting and chain.skips(met):
                self.skipped += 1
                continue
            append((route, reply, template % (size, total, sent, event_id, *values), body, b"\r\n"))
            taken.append(place)
            chain.sent = sent + 1
        return frames, taken

    def _is_stored(self, event_id: bytes) -> bool:
        home = self._met.pop(event_id, None)
        if home is None:
            return False
        home.left -= 1
        self.skipped += 1
        return True

    def _is_behind(self, flight: Flight, place: int, event: Event) -> bool:
        """Behind a rejected event of its key, unless it is that event itself, submitted again."""
        key = event.topic if event.key is None else event.key
        culprit = self._blocked.get(key)
        if culprit is None:
            return False
        if culprit == event.id:
            del self._blocked[key]
            return False
        flight.rejected[place] = Rejected(event, behind(culprit))
        return True

    def _template(self, names: HeaderNames) -> tuple[bytes | None, int]:
        try:
            return self._templates[names]
        except KeyError:
            # %.0b takes its value and writes nothing
            block = b"NATS/1.0\r\nNats-Expected-Last-Sequence: %d\r\n"
            block += (b"Nats-Msg-Id: %b\r\n" if self._with_ids else b"%.0b") + names.block + b"\r\n"
            fixed = len(block % (0, *((b"",) * (len(names.names) + 1)))) - 1
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            known = self._templates[names] = (b"%d %d\r\n" + block if sendable(names) else None, fixed)
            return known

    def _marks(self) -> dict[str, int]:
        """How far the streams are covered once everything that was submitted so far is complete."""
        chains = self._chains.values()
        if self._plain:
            marks, uncountable = {chain.stream: chain.sent for chain in chains}, False
        else:
            marks = {chain.stream: chain.covered(self._met) for chain in chains}
            # Waves are not in the order of the events.
            uncountable = not all(chain.countable for chain in chains) or self._endangered
        if uncountable or self._uncountable:
            self._uncountable = True
            marks[UNCOUNTABLE] = int(uncountable)
        return marks

    # ------------------------------------------------------------------------------------------------------ coming in

    def on_acks(self, tokens: list[bytes], seqs: list[bytes]) -> None:
        for token, count in Counter(tokens).items() if len(tokens) > 1 else ((tokens[0], 1),):
            asked = self._waiting.get(token)
            if asked is None:  # late: the window has failed
                continue
            if asked.seq and asked.seq != (seq := int(seqs[tokens.index(token)])):
                self.suspicious = True
                self.fail(SinkUnavailable(f"an event was refused: sequence {seq} was stored instead of {asked.seq}"))
                return
            flight = asked.flight
            asked.answers -= count
            flight.remaining -= count * asked.events
            if asked.answers:
                continue
            del self._waiting[token]
            if self._waves is not None:
                self._next_wave(flight)
            elif flight.remaining == 0:
                self._finish(flight)

    def on_reply(self, token: bytes, status: bytes, payload: bytes) -> None:
        asked = self._waiting.get(token)
        if asked is None:
            return
        try:
            ack = nats_acks.read(status, payload)
        except RelayError as exc:
            self.fail(exc)
            return
        if ack.code == 0 and ack.seq > 0 and not ack.duplicate:
            self.on_acks([token], [b"%d" % ack.seq])
        elif self._waves is not None and len(self._wave) == 1:
            self._single_refused(asked.flight, ack, token)
        else:
            self.suspicious = ack.code in WRONG_SEQUENCE | REJECTED | nats_atomic.SPOILT or ack.code == 0
            self._refused(ack)

    def _single_refused(self, flight: Flight, ack: Ack, token: bytes) -> None:
        """An event that was alone on the wire did not take its place in the chain."""
        (place,) = self._wave
        way = self._ways[flight.batch.events[place].topic]
        assert way is not None
        chain = way[1]
        if ack.code == 0 and ack.seq == chain.sent:
            pass  # as a duplicate: the same frame from a connection before this one was in time
        elif ack.code == 0 and 0 < ack.seq < chain.sent:
            self.duplicates += 1  # it was stored before the mark
            chain.sent -= 1
        elif ack.code in REJECTED:
            self._refuse(flight, place, f"JetStream: {ack.error} ({ack.code})")
            self.gaps = True
            chain.sent -= 1
        else:
            self.suspicious = ack.code not in WRONG_SEQUENCE  # else somebody wrote, and the event is innocent
            self._refused(ack)
            return
        self.on_acks([token], [b"%d" % ack.seq])

    def _refused(self, ack: Ack) -> None:
        verdict = nats_acks.judge(ack, "the relay's streams")
        if ack.code in WRONG_SEQUENCE | nats_atomic.SPOILT:
            verdict = SinkUnavailable(f"JetStream refused the chain: {ack.error} ({ack.code})")
        elif verdict is None:
            verdict = SinkUnavailable(f"stream {ack.stream} holds an event of the batch already (sequence {ack.seq})")
        elif isinstance(verdict, str):
            verdict = SinkUnavailable(f"an event of the batch was refused: {verdict}")
        self.fail(verdict)

    def _next_wave(self, flight: Flight) -> None:
        """The next events of the batch; after the last ones the batches behind it follow."""
        while self._waves:
            self._wave = self._waves.popleft()
            reply = b"%b.%d " % (self._connection.inbox, self._next)
            frames, _ = self._frames(flight, self._wave, reply)
            flight.remaining -= len(self._wave)
            if frames:
                self._ask(Asked(flight, len(frames)))
                self._connection.send(frames)
                return
        self._waves = None
        self._careful = self.suspicious = False
        flight.marks = self._marks()
        self._finish(flight)
        while self._later and self._waves is None and self.failure is None:
            self._send_now(self._later.popleft())

    def _finish(self, flight: Flight) -> None:  # noqa: ARG002  an older one may have to be finished first
        """First in, first out: what is submitted again after a failure has no holes, so that places can be counted."""
        while self._flights:
            oldest = next(iter(self._flights))
            if oldest.remaining:
                return
            oldest.batch.marks = oldest.marks
            super()._finish(oldest)

    def _refuse(self, flight: Flight, place: int, reason: str) -> None:
        event = flight.batch.events[place]
        flight.rejected[place] = Rejected(event, reason)
        self._blocked.setdefault(event.topic if event.key is None else event.key, event.id)

    def _unfinished(self, flight: Flight) -> list[Event]:
        """All of them: what is stored is read back."""
        return flight.batch.events

    def fail(self, error: RelayError) -> None:
        super().fail(error)
        self._waiting.clear()
        self._later.clear()
        self._met.clear()
