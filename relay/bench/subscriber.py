"""A consumer in a process of its own: notes when each event was written and when it arrived.

`python -m relay.bench.subscriber jetstream|kafka ADDRESS NAME OUT live|stored` prints "ready" once nothing can be
missed. `live`: on SIGTERM it waits until nothing more arrives, and writes its notes. `stored`: it reads what is stored
by now, writes its notes, and waits for SIGTERM.

It shares the machine with what it measures, so it must be cheap: NATS frames are cut from the socket's bytes here (a
client library costs ten times as much), and events are told apart by the row's number, in one byte per row.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from urllib.parse import unquote, urlsplit

import orjson

_ROW = re.compile(rb'"t\\*": ?(\d+), ?\\*"item\\*": ?\\*"(\d+)')  # bench_payload() puts them there; maybe escaped
_QUIET = 0.5
_INBOX = "_INBOX.relaybench"
_MADE = b".made"


class Notes:
    """Times of all arrivals, and which rows they were."""

    def __init__(self, *, live: bool) -> None:
        self.written = array("q")
        self.arrived = array("q")
        self.seen = bytearray()
        self.live = live
        self.stopping = False
        self.complete = False  # everything that was stored at the beginning has been read
        self.events = 0
        self.last = time.monotonic()

    def arrivals(self, bodies: Iterator[bytes]) -> None:
        """What came at once. The clock is read first: taking the pieces apart is our time, not the tool's."""
        now = time.time_ns() // 1000
        before = self.events
        for body in bodies:
            self.events += 1
            found = _ROW.search(body)
            if found is None:
                continue
            item = int(found[2])
            if item >= len(self.seen):
                self.seen.extend(bytes(item + 1024 - len(self.seen)))
            self.seen[item] = 1
            if self.live:
                self.written.append(int(found[1]))
                self.arrived.append(now)
        if self.events != before:
            self.last = time.monotonic()

    @property
    def done(self) -> bool:
        return self.complete or (self.stopping and time.monotonic() - self.last > _QUIET)

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        self.stopping = True
        self.last = time.monotonic()

    def save(self, path: Path) -> None:
        """Whole or not at all: whoever sees the file may read it."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(
            orjson.dumps(
                {
                    "written": self.written.tolist(),
                    "arrived": self.arrived.tolist(),
                    "events": self.events,
                    "distinct": self.seen.count(1),
                }
            )
        )
        partial.rename(path)


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
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition  # noqa: PLC0415

    from relay.bench.broker import topic  # noqa: PLC0415

    signal.signal(signal.SIGTERM, notes.stop)
    options = {"bootstrap.servers": address, "group.id": name, "enable.auto.commit": False}
    consumer = Consumer({**options, "enable.partition.eof": not notes.live})  # live, every event would come with one
    partitions = consumer.list_topics(topic(name), timeout=10.0).topics[topic(name)].partitions
    consumer.assign([TopicPartition(topic(name), number, OFFSET_BEGINNING) for number in partitions])
    first = consumer.poll(1.0)  # connects
    print("ready", flush=True)
    left = set(partitions)

    def bodies(messages: list[Message]) -> Iterator[bytes]:
        for each in messages:
            if (error := each.error()) is None:
                yield each.value() or b""
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  its public name
                left.discard(each.partition() or 0)
                notes.complete = not notes.live and not left

    while not notes.done:
        message, first = first if first is not None else consumer.poll(0.1), None
        if message is not None:  # and what came with it, at much less than a poll for each
            notes.arrivals(bodies([message, *consumer.consume(1000, 0)]))
    consumer.close()


def main() -> None:
    kind, address, name, out, how = sys.argv[1:]
    notes = Notes(live=how == "live")
    (jetstream if kind == "jetstream" else kafka)(address, name, notes)
    notes.save(Path(out))
    while not notes.stopping:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
