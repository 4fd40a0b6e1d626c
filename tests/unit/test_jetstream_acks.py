"""Acks out of arbitrary byte splits, what they mean, and the window that counts them."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from relay.errors import ProtocolError, RelayError, SetupError, SinkUnavailable
from relay.event import Batch, Event, HeaderNames, Transaction
from relay.lsn import LSN
from relay.sink.nats_acks import Ack, AckParser, InnerParser, again, judge, read
from relay.sink.nats_connection import Frame, NatsConnection
from relay.sink.nats_streams import StreamState
from relay.sink.nats_tap import Tap
from relay.sink.nats_window import Flight, Window

INBOX = b"_INBOX.abc"


# ------------------------------------------------------------------------------------------------------------- parsing


class Client:
    """What nats-py's parser calls in its client."""

    def __init__(self, on_ack: Callable[[bytes, bytes], None]) -> None:
        self.on_ack = on_ack
        self.others: list[bytes] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if subject.startswith(INBOX + b"."):
            self.on_ack(subject[len(INBOX) + 1 :], payload)
        else:
            self.others.append(subject + b" " + (headers or b"") + payload)

    async def _process_ping(self) -> None:
        self.others.append(b"PING")

    async def _process_err(self, text: str) -> None:
        self.others.append(text.encode())

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.others.append(b"INFO")


def plain(token: int, *, text: bytes = b'{"stream":"S", "seq":%d}') -> bytes:
    payload = text.replace(b"%d", b"%d" % (token + 1))
    return b"MSG %b.%d 1 %d\r\n%b\r\n" % (INBOX, token, len(payload), payload)


def headed(token: int) -> bytes:
    block = b"NATS/1.0 503\r\n\r\n"
    return b"HMSG %b.%d 1 %d %d\r\n%b\r\n" % (INBOX, token, len(block), len(block), block)


OTHERS: list[tuple[bytes, bytes]] = [
    (b"PING\r\n", b"PING"),
    (b"INFO {}\r\n", b"INFO"),
    (b"-ERR 'Some Text'\r\n", b"'some text'"),
    (b"MSG other 7 4\r\nMSG \r\n", b"other MSG "),
    (b"MSG other 7 0\r\n\r\n", b"other "),
    (b"MSG _INBOX.abcd.5 7 2\r\nhi\r\n", b"_INBOX.abcd.5 hi"),
    (b"HMSG other 7 12 14\r\nNATS/1.0\r\n\r\nhi\r\n", b"other NATS/1.0\r\n\r\nhi"),
    (b"+OK\r\n", b""),
]
KINDS: list[Callable[[int], bytes]] = [
    plain,
    lambda token: plain(token, text=b'{"stream":"S","seq":%d}'),
    lambda token: plain(token, text=b'{"stream":"S", "domain":"hub", "seq":%d}'),
    lambda token: plain(token, text=b'{"stream":"S", "seq":%d,"duplicate": true}'),
    lambda token: plain(
        token, text=b'{"error":{"code":503,"err_code":10077,"description":"full"},"stream":"S","seq":0}'
    ),
    headed,
]
_frames = st.lists(st.one_of(st.sampled_from(KINDS), st.sampled_from(OTHERS)), max_size=25)


_Frames = list[Callable[[int], bytes] | tuple[bytes, bytes]]


def on_the_wire(frames: _Frames) -> tuple[bytes, list[bytes], list[bytes]]:
    """The bytes, the tokens of our acks in them, and what is for others."""
    wire, expected, others = b"", [], []
    for token, frame in enumerate(frames):
        if isinstance(frame, tuple):
            wire += frame[0]
            others += [frame[1]] if frame[1] else []
        else:
            wire += frame(token)
            expected.append(b"%d" % token)
    return wire, expected, others


def told(seen: list[bytes]) -> Callable[[list[bytes], list[bytes]], None]:
    """For `on_acks`."""

    def on_acks(tokens: list[bytes], seqs: list[bytes]) -> None:
        assert len(tokens) == len(seqs)
        seen.extend(tokens)

    return on_acks


