"""Fenced publishing against a model of a stream: whatever is cut, lost, late or killed, each event is stored once.

The model keeps what the server promises (facts measured on real servers, tests/integration/test_jetstream_fenced.py):
a message is stored only directly behind the sequence that it expects. The sink is the real one; only its connection is
the model's, so that every frame and every answer can be lost at will.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relay.config import JetStream, Stream
from relay.errors import SinkUnavailable, TransientError
from relay.event import Batch, Event, Rejected
from relay.lsn import LSN
from relay.sink import UNCOUNTABLE, jetstream
from relay.sink.jetstream import JetStreamSink
from relay.sink.nats_connection import ApiError, Frame
from relay.sink.nats_streams import OWNED
from relay.sink.subjects import covers
from tests.sinks import ORIGIN, make_event

_HPUB = re.compile(rb"HPUB (\S+) (?:(\S+) )?(\d+) (\d+)\r\n")
_NUMBERS = itertools.count()
REACH = 24  # events that a connection may have on the wire
LIMIT = 2000  # the model's max_msg_size: larger bodies are refused by the server, not by the sink


class Message:
    """A stored message; `there` ends when a consumer of a work queue takes it."""

    def __init__(self, headers: bytes, body: bytes) -> None:
        self.headers = headers
        self.body = body
        self.there = True
        self.id = re.search(rb"\r\nid: (.*?)\r\n", headers)[1]  # type: ignore[index]
        expected = re.search(rb"Nats-Expected-Last-Sequence: (\d+)\r\n", headers)
        self.expected = None if expected is None else int(expected[1])


class Server:
    """Streams with expected-last-sequence semantics, and optionally a dedupe window that never ends.

    `drops`: it decides of an event late that it cannot have it, and takes those behind it one place further ahead, as
    the leader of a replicated stream does for what it has proposed already. Whoever is told is told.
    """

    def __init__(self, streams: Mapping[str, str], *, dedupes: bool, drops: Callable[[], bool] = lambda: False) -> None:
        self.drops = drops
        self.dropped = dict.fromkeys(streams, 0)  # since it was asked for its state
        self.subjects = dict(streams)
        self.stored: dict[str, list[Message]] = {name: [] for name in streams}
        self.dedupes = dedupes
        self.staged: dict[tuple[str, bytes], list[Message]] = {}  # of batches that are not committed
        self.cut: list[bytes] = []  # frames of the connection that was cut, not processed yet
        self.late: list[bytes] = []  # those that may still come

    def process(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Reply subject and answer."""
        head = _HPUB.match(data)
        assert head is not None, data
        size, total = int(head[3]), int(head[4])
        block, body = data[head.end() : head.end() + size], data[head.end() + size : head.end() + total]
        assert data[head.end() + total :] == b"\r\n" and block.endswith(b"\r\n\r\n"), "the sizes are right"
        name = next(name for name, subject in self.subjects.items() if covers(subject, head[1].decode()))
        stream = self.stored[name]
        message = Message(block, body)
        if batch := re.search(rb"Nats-Batch-Id: (\S+)\r\nNats-Batch-Sequence: (\d+)\r\n", block):
            staged = self.staged.setdefault((name, batch[1]), [])
            if int(batch[2]) == len(staged) + 1 and len(body) <= LIMIT:  # else the batch stays incomplete
                staged.append(message)
            if b"\r\nNats-Batch-Commit: 1\r\n" not in block:
                return None
            answer = self._commit(name, staged, int(batch[2]))
            staged.clear()
            return head[2], answer
        if len(body) > LIMIT:
            answer = b'{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}}'
        elif message.expected != len(stream) + self.dropped[name]:
            answer = b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: %d"}}' % len(stream)
        elif self.drops():
            self.dropped[name] += 1
            answer = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}'
        elif self.dedupes and (seq := next((n for n, m in enumerate(stream, 1) if m.id == message.id), 0)):
            answer = b'{"stream":"%b","seq":%d,"duplicate":true}' % (name.encode(), seq)
        else:
            stream.append(message)
            answer = b'{"stream":"%b", "seq":%d}' % (name.encode(), len(stream))
        return (head[2], answer) if head[2] else None

    def _commit(self, name: str, staged: list[Message], count: int) -> bytes:
        stream = self.stored[name]
        if len(staged) != count:
            return b'{"error":{"code":400,"err_code":10176,"description":"atomic publish batch is incomplete"}}'
        if self.dedupes and {message.id for message in staged} & {message.id for message in stream}:
            return b'{"error":{"code":400,"err_code":10201,"description":"contains duplicate message id"}}'
        if staged[0].expected != len(stream):
            return b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: %d"}}' % len(stream)
        stream += staged
        return b'{"stream":"%b","seq":%d,"batch":"x","count":%d}' % (name.encode(), len(stream), count)


