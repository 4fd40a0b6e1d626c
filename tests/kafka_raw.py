"""Just enough of Kafka's protocol to leave a transaction open for ever, as a broker can by itself (kafka_hanging)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from relay.event import Event

_INIT_PRODUCER_ID, _PRODUCE = 22, 0
_BUSY = 51


def hang(bootstrap: str, transactional_id: str, partition: int, events: Sequence[Event]) -> None:
    """Records of a transaction that its coordinator knows nothing of; the broker must not verify it."""
    host, _, port = bootstrap.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        name = _text(transactional_id)
        error = _BUSY
        while error == _BUSY:  # the transaction before is being ended
            answer = _ask(wire, _INIT_PRODUCER_ID, 1, name + struct.pack(">i", 60_000))
            _, error, producer, epoch = struct.unpack(">ihqh", answer[:16])
        assert error == 0, error
        batch = _batch(events, producer, epoch)
        body = name + struct.pack(">hii", -1, 30_000, 1) + _text(events[0].topic)
        body += struct.pack(">iii", 1, partition, len(batch)) + batch
        answer = _ask(wire, _PRODUCE, 7, body)
        (error,) = struct.unpack_from(">h", answer, 4 + 2 + len(events[0].topic) + 4 + 4)
        assert error == 0, error


def _ask(wire: socket.socket, api: int, version: int, body: bytes) -> bytes:
    message = struct.pack(">hhi", api, version, 1) + _text("tests") + body
    wire.sendall(struct.pack(">i", len(message)) + message)
    with wire.makefile("rb") as answers:
        (size,) = struct.unpack(">i", answers.read(4))
        return answers.read(size)[4:]


def _batch(events: Sequence[Event], producer: int, epoch: int) -> bytes:
    records = b"".join(_record(number, event) for number, event in enumerate(events))
    now = int(time.time() * 1000)
    transactional = 0x10
    rest = struct.pack(">hiqqqhii", transactional, len(events) - 1, now, now, producer, epoch, 0, len(events))
    rest += records
    return struct.pack(">qiibI", 0, 4 + 1 + 4 + len(rest), -1, 2, _crc32c(rest)) + rest


def _record(number: int, event: Event) -> bytes:
    body = b"\0" + _varint(0) + _varint(number) + _bytes(event.key) + _bytes(event.body)
    headers = list(event.headers())
    body += _varint(len(headers)) + b"".join(_bytes(name.encode()) + _bytes(value) for name, value in headers)
    return _varint(len(body)) + body


def _bytes(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