@given(_frames, st.lists(st.integers(0, 3000), max_size=30))
def test_every_ack_is_seen_once_however_the_bytes_are_split(frames: _Frames, cuts: list[int]) -> None:
    wire, expected, others = on_the_wire(frames)
    seen: list[bytes] = []
    client = Client(lambda token, _: seen.append(token))
    parser = AckParser(
        cast("InnerParser", Parser(client)), INBOX, told(seen), lambda token, _status, _payload: seen.append(token)
    )
    bounds = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})

    async def feed() -> None:
        for start, end in pairwise(bounds):
            await parser.parse(wire[start:end])

    asyncio.run(feed())
    assert seen == expected
    assert client.others == others


class Reader(asyncio.Protocol):
    """nats-py's: what it is given waits until somebody reads."""

    def __init__(self) -> None:
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data

    async def read(self, parser: AckParser, size: int) -> None:
        now, self.buffer = self.buffer[:size], self.buffer[size:]
        if now:
            await parser.parse(now)


@given(_frames, st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_the_tap_keeps_the_order_of_the_bytes(frames: _Frames, chance: random.Random) -> None:
    """However much arrives at a time, and however late nats-py's task gets to read what was passed on to it."""
    wire, expected, others = on_the_wire(frames)
    ends = list(accumulate(len(on_the_wire([frame])[0]) for frame in frames))  # roughly: tokens have more digits
    cuts = {cut for cut in (*ends, *(chance.randrange(len(wire) + 1) for _ in frames)) if chance.random() < 0.5}
    seen: list[bytes] = []
    client = Client(lambda token, _: seen.append(token))
    parser = AckParser(
        cast("InnerParser", Parser(client)), INBOX, told(seen), lambda token, _status, _payload: seen.append(token)
    )
    reader = Reader()
    before = chance.choice([0, 0, len(wire) // 2])
    reader.data_received(wire[:before])
    tap = Tap(reader, parser, waiting=before)

    async def feed() -> None:
        for start, end in pairwise(sorted({before, len(wire), *(cut for cut in cuts if before < cut < len(wire))})):
            tap.data_received(wire[start:end])
            if chance.random() < 0.5:
                await reader.read(parser, chance.choice([10, len(wire)]))
        await reader.read(parser, len(wire))

    asyncio.run(feed())
    assert seen == expected
    assert client.others == others


def test_a_plain_ack_does_not_wait_for_a_task() -> None:
    seen: list[bytes] = []
    parser = AckParser(cast("InnerParser", Parser(Client(lambda *_: None))), INBOX, told(seen), lambda *_: None)
    reader = Reader()
    tap = Tap(reader, parser, waiting=0)
    tap.data_received(plain(1) + plain(2))
    assert seen == [b"1", b"2"]
    tap.data_received(b"PING\r\n" + plain(3))
    tap.data_received(plain(4))  # behind what waits in the reader
    assert (seen, reader.buffer) == ([b"1", b"2"], b"PING\r\n" + plain(3) + plain(4))


@pytest.mark.parametrize("subject", [b"other", INBOX + b".9"])
def test_what_looks_like_an_ack_inside_of_a_message_is_none(subject: bytes) -> None:
    seen: list[bytes] = []
    parser = AckParser(cast("InnerParser", Parser(Client(lambda *_: None))), INBOX, told(seen), lambda *_: None)
    reader = Reader()
    tap = Tap(reader, parser, waiting=0)
    tap.data_received(b"MSG %b 1 %d\r\n" % (subject, len(plain(7))))
    asyncio.run(reader.read(parser, 1000))
    tap.data_received(plain(7))
    assert (seen, reader.buffer) == ([], plain(7))


def test_plain_acks_come_many_at_a_time_and_others_with_status_and_payload() -> None:
    runs: list[tuple[list[bytes], list[bytes]]] = []
    replies: list[tuple[bytes, bytes, bytes]] = []
    parser = AckParser(
        cast("InnerParser", Parser(Client(lambda *_: None))),
        INBOX,
        lambda *acks: runs.append(acks),
        lambda *reply: replies.append(reply),
    )
    data = plain(1) + plain(2) + headed(3) + plain(4, text=b'{"stream":"S","seq":0,"duplicate":true}') + plain(5)
    asyncio.run(cast("Any", parser.parse(data)))
    assert runs == [([b"1", b"2"], [b"2", b"3"]), ([b"5"], [b"6"])]
    assert replies == [(b"3", b"503", b""), (b"4", b"", b'{"stream":"S","seq":0,"duplicate":true}')]


# ------------------------------------------------------------------------------------------------------------- meaning


def test_answers_are_read() -> None:
    assert read(b"", b'{"stream":"S", "seq":7}') == Ack("S", 7, duplicate=False)
    assert read(b"", b'{"stream":"S","seq":7,"duplicate":true}') == Ack("S", 7, duplicate=True)
    assert read(b"503", b"").code == 503
    refused = read(b"", b'{"error":{"code":400,"err_code":10054,"description":"too big"},"stream":"S","seq":0}')
    assert (refused.code, refused.error) == (10054, "too big")


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"nonsense", b'{"seq":1}', b'{"stream":"S","seq":"x"}', b'{"error":1}']
)
def test_what_is_no_answer_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(b"", payload)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *(
            (code, SinkUnavailable)
            for code in (503, 10002, 10008, 10009, 10023, 10047, 10077, 10118, 10158, 10163, 10167)
        ),
        *((code, str) for code in (10054, 10097)),
        *((code, SetupError) for code in (10109, 10174, 10205)),
        *((code, ProtocolError) for code in (10071, 12345)),
    ],
)
def test_error_classes(code: int, kind: type) -> None:
    assert type(judge(Ack("", 0, duplicate=False, code=code, error="text"), "events.a")) is kind