class Connection:
    """Stands for NatsConnection: frames and answers wait until the test lets them pass."""

    server: Server
    max_payload = 10_000
    version = (2, 15, 1)

    def __init__(self, config: JetStream, *, direct: bool) -> None:
        self.discovered: list[str] = []
        self.inbox = b"_INBOX.%d" % next(_NUMBERS)
        self.out: deque[bytes] = deque()
        self.answers: deque[tuple[bytes, bytes]] = deque()
        self.listener: Any = None

    async def open(self, listener: Any, known: list[str]) -> None:
        self.listener = listener

    joins = True

    def listen(self, listener: Any) -> None:
        self.listener = listener

    def send(self, frames: list[Frame]) -> None:
        data = b"".join(b"".join(frame) for frame in frames)
        while head := _HPUB.match(data):
            end = head.end() + int(head[4]) + 2
            self.out.append(data[:end])
            data = data[end:]
        assert not data

    async def request(self, subject: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        name = subject.rpartition(".")[2]
        stream = self.server.stored[name]
        if ".INFO." in subject:
            self.server.dropped[name] = 0
            there = [seq for seq, message in enumerate(stream, 1) if message.there]
            return {
                "config": {
                    "name": name,
                    "subjects": [self.server.subjects[name]],
                    "description": OWNED,
                    "allow_atomic": True,
                    "duplicate_window": 120 * 10**9 if self.server.dedupes else 0,
                },
                "state": {"first_seq": there[0] if there else len(stream) + 1, "last_seq": len(stream)},
            }
        assert payload is not None
        message = stream[payload["seq"] - 1]
        if not message.there:
            raise ApiError(404, 10037, "no message found")
        return {"message": {"hdrs": base64.b64encode(message.headers).decode()}}

    def step(self) -> None:
        """The server takes one frame."""
        if self.out and (answer := self.server.process(self.out.popleft())):
            self.answers.append(answer)

    def deliver(self) -> None:
        if self.answers:
            subject, payload = self.answers.popleft()
            token = subject.rpartition(b".")[2]
            if b"error" in payload or b"duplicate" in payload or b"batch" in payload:
                self.listener.on_reply(token, b"", payload)
            else:
                self.listener.on_acks([token], re.findall(rb'"seq":(\d+)', payload))

    def abort(self) -> None:
        self.server.cut.extend(self.out)  # in the server's buffers: it may still take them
        self.out.clear()
        self.answers.clear()

    async def close(self) -> None:
        self.abort()


class World:
    """Postgres, the broker and relays that live and die; `chance` decides everything."""

    def __init__(
        self,
        chance: random.Random,
        *,
        count: int,
        consuming: bool,
        reorders: bool,
        dedupes: bool,
        atomic: bool = False,
        drops: bool = False,
    ) -> None:
        self.chance = chance
        self.consuming = consuming
        self.reorders = reorders
        self.crashing = True
        drop = (lambda: self.crashing and chance.random() < 0.01) if drops else lambda: False
        self.server = Server({"A": "a.>", "B": "b.>"}, dedupes=dedupes, drops=drop)
        topics = ("a.x", "b.x", "a.y")
        self.stream = [
            make_event(n, topic=topics[chance.randrange(3)], key=b"k%d" % chance.randrange(4)) for n in range(count)
        ]
        self.table = self._shuffled()
        self.done: set[bytes] = set()  # what the checkpoint covers
        self.marks: dict[str, int] = {}
        self.order: list[Event] | None = self.stream  # in which events came since the checkpoint; None: in several
        config = JetStream(
            streams=(Stream(name="A", subjects=("a.>",)), Stream(name="B", subjects=("b.>",))),
            mode="fenced",
            atomic=atomic,
        )
        self.sink = JetStreamSink(config, reach=REACH)

    def _shuffled(self) -> list[Event]:
        """Another order with the same order per key: as the table has it when its writers do not serialise."""
        lanes: dict[bytes | None, deque[Event]] = defaultdict(deque)
        for event in self.stream:
            lanes[event.key].append(event)
        order = []
        while lanes:
            key = self.chance.choice(sorted(lanes, key=str))
            order.append(lanes[key].popleft())
            if not lanes[key]:
                del lanes[key]
        return order

    async def run(self) -> None:
        for life in range(60):
            if len(self.done) == len(self.stream):
                return
            calm = life > 30  # let it end
            await self._live(crashes=not calm)
        raise AssertionError("it does not end")

    async def _live(self, *, crashes: bool) -> None:
        self.crashing = crashes
        chance, sink = self.chance, self.sink
        order = self.stream if not self.reorders or chance.random() < 0.5 else self.table
        same = self.order is order
        self.order = order if same else None
        todo = deque(event for event in order if event.id not in self.done)
        done, marks = set(self.done), dict(self.marks)
        window: deque[tuple[Batch, asyncio.Task[Any] | None, set[bytes]]] = deque()
        up = settled = False
        shown: set[bytes] = set()
        while todo or window:
            if not up:
                sink.resume(marks if same else {**marks, UNCOUNTABLE: 1}, ORIGIN)
                self._renew()
                self._arrive_late()
                await sink.open()
                if self.marks == {}:
                    self.marks = dict(sink.marks)  # the beginning, saved before anything is published
                marks = dict(sink.marks)
                shown = {message.id for messages in self.server.stored.values() for message in messages}
                up, same, settled = True, True, False
                self._arrive_late()
                for index, (batch, task, ids) in enumerate(window):
                    batch.settled = False
                    window[index] = (batch, task or asyncio.create_task(_publish(sink, batch)), ids)
            settled = settled or shown <= done
            connection: Any = sink._connection
            what = chance.random()
            if what < 0.25 and todo and len(window) < 4:
                events = [todo.popleft() for _ in range(min(len(todo), chance.randint(1, 6)))]
                batch = Batch(events, LSN(0), settled=settled)
                window.append((batch, asyncio.create_task(_publish(sink, batch)), {event.id for event in events}))
            elif what < 0.6:
                connection.step()
            elif what < 0.85:
                connection.deliver()
            elif what < 0.88 and crashes:
                connection.listener.on_lost(SinkUnavailable("cut"))
            elif what < 0.93 and done != self.done:
                self.done, self.marks, self.order = set(done), dict(marks), order
            elif what < 0.94 and crashes:
                for _, task, _ in window:
                    if task is not None:
                        task.cancel()
                await sink.close()
                self.sink = JetStreamSink(sink._config, reach=REACH)
                return
            elif what < 0.97 and self.consuming:
                self._consume()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            up = self._complete(window, done, marks)
            if not up:
                await asyncio.gather(*(task for _, task, _ in window if task is not None))
                for index, (batch, task, ids) in enumerate(window):
                    failed = task is not None and isinstance(task.result(), TransientError)
                    window[index] = (batch, None if failed else task, ids)
                await sink.close()
        self.done, self.marks, self.order = done, marks, order

    @staticmethod
    def _complete(window: deque[Any], done: set[bytes], marks: dict[str, int]) -> bool:
        """Finish what is finished, first-in first-out; False if the sink has failed."""
        while window and window[0][1] is not None and window[0][1].done():
            batch, task, ids = window[0]
            if isinstance(task.result(), TransientError):
                return False
            assert task.result() == []
            done |= ids
            marks |= batch.marks
            window.popleft()
        return not any(
            task is not None and task.done() and isinstance(task.result(), TransientError) for _, task, _ in window
        )

    def _renew(self) -> None:
        """Another connection. Where the order changes, frames of the last one before it may be late, not older ones:

        a fence by sequence cannot tell those from ours (docs/guarantees.md, what is not promised).
        """
        server = self.server
        server.late, server.cut = [*([] if self.reorders else server.late), *server.cut], []

    def _arrive_late(self) -> None:
        late = self.server.late
        for _ in range(self.chance.randint(0, len(late))):
            self.server.process(late.pop(0))
        if self.chance.random() < 0.5:
            late.clear()

    def _consume(self) -> None:
        for messages in self.server.stored.values():
            for message in messages[: self.chance.randint(0, len(messages))]:
                message.there = self.chance.random() < 0.2

    def stored(self) -> list[bytes]:
        return [message.id for messages in self.server.stored.values() for message in messages]

    def check(self, *, duplicates: bool = False) -> None:
        ids = self.stored()
        assert {event.id for event in self.stream} == set(ids), "nothing is lost"
        if duplicates:
            return
        assert len(ids) == len(set(ids)), "nothing is stored twice"
        events = {event.id: event for event in self.stream}
        for messages in self.server.stored.values():
            order: dict[bytes | None, list[int]] = defaultdict(list)
            for message in messages:
                event = events[message.id]
                order[event.key].append(event.transaction.xid)
            assert all(numbers == sorted(numbers) for numbers in order.values()), "order per key"


async def _publish(sink: JetStreamSink, batch: Batch) -> list[Rejected] | TransientError:
    try:
        return list(await sink.publish(batch))
    except TransientError as exc:
        return exc


@pytest.fixture(autouse=True)
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "NatsConnection", Connection)


