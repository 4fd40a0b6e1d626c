"""A consumer in a process of its own: notes when each event was written and when it arrived.

`python -m relay.bench.subscriber jetstream|kafka|pipe ADDRESS NAME OUT live|stored` prints "ready" once nothing can be
missed. `live`: on SIGTERM it waits until nothing more arrives, and writes its notes. `stored`: it reads what is stored
by now, writes its notes, and waits for SIGTERM.

It shares the machine with what it measures, so it must be cheap: NATS frames are cut from the socket's bytes here (a
client library costs ten times as much), and of Kafka only offsets and their times are noted while the tool runs.
"""

from __future__ import annotations

import bisect
import json
import os
import select
import signal
import socket
import ssl
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from relay.bench.kafka_fetch import Leader, fetched
from relay.bench.notes import Notes

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_INBOX = "_INBOX.relaybench"
_MADE = b".made"


class Frames:
    """Cuts a NATS connection's bytes into messages; answers what the server asks meanwhile."""

    def __init__(self, connection: socket.socket, inbox: str) -> None:
        self._connection = connection
        self._inbox = inbox.encode()
        self._rest = b""
        self.answer = b""  # to the request for a consumer; events may come in the same breath

    def bodies(self, data: bytes) -> Iterator[bytes]:
        data = self._rest + data
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            line = data[at:end].split()
            kind = line[0] if line else b""
            if kind in {b"MSG", b"HMSG"}:
                total = int(line[-1])
                head = int(line[-2]) if kind == b"HMSG" else 0
                body = end + 2 + head
                stop = end + 2 + total
                if stop + 2 > len(data):
                    break
                if line[1] == self._inbox:
                    self._status(line, data[end + 2 : body])
                elif line[1] == self._inbox + _MADE:
                    self.answer = data[body:stop]
                else:
                    yield data[body:stop]
                at = stop + 2
                continue
            if kind == b"PING":
                self._connection.sendall(b"PONG\r\n")
            elif kind == b"-ERR":
                raise SystemExit(f"nats-server: {data[at:end].decode()}")
            at = end + 2
        self._rest = data[at:]

    def _status(self, line: list[bytes], head: bytes) -> None:
        """Flow control is answered, or the server would wait for us."""
        if head.startswith(b"NATS/1.0 100") and len(line) == 6:
            self._connection.sendall(b"PUB " + line[3] + b" 0\r\n\r\n")
        elif b"Nats-Consumer-Stalled: " in head:
            reply = head.split(b"Nats-Consumer-Stalled: ", 1)[1].split(b"\r\n", 1)[0]
            self._connection.sendall(b"PUB " + reply + b" 0\r\n\r\n")


def _connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), timeout=10.0)
    connection.recv(1 << 16)  # INFO
    if parts.scheme == "tls":
        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname)
    options: dict[str, object] = {"verbose": False, "headers": True, "no_responders": True, "lang": "python"}
    if parts.username and parts.password is None:
        options["auth_token"] = unquote(parts.username)
    elif parts.username:
        options |= {"user": unquote(parts.username), "pass": unquote(parts.password or "")}
    connection.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
    while not (answer := connection.recv(1 << 16)).endswith(b"PONG\r\n"):
        if answer.startswith(b"-ERR") or not answer:
            raise SystemExit(f"nats-server: {answer.decode()}")
    return connection


def jetstream(address: str, name: str, notes: Notes) -> None:
    signal.signal(signal.SIGTERM, notes.stop)
    connection = _connect(address)
    inbox = f"{_INBOX}.{name}"
    config = {
        "deliver_subject": inbox,
        "deliver_policy": "all",
        "ack_policy": "none",
        "replay_policy": "instant",
        "max_deliver": 1,
        "mem_storage": True,
        "flow_control": True,
        "idle_heartbeat": 5_000_000_000,
    }
    body = json.dumps({"stream_name": name, "config": config}).encode()
    ask = f"SUB {inbox} 1\r\nSUB {inbox}.made 2\r\nPUB $JS.API.CONSUMER.CREATE.{name} {inbox}.made {len(body)}\r\n"
    connection.sendall(ask.encode() + body + b"\r\n")
    frames = Frames(connection, inbox)
    connection.settimeout(10.0)
    while not frames.answer:
        notes.arrivals(frames.bodies(connection.recv(1 << 16)))
    if "error" in (answer := json.loads(frames.answer)):
        raise SystemExit(f"nats-server: {answer['error']}")
    expected = answer["delivered"]["consumer_seq"] + answer["num_pending"]
    print("ready", flush=True)
    connection.settimeout(0.1)
    while not notes.done:
        notes.complete = not notes.live and notes.events >= expected
        try:
            data = connection.recv(1 << 20)
        except TimeoutError:
            continue
        if not data:
            raise SystemExit("nats-server closed the connection")
        notes.arrivals(frames.bodies(data))
    connection.close()


def kafka(address: str, name: str, notes: Notes) -> None:
    """Live, only offsets and times are noted; what they hold is read from the beginning when nothing more arrives."""
    from confluent_kafka import Consumer  # noqa: PLC0415

    from relay.bench.broker import topic  # noqa: PLC0415

    signal.signal(signal.SIGTERM, notes.stop)
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": name,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    layout = consumer.list_topics(topic(name), timeout=10.0)
    partitions = layout.topics[topic(name)].partitions
    arrivals: dict[int, list[tuple[int, int]]] = {number: [] for number in partitions}
    if notes.live:
        led = defaultdict[int, list[int]](list)
        for number, partition in partitions.items():
            led[partition.leader].append(number)
        brokers = layout.brokers
        leaders = [Leader((brokers[each].host, brokers[each].port), topic(name), led[each]) for each in led]
        for leader in leaders:
            leader.ask()
        print("ready", flush=True)
        while not notes.done:
            for at, span in fetched(leaders, 0.1):
                notes.last = time.monotonic()
                arrivals[span.partition].append((span.end, at))
        for leader in leaders:
            leader.close()
    else:
        print("ready", flush=True)
    _read_all(consumer, topic(name), arrivals, notes)


def _read_all(consumer: Consumer, topic: str, arrivals: Mapping[int, list[tuple[int, int]]], notes: Notes) -> None:
    """Everything that is stored by now; live, with the time at which the offset arrived."""
    from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition  # noqa: PLC0415

    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in arrivals])
    left = set(arrivals)
    while left:
        for each in consumer.consume(1000, 0.1):
            number, offset, error = each.partition() or 0, each.offset() or 0, each.error()
            if error is None:
                at = bisect.bisect_right(arrivals[number], offset, key=itemgetter(0))
                notes.note(each.value() or b"", arrivals[number][at][1] if at < len(arrivals[number]) else None)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  its public name
                left.discard(number)
    notes.complete = True
    consumer.close()


def pipe(path: str, _name: str, notes: Notes) -> None:
    """What another process reads, as it comes. The payloads are found wherever they are."""
    signal.signal(signal.SIGTERM, notes.stop)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nobody has to write yet
    print("ready", flush=True)
    rest = b""
    while not notes.done:
        ready, _, _ = select.select([end], (), (), 0.1)
        data = os.read(end, 1 << 20) if ready else b""
        if ready and not data:
            time.sleep(0.01)  # nobody writes
        rest = notes.stretch(rest + data)
    os.close(end)


def main() -> None:
    kind, address, name, out, how = sys.argv[1:]
    notes = Notes(live=how == "live")
    {"jetstream": jetstream, "kafka": kafka, "pipe": pipe}[kind](address, name, notes)
    notes.save(Path(out))
    while not notes.stopping:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