def test_sequence_zero_is_not_stored() -> None:
    assert judge(Ack("S", 5, duplicate=True), "a") is None
    assert isinstance(judge(Ack("S", 0, duplicate=True), "a"), SinkUnavailable)


# -------------------------------------------------------------------------------------------------------------- window

NAMES = HeaderNames.of(("id", "type"))
TRANSACTION = Transaction(1, 1, 0.0, b"")


def event(number: int, key: bytes | None = b"k", **changes: Any) -> Event:
    event_id = b"e%d" % number
    made = Event(event_id, "events.a", key, NAMES, (event_id, b"t"), b"{}", "t", TRANSACTION, number)
    return made._replace(**changes)


def batch(*events: Event) -> Batch:
    return Batch(list(events), LSN(0))


class Wire:
    """A connection that keeps what is sent, and counts the unacknowledged events of each key."""

    inbox = INBOX
    max_payload = 1000

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []  # token, id
        self.aborted = False

    def send(self, frames: list[Frame]) -> None:
        for frame in frames:
            line, rest = b"".join(frame).split(b"\r\n", 1)
            verb, _, reply, size, total = line.split(b" ")
            assert verb == b"HPUB"
            assert len(rest) == int(total) + 2
            assert rest.endswith(b"\r\n")
            headers = rest[: int(size)].split(b"\r\n")
            assert headers[0] == b"NATS/1.0"
            assert headers[-2:] == [b"", b""]
            self.sent.append((reply.removeprefix(INBOX + b"."), headers[1].removeprefix(b"Nats-Msg-Id: ")))

    def abort(self) -> None:
        self.aborted = True

    @property
    def ids(self) -> list[bytes]:
        return [event_id for _, event_id in self.sent]


def find(_: str) -> StreamState:
    return StreamState("S", ("events.>",), None)


def opened(*, strict: bool = True) -> tuple[Window, Wire]:
    wire = Wire()
    return Window(cast("NatsConnection", wire), find, strict=strict, ack_timeout=30), wire