def simulate(seed: int, **options: Any) -> World:
    world = World(random.Random(seed), **options)
    Connection.server = world.server
    asyncio.run(world.run())
    return world


_MANY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.guarantee("G4")
@_MANY
@given(st.integers(0, 1 << 32), st.booleans(), st.booleans(), st.integers(1, 200), st.booleans())
@example(2000, True, False, 38, False)  # an event of a wave was in time from an earlier connection, in another's place
@example(1994, True, False, 120, False)
def test_each_event_is_stored_once_and_in_order(
    seed: int, reorders: bool, dedupes: bool, count: int, atomic: bool
) -> None:
    """Lives in the order of the stream and of the table, cuts at any frame, lost and late frames, lost answers."""
    simulate(seed, count=count, consuming=False, reorders=reorders, dedupes=dedupes, atomic=atomic).check()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
@_MANY
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(60, 200))
def test_an_event_that_is_dropped_while_those_behind_it_are_taken(seed: int, dedupes: bool, count: int) -> None:
    """Nobody says so to an event that asks for no answer: the sequence of the one that speaks for it does.

    It comes again behind the others; and what is late may be stored twice then, at another place than its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "REACH", 6)
        simulate(seed, count=count, consuming=False, reorders=False, dedupes=dedupes, drops=True).check(duplicates=True)


@pytest.mark.guarantee("G4")
@_MANY
@given(st.integers(0, 1 << 32), st.integers(1, 60))
def test_messages_that_consumers_took_are_counted(seed: int, count: int) -> None:
    """A work queue: what is gone is known by its place, as long as events come in the same order."""
    simulate(seed, count=count, consuming=True, reorders=False, dedupes=False).check()


@pytest.mark.guarantee("G1")
@_MANY
@given(st.integers(0, 1 << 32), st.integers(1, 60))
def test_nothing_is_lost_where_counting_is_not_possible(seed: int, count: int) -> None:
    simulate(seed, count=count, consuming=True, reorders=True, dedupes=False).check(duplicates=True)


@pytest.mark.guarantee("G4")
def test_a_stream_without_a_leader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that answer for themselves may be behind: that is no stream that lost events which it acknowledged."""
    Connection.server = Server({"A": "a.>"}, dedupes=False)
    request = Connection.request

    async def leaderless(self: Connection, subject: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        return await request(self, subject, payload) | {"cluster": {"name": "relay", "replicas": []}}

    monkeypatch.setattr(Connection, "request", leaderless)
    sink = JetStreamSink(JetStream(streams=(Stream(name="A", subjects=("a.>",)),), mode="fenced"))
    sink.resume({"A": 3}, ORIGIN)
    with pytest.raises(SinkUnavailable, match="no leader"):
        asyncio.run(sink.open())
