"""The verdict: what the broker holds, read once more from its first to its last message, against what was committed.

    lost          committed, not in the broker
    phantom       in the broker, never committed
    duplicates    stored more than once (the same id)
    reordered     the first occurrences of a key are not in the order of its commits
    late repeats  a repeat that stands behind a later event of its key: seen only by those who do not dedupe
    wrong bodies  not what the writer wrote, or under another key

`Comparison` is pure; the readers below bring it what the brokers hold.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import nats
import orjson
from confluent_kafka import Consumer, KafkaError, TopicPartition
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from tests.chaos.harness.stage import STREAMS, TOPICS
from tests.chaos.harness.tail import consumer_options, id_of, message_id
from tests.chaos.harness.writers import Entry, body_of

_SHOWN = 200  # of each list; the counts are complete


class Held(NamedTuple):
    """A message in the broker; `where` is the stream or partition, in which order counts, `at` its place there."""

    id: uuid.UUID | None
    key: str | None
    body: bytes
    where: str
    at: int


@dataclass
class Findings:
    committed: int = 0
    stored: int = 0
    lost: list[dict[str, Any]] = field(default_factory=list)
    phantom: list[dict[str, Any]] = field(default_factory=list)
    duplicates: list[dict[str, Any]] = field(default_factory=list)
    reordered: list[dict[str, Any]] = field(default_factory=list)
    wrong_bodies: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, what: str, **values: Any) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        listed = getattr(self, what, None)
        if listed is not None and len(listed) < _SHOWN:
            listed.append(values)

    def count(self, what: str) -> int:
        return self.counts.get(what, 0)


class Comparison:
    """Takes messages one by one, in the order of each stream or partition."""

    def __init__(self, committed: Iterable[Entry], rolled_back: set[uuid.UUID]) -> None:
        self._truth = {entry.id: entry for entry in committed}
        self._rolled_back = rolled_back
        self._first: dict[uuid.UUID, tuple[str, int]] = {}
        self._newest: dict[str, tuple[int, str, int]] = {}  # key → number, where, at
        self.findings = Findings(committed=len(self._truth))

    def take(self, held: Held) -> None:
        found, entry = self.findings, self._truth.get(held.id) if held.id else None
        found.stored += 1
        if entry is None:
            was = "rolled back" if held.id in self._rolled_back else "unknown"
            found.note("phantom", id=str(held.id), where=held.where, at=held.at, was=was)
            return
        if not _right(held, entry):
            found.note(
                "wrong_bodies",
                id=str(entry.id),
                where=held.where,
                at=held.at,
                body=held.body[:500].decode("utf-8", "replace"),
            )
        number, where, at = self._newest.get(entry.key, (0, held.where, -1))
        if entry.id in self._first:
            before = self._first[entry.id]
            found.note(
                "duplicates",
                id=str(entry.id),
                key=entry.key,
                number=entry.number,
                first=before,
                again=(held.where, held.at),
            )
            if entry.number < number:
                found.note("late_repeats")
            return
        self._first[entry.id] = (held.where, held.at)
        if where != held.where:
            found.note("reordered", key=entry.key, number=entry.number, where=held.where, at=held.at, behind=where)
        elif entry.number < number:
            found.note(
                "reordered",
                id=str(entry.id),
                key=entry.key,
                number=entry.number,
                where=where,
                at=held.at,
                behind=number,
                behind_at=at,
            )
        if entry.number > number:
            self._newest[entry.key] = (entry.number, held.where, held.at)

    def done(self) -> Findings:
        for entry in self._truth.values():
            if entry.id not in self._first:
                self.findings.note("lost", id=str(entry.id), key=entry.key, number=entry.number)
        return self.findings


def _right(held: Held, entry: Entry) -> bool:
    try:
        return bool(orjson.loads(held.body) == body_of(entry)) and held.key == entry.key
    except orjson.JSONDecodeError:
        return False


async def read_jetstream(url: str, take: Callable[[Held], None], timeout: float = 600.0) -> None:
    """All messages of all streams, by sequence."""
    client = await nats.connect(url)
    deadline = time.monotonic() + timeout
    try:
        js = client.jetstream()
        for stream in STREAMS:
            try:
                state = (await js.stream_info(stream)).state
            except NotFoundError:
                continue
            at = 0

            async def hold(message: Msg, stream: str = stream) -> None:
                nonlocal at
                at = message.metadata.sequence.stream
                headers = message.headers or {}
                take(Held(id_of(headers.get("id", "")), headers.get("aggregate-id"), message.data, stream, at))

            everything = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
            subscription = await js.subscribe("", stream=stream, ordered_consumer=True, config=everything, cb=hold)
            while state.messages and at < state.last_seq:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{stream}: read {at} of {state.last_seq} in {timeout:g} s")
                await asyncio.sleep(0.05)
            await subscription.unsubscribe()
    finally:
        await client.close()


def read_kafka(bootstrap: str, take: Callable[[Held], None], timeout: float = 600.0) -> None:
    """All committed messages of all partitions, by offset."""
    deadline = time.monotonic() + timeout
    consumer = Consumer(consumer_options(bootstrap))
    try:
        for topic in TOPICS:
            for partition in consumer.list_topics(topic, timeout=30).topics[topic].partitions:
                consumer.assign([TopicPartition(topic, partition, 0)])
                at_end = False
                while not at_end:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{topic}/{partition} could not be read in {timeout:g} s")
                    for message in consumer.consume(1000, timeout=0.5):
                        if (error := message.error()) is not None:
                            at_end = at_end or error.code() == KafkaError._PARTITION_EOF
                            continue
                        key = (message.key() or b"").decode()
                        offset = message.offset() or 0
                        take(Held(message_id(message), key, message.value() or b"", f"{topic}/{partition}", offset))
    finally:
        consumer.close()