async def test_a_key_has_one_event_on_the_wire_across_batches() -> None:
    window, wire = opened()
    first = window.submit(batch(event(1), event(2), event(3, b"other")))
    second = window.submit(batch(event(4), event(5, None), event(6, None)))
    assert wire.ids == [b"e1", b"e3", b"e5"]
    window.on_acks([b"1", b"3"], [])
    assert wire.ids[3:] == [b"e2"]
    assert not first.future.done()
    window.on_acks([b"2", b"5"], [])
    assert wire.ids[4:] == [b"e4", b"e6"]
    assert list(await first.future) == []
    window.on_acks([b"4", b"6"], [])
    assert list(await second.future) == []
    assert window.on_the_wire == 0


async def test_relaxed_sends_everything_at_once() -> None:
    window, wire = opened(strict=False)
    flight = window.submit(batch(event(1), event(2), event(3)))
    assert wire.ids == [b"e1", b"e2", b"e3"]
    window.on_acks([b"3", b"1", b"2"], [])
    assert list(await flight.future) == []


async def test_a_failure_leaves_only_what_is_not_known_to_be_durable() -> None:
    window, wire = opened()
    first, second = batch(event(1, b"a"), event(2, b"b"), event(3, b"a")), batch(event(4, b"b"))
    flights = [window.submit(first), window.submit(second)]
    window.on_acks([b"2"], [])
    window.fail(SinkUnavailable("gone", hint="wait"))
    assert wire.aborted
    for flight in flights:
        with pytest.raises(SinkUnavailable, match="gone"):
            await flight.future
    assert [e.id for e in first.events] == [b"e1", b"e3"]
    assert [e.id for e in second.events] == [b"e4"]
    assert first.count == 3
    with pytest.raises(SinkUnavailable):
        window.submit(batch(event(5)))
    window.on_acks([b"1"], [])  # late
    window.on_reply(b"3", b"", b"nonsense")
    assert [e.id for e in first.events] == [b"e1", b"e3"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"header_values": (b"e2", b"a\nb")}, "line break"),
        ({"header_values": (b"e2", b"a\rb")}, "line break"),
        ({"header_values": (b"e2", b"a\0b")}, "NUL"),
        ({"id": b"e2\r\nNats-Rollup: all"}, "line break"),
        ({"body": b"x" * 1000}, "max_payload"),
        ({"topic": "events.*"}, "wildcard"),
        ({"topic": "events. a"}, "space"),
        ({"header_names": HeaderNames(("a b", "c"))}, "header name"),
        ({"header_names": HeaderNames(("nats-rollup", "c"))}, "header name"),
        ({"header_names": HeaderNames(("a\r\nb", "c"))}, "header name"),
    ],
)
async def test_what_can_never_be_sent_is_rejected_and_stops_only_its_key(bad: dict[str, Any], why: str) -> None:
    window, wire = opened()
    culprit = event(2, **bad)
    flight = window.submit(batch(event(1), culprit, event(3), event(4, b"other")))
    later = window.submit(batch(event(5), event(6, b"other")))
    window.on_acks([b"1", b"4"], [])
    window.on_acks([b"6"], [])
    rejected = await flight.future
    assert [r.event for r in rejected] == [culprit, event(3)]
    assert why in rejected[0].reason
    assert "behind" in rejected[1].reason
    assert [r.event.id for r in await later.future] == [b"e5"]
    assert wire.ids == [b"e1", b"e4", b"e6"]


async def test_an_event_that_the_server_rejects_takes_back_its_lane_until_it_is_submitted_again() -> None:
    window, wire = opened()
    first = window.submit(batch(event(1), event(2), event(3, b"other")))
    second = window.submit(batch(event(4)))
    window.on_acks([b"3"], [])
    window.on_reply(b"1", b"", b'{"error":{"code":400,"err_code":10054,"description":"too big"},"stream":"S","seq":0}')
    assert [(r.event.id, r.reason) for r in await first.future] == [
        (b"e1", "JetStream: too big (10054)"),
        (b"e2", "behind rejected event e1 of the same key"),
    ]
    assert [r.event.id for r in await second.future] == [b"e4"]
    assert wire.ids == [b"e1", b"e3"]
    assert [r.event.id for r in await window.submit(batch(event(5))).future] == [b"e5"]
    again_first = window.submit(batch(event(1), event(2)))
    window.on_acks([wire.sent[-1][0]], [])
    window.on_acks([wire.sent[-1][0]], [])
    assert list(await again_first.future) == []
    assert wire.ids[2:] == [b"e1", b"e2"]


async def test_duplicates_are_stored_and_counted_and_sequence_zero_fails() -> None:
    window, wire = opened()
    flight = window.submit(batch(event(1), event(2)))
    window.on_reply(b"1", b"", b'{"stream":"S","seq":9,"duplicate":true}')
    assert window.duplicates == 1
    assert wire.ids == [b"e1", b"e2"]
    window.on_reply(b"2", b"", b'{"stream":"S","seq":0,"duplicate":true}')
    with pytest.raises(SinkUnavailable, match="seq 0"):
        await flight.future
    assert [e.id for e in flight.batch.events] == [b"e2"]


async def test_a_batch_behind_a_stream_lookup_is_sent_in_its_turn() -> None:
    window, wire = opened()
    missing = True

    def sometimes(topic: str) -> StreamState:
        if topic == "events.new" and missing:
            raise SetupError("no stream")
        return find(topic)

    window._find = sometimes
    first = window.submit(batch(event(1, topic="events.new")))
    second = window.submit(batch(event(2)))
    assert (first.lookup, second.lookup) == (True, False)
    assert wire.sent == []
    missing = False
    window.release()
    assert wire.ids == [b"e1"]
    window.on_acks([b"1"], [])
    assert wire.ids == [b"e1", b"e2"]
    missing = True
    third = window.submit(batch(event(3, topic="events.new2")))
    window.on_acks([b"2", b"3"], [])
    assert list(await third.future) == []


@given(
    st.lists(st.lists(st.sampled_from([b"a", b"b", b"c", None]), max_size=8), max_size=8),
    st.lists(st.integers(0, 50), max_size=80),
)
def test_any_order_of_acks_keeps_each_key_in_order_with_one_on_the_wire(
    batches: list[list[bytes | None]], picks: list[int]
) -> None:
    async def run() -> None:
        window, wire = opened()
        expected: dict[bytes | None, list[bytes]] = defaultdict(list)
        flights: list[Flight] = []
        key_of: dict[bytes, bytes | None] = {}
        number = 0
        for keys in batches:
            events = []
            for key in keys:
                number += 1
                events.append(event(number, key))
                expected[key].append(b"e%d" % number)
                key_of[b"e%d" % number] = key
            flights.append(window.submit(batch(*events)))
        unacknowledged = list(wire.sent)
        choices = iter(picks)
        while unacknowledged:
            keys_out = [key_of[event_id] for _, event_id in unacknowledged]
            assert len(keys_out) == len(set(keys_out)) == window.on_the_wire
            token, _ = unacknowledged.pop(next(choices, 0) % len(unacknowledged))
            before = len(wire.sent)
            window.on_acks([token], [])
            unacknowledged += wire.sent[before:]
        for key, ids in expected.items():
            assert [event_id for event_id in wire.ids if key_of[event_id] == key] == ids
        for flight in flights:
            assert list(await flight.future) == []
        window.fail(SinkUnavailable("end"))

    asyncio.run(run())


def test_an_error_is_copied_with_its_hint() -> None:
    error: RelayError = SetupError("text", hint="remedy")
    copy = again(error)
    assert (type(copy), str(copy), copy.hint) == (SetupError, "text", "remedy")
    assert copy is not error
